"""Drafts from what is already written: along a draft, past a mismatch, or where the text's suffix occurred."""

from dataclasses import dataclass

from .drafting import Draft, Drafter
from .suffix_automaton import SuffixAutomaton, SuffixMatch
from .verifying import DraftProbs

DRAFT_PER_MATCHED_TOKEN = 2  # a match of n tokens is worth a draft of 2 n; agreement since then counts as match
MOST_DRAFTS = 16  # older drafts are forgotten: each source costs time at every token
MOST_DISTRUST = 8  # each suffix match in vain asks for a match one token longer, up to this many more


@dataclass(eq=False)
class _Source:
    """A token sequence to draft from, and the longest suffix of the text that occurs in it."""

    name: str
    automaton: SuffixAutomaton
    match: SuffixMatch | None  # None: the answer itself, matched against its own past
    probs: list | None = None  # of a draft: what each token was drawn from

    @property
    def tokens(self) -> list[int]:
        return self.automaton.tokens

    def continuation(self) -> tuple[int, int]:
        """Length of the match, and the index where it goes on."""
        return self.automaton.longest_repeat() if self.match is None else self.match.continuation()


class SuffixDrafter(Drafter):
    """
    Follows one source at a time, the alignment, and searches for a new place when it is lost.

    After a mismatch it first supposes a substitution: the source goes on behind the token that differs. If the next
    token differs too, it takes the place near by that the last tokens match best (after an insertion or a deletion),
    unless a longer suffix of the text occurs in any source. How much is drafted grows with what has agreed and halves
    with each miss, so that a source that does not fit is soon left alone.

    Args:
        sources (`Sequence[str]`): which to use, of draft, thought, prompt, answer.
        min_match_length (`int`): fewest tokens of a suffix that occurs in a source.
        num_draft_tokens (`int`): most tokens of a draft.
        max_length (`int`): most tokens of prompt and output.
        lead (`Sequence[int]`): what may stand between a thought's close and the answer; a draft may have it or lack it.

    Example: the draft is `a b c d e`, the text `a x`. `x` differs from `b`, so `c d e` is proposed next.
    """

    def __init__(self, sources, min_match_length: int, num_draft_tokens: int, max_length: int, lead=()):
        super().__init__(num_draft_tokens, max_length)
        self._names = tuple(sources)
        self._min_match_length = min_match_length
        self._lead = tuple(lead)
        self._full_trust = 4 * num_draft_tokens
        self._answer = SuffixAutomaton()
        self._sources = [_Source("answer", self._answer, None)] if "answer" in self._names else []
        self._recent: list[int] = []  # last tokens of the text
        self._distrust = 0
        self._lose()

    @classmethod
    def from_config(cls, config, lead=()) -> "SuffixDrafter":
        """A drafter with the settings of an [`SSRConfig`] that `generate` has prepared."""
        names = ("sources", "min_match_length", "num_draft_tokens")
        return cls(*(config.setting(name) for name in names), config.max_length, lead)

    def add(self, name: str, tokens) -> None:
        """One more source, prompt or thought. Of equally long matches, one in an earlier source wins."""
        if name in self._names and len(tokens):
            automaton = SuffixAutomaton(tokens)
            self._sources.append(_Source(name, automaton, SuffixMatch(automaton)))

    def add_draft(self, tokens, probs: list[DraftProbs | None] | None = None) -> None:
        """
        A draft of what comes next: followed from its first token, and searched before older ones. `probs` are what each
        token was drawn from; they are proposed with it until the first token that differs: what a decision has looked
        at counts as not drawn.
        """
        if "draft" in self._names and len(tokens):
            automaton = SuffixAutomaton(tokens)
            self._sources.insert(0, _Source("draft", automaton, SuffixMatch(automaton), probs))
            drafts = [source for source in self._sources if source.name == "draft"]
            for source in drafts[MOST_DRAFTS:]:
                self._sources.remove(source)
            self._follow(self._sources[0], 0, self._full_trust)
            self._is_prefix = self._is_unseen = True

    def begin_answer(self) -> None:
        """The thought is over: what matched before it does not tell what follows it."""
        self._lose()
        self._recent.clear()
        for source in self._sources:
            if source.match is not None:
                source.match = SuffixMatch(source.automaton)

    def observe(self, token: int) -> None:
        """The next token of the text."""
        for source in self._sources:
            if source.match is not None:
                source.match.advance(token)
        self._answer.extend(token)
        self._recent.append(token)
        del self._recent[: -self.num_draft_tokens]
        if self._source is not None:
            self._align(token)

    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens that may come next."""
        if self._source is None or self._misses > 1 or self._position >= len(self._source.tokens):
            self._realign()
        if self._source is None or self._misses > 1 or limit <= 0:
            return Draft()
        begin, end = self._position, self._position + min(limit, self._trust)
        draft = Draft(self._source.tokens[begin:end], self._source.name, self._is_prefix)
        if self._is_unseen and self._source.probs is not None:
            draft.then = next(iter(self._source.tokens[end : end + 1]), None)
            draft.probs = self._source.probs[begin : end + 1]
        return draft

    def _follow(self, source: _Source, position: int, trust: int) -> None:
        self._source: _Source | None = source
        self._position = position  # of the token that should come next
        self._trust = trust  # most tokens to draft from here
        self._misses = 0  # tokens since the last that agreed
        self._is_prefix = self._is_unseen = self._is_found = False

    def _lose(self) -> None:
        self._source = None
        self._position = self._trust = self._misses = 0
        self._is_prefix = self._is_unseen = self._is_found = False

    def _align(self, token: int) -> None:
        """Moves on by one token of the text."""
        tokens = self._source.tokens
        agrees = self._position < len(tokens) and tokens[self._position] == token
        self._is_unseen = self._is_unseen and agrees
        if self._is_found:  # by a search; was it worth it?
            self._distrust = 0 if agrees else min(self._distrust + 1, MOST_DISTRUST)
            self._is_found = False
        if agrees:
            self._position += 1
            self._misses = 0
            self._trust = min(self._trust + 1, self._full_trust)
        elif self._is_prefix and self._position == 0 and token in self._lead:
            pass  # the draft lacks what leads to the answer
        elif self._is_prefix and self._position == 0 and self._lacks_lead(token):
            self._position = len(self._lead) + 1
        else:
            self._is_prefix = False
            self._misses += 1
            if self._misses <= 2:  # what was proposed, then what was supposed, was wrong
                self._trust //= 2
            if self._misses == 1:
                self._position += 1  # suppose a substitution
            if self._trust < self._min_match_length or self._misses > self.num_draft_tokens:
                self._lose()

    def _lacks_lead(self, token: int) -> bool:
        """Whether the text goes without the lead that the draft begins with."""
        tokens, lead = self._source.tokens, self._lead
        return tuple(tokens[: len(lead)]) == lead and tokens[len(lead) : len(lead) + 1] == [token]

    def _realign(self) -> None:
        """Takes the place that the last tokens match best, near the one that was lost or found by suffix search."""
        near, place = self._best_place_near()
        length, source, position = 0, None, 0
        for candidate in self._sources:
            matched, follow = candidate.continuation()
            if matched > length:
                length, source, position = matched, candidate, follow
        if length > near and length >= self._min_match_length + self._distrust:
            self._follow(source, position, min(DRAFT_PER_MATCHED_TOKEN * length, self._full_trust))
            self._is_found = True
        elif near:
            self._follow(self._source, place, self._trust)
        elif self._source is not None and self._position >= len(self._source.tokens):
            self._lose()

    def _best_place_near(self) -> tuple[int, int]:
        """How many of the last tokens match near the lost place, and the position behind them."""
        if self._source is None or self._misses < 2:
            return 0, 0
        tokens, reach = self._source.tokens, self.num_draft_tokens
        best, place = 0, 0
        first, last = max(1, self._position - reach), min(len(tokens) - 1, self._position + reach)
        for position in sorted(range(first, last + 1), key=lambda p: abs(p - self._position)):
            matched = 0
            while (
                matched < min(len(self._recent), position)
                and tokens[position - 1 - matched] == self._recent[-1 - matched]
            ):
                matched += 1
            if matched > best:
                best, place = matched, position
        return best, place
