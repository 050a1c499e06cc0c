"""The suffix automaton against brute force."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ssr.suffix_automaton import SuffixAutomaton, SuffixMatch

tokens = st.lists(st.integers(0, 3), max_size=40)


def occurrences(sequence, pattern):
    """Indices just past each occurrence of `pattern` in `sequence`."""
    n = len(pattern)
    return [i + n for i in range(len(sequence) - n + 1) if sequence[i : i + n] == pattern]


@given(tokens)
@settings(deadline=None, max_examples=300)
def test_longest_repeat(sequence):
    automaton = SuffixAutomaton()
    for n, token in enumerate(sequence, 1):
        automaton.extend(token)
        prefix = sequence[:n]
        expected = max((k for k in range(n) if any(e < n for e in occurrences(prefix, prefix[n - k :]))), default=0)
        length, follow = automaton.longest_repeat()
        assert length == expected
        assert automaton.longest_repeat() == (length, follow)
        if length:
            assert follow < n and prefix[follow - length : follow] == prefix[n - length :]


@given(tokens, tokens)
@settings(deadline=None, max_examples=300)
def test_match_of_another_text(sequence, text):
    match = SuffixMatch(SuffixAutomaton(sequence))
    for n, token in enumerate(text, 1):
        match.advance(token)
        suffixes = [text[n - k : n] for k in range(1, n + 1)]
        assert match.length == max((len(s) for s in suffixes if occurrences(sequence, s)), default=0)
        length, follow = match.continuation()
        continued = [s for s in suffixes if any(end < len(sequence) for end in occurrences(sequence, s))]
        assert length == max((len(s) for s in continued), default=0)
        if length:
            assert follow < len(sequence) and sequence[follow - length : follow] == text[n - length : n]


def test_size_and_work_stay_linear():
    rng = random.Random(0)
    for alphabet in (1, 2, 50):
        sequence = [rng.randrange(alphabet) for _ in range(5000)]
        automaton = SuffixAutomaton(sequence)
        assert len(automaton._next) <= 2 * len(sequence)
        assert sum(len(n) for n in automaton._next) <= 3 * len(sequence)


def test_a_repeat_continues_from_its_latest_place():
    automaton = SuffixAutomaton([1, 2, 7, 1, 2, 8, 1, 2])
    assert automaton.longest_repeat() == (2, 5)  # after the second `1 2`, where 8 followed
