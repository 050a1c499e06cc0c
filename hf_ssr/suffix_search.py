"""What may come next, from what is written: along a draft, past a mismatch, or where the text's suffix occurred.

Integers only; no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .draft_records import AcceptanceRecord
from .suffix_automaton import SuffixAutomaton, SuffixMatch

MOST_DRAFTS = 16  # older drafts are forgotten: each source costs time at every token
LONGEST_KIND = 8  # matches and runs that are longer count as one kind


def _indexed(tokens: SuffixAutomaton | Sequence[int]) -> SuffixAutomaton:
    return tokens if isinstance(tokens, SuffixAutomaton) else SuffixAutomaton(tokens)


@dataclass(eq=False)
class Source:
    """
    A token sequence to draft from, and the longest suffix of the text that occurs in it.

    Args:
        name (`str`): draft, thought, prompt or answer.
        automaton ([`SuffixAutomaton`]): of the sequence.
        match ([`SuffixMatch`], *optional*): `None`: it is the text itself, matched against its own past.
        owner (`Any`, *optional*): what its caller knows it by.
    """

    name: str
    automaton: SuffixAutomaton
    match: SuffixMatch | None
    owner: Any = None

    @property
    def tokens(self) -> list[int]:
        return self.automaton.tokens

    def continuation(self) -> tuple[int, int]:
        """Length of the match, and the index where it goes on."""
        return self.automaton.longest_repeat() if self.match is None else self.match.continuation()


class Proposal(NamedTuple):
    """
    Tokens that may come next.

    Args:
        ids (`list[int]`): these; empty = nothing to propose.
        source ([`Source`], *optional*): where they are from.
        begin (`int`): where they begin there.
        is_prefix (`bool`): whether they go on from the beginning of a draft that has agreed so far.
        is_unseen (`bool`): whether no decision has looked at that draft so far.
        kind (`str`): how they were found. Proposals of a kind are kept about equally often.
        chance (`float`): how often a token of such a proposal was kept so far, if those before it were.
    """

    ids: list[int]
    source: Source | None = None
    begin: int = 0
    is_prefix: bool = False
    is_unseen: bool = False
    kind: str = ""
    chance: float = 1.0


class SuffixSearch:
    """
    Follows one source at a time, the alignment, and searches for a new place when it is lost.

    After a mismatch it supposes a substitution: the source goes on behind the token that differs, and wherever the old
    token comes again, the new one is proposed (a renamed variable). If the next token differs too, it takes the place
    near by that the last tokens match best (after an insertion or a deletion), or the source in which the longest
    suffix of the text occurs: whichever kind of draft has been kept more often so far.

    Args:
        sources (`Sequence[str]`): which to use, of draft, thought, prompt, answer.
        min_match_length (`int`): fewest tokens of a suffix that occurs in a source.
        reach (`int`): tokens. So far from a lost place it looks for one near by, so many of the last ones it compares,
            and after so many that differ it gives up.
        tail (`Sequence[int]`): what may stand between a thought's close and the answer; a draft may have it or lack it.
        own (`str`): what the text is: `"answer"` or `"thought"`.
        record ([`AcceptanceRecord`], *optional*): of drafts so far, in texts of this kind.
        written (`SuffixAutomaton`, *optional*): what the text goes on from, of the same kind; grows with it.

    Example: the draft is `a b c d b`, the text `a x`. `x` differs from `b`, so `c d x` is proposed next.
    """

    def __init__(
        self,
        sources: Sequence[str],
        min_match_length: int,
        reach: int,
        tail: Sequence[int] = (),
        own: str = "answer",
        record: AcceptanceRecord | None = None,
        written: SuffixAutomaton | None = None,
    ):
        self.record = AcceptanceRecord() if record is None else record
        self._names = tuple(sources)
        self._min_match_length = min_match_length
        self._reach = reach
        self._tail = tuple(tail)
        self.written = SuffixAutomaton() if written is None else written  # the text that was observed
        self._sources = [Source(own, self.written, None)] if own in self._names else []
        self._recent: list[int] = []  # last tokens of the text
        self._begin = 0
        self._follow(None, 0)

    def add(self, name: str, tokens: SuffixAutomaton | Sequence[int]) -> None:
        """One more source, not a draft; it may still grow. Of equally long matches, an earlier source wins."""
        if name in self._names and (name != "answer" or len(tokens)):
            automaton = _indexed(tokens)
            self._sources.append(Source(name, automaton, SuffixMatch(automaton)))

    def add_draft(self, tokens: SuffixAutomaton | Sequence[int], begin: int | None = 0, owner: Any = None) -> None:
        """
        A draft of what comes next: followed from its token `begin`, if there is one, and searched before older drafts.
        """
        if "draft" in self._names and len(tokens):
            automaton = _indexed(tokens)
            self._sources.insert(0, Source("draft", automaton, SuffixMatch(automaton), owner))
            drafts = [source for source in self._sources if source.name == "draft"]
            for source in drafts[MOST_DRAFTS:]:
                self._sources.remove(source)
            if begin is not None:
                self._follow(self._sources[0], begin)
                self._begin = begin
                self._is_prefix = self._is_unseen = True

    def observe(self, token: int) -> None:
        """The next token of the text."""
        for source in self._sources:
            if source.match is not None:
                source.match.advance(token)
        self.written.extend(token)
        self._recent.append(token)
        del self._recent[: -self._reach]
        if self._source is not None:
            self._align(self._source.tokens, token)

    def propose(self, limit: int) -> Proposal:
        """At most `limit` tokens that may come next."""
        if limit <= 0:
            return Proposal([])
        if self._source is None or self._misses or self._position >= len(self._source.tokens):
            self._realign()
        if self._source is None or self._misses > 1:
            return Proposal([])
        ids = self._source.tokens[self._position : self._position + limit]
        if self._renamed:
            ids = [self._renamed.get(token, token) for token in ids]
        kind, chance = self._kind, self.record.chance(self._kind)
        return Proposal(ids, self._source, self._position, self._is_prefix, self._is_unseen, kind, chance)

    @property
    def _kind(self) -> str:
        """Drafts of a kind are kept about equally often."""
        if self._is_prefix:
            return "prefix"
        if self._run == 0 and self._matched:
            return f"match {min(self._matched, LONGEST_KIND)}"
        return f"aligned {min(self._run, LONGEST_KIND)}"

    def _follow(self, source: Source | None, position: int, matched: int = 0) -> None:
        self._source = source
        self._position = position  # of the token that should come next
        self._matched = matched  # tokens of the suffix that led here
        self._run = 0  # tokens that agreed since, halved at each miss
        self._misses = 0  # tokens since the last that agreed
        self._renamed: dict[int, int] = {}  # tokens of the source, and what the text has in their places
        self._is_prefix = self._is_unseen = False

    def _align(self, tokens: list[int], token: int) -> None:
        """Moves on in the source's tokens by one of the text."""
        there = tokens[self._position] if self._position < len(tokens) else None
        agrees = there is not None and self._renamed.get(there, there) == token
        self._is_unseen = self._is_unseen and agrees
        if agrees:
            self._position += 1
            self._run += 1
            self._misses = 0
        elif self._is_prefix and self._position == self._begin == 0 and token in self._tail:
            pass  # the draft lacks what leads to the answer
        elif self._is_prefix and self._position == self._begin == 0 and self._lacks_tail(tokens, token):
            self._position = len(self._tail) + 1
        else:
            self._is_prefix = False
            self._misses += 1
            self._run = min(self._run, 2 * LONGEST_KIND) // 2  # what agreed for long will agree again
            self._matched = 0
            if self._misses == 1 and there is not None:
                self._renamed[there] = token  # suppose a substitution
                self._position += 1
            elif self._misses > self._reach:
                self._follow(None, 0)

    def _lacks_tail(self, tokens: list[int], token: int) -> bool:
        """Whether the text goes without the tail that the draft begins with."""
        tail = self._tail
        return tuple(tokens[: len(tail)]) == tail and tokens[len(tail) : len(tail) + 1] == [token]

    def _realign(self) -> None:
        """Goes on where drafts have been kept most often: here, near by, or where the longest suffix occurred."""
        best, place, matched = 0.0, 0, 0
        if self._source is not None and self._misses <= 1 and self._position < len(self._source.tokens):
            best = self.record.chance(self._kind)
        elif self._source is not None and self._misses > 1:
            matched, place = self._best_position_near(self._source.tokens)
            best = self.record.chance(f"match {min(matched, LONGEST_KIND)}") if matched else 0.0
        length, source, position = 0, None, 0
        for candidate in self._sources:
            found, follow = candidate.continuation()
            if found > length:
                length, source, position = found, candidate, follow
        if length >= self._min_match_length and self.record.chance(f"match {min(length, LONGEST_KIND)}") > best:
            self._follow(source, position, length)
        elif matched:
            self._position, self._matched, self._misses, self._run = place, matched, 0, 0
        elif self._source is not None and self._position >= len(self._source.tokens):
            self._follow(None, 0)

    def _best_position_near(self, tokens: list[int]) -> tuple[int, int]:
        """How many of the last tokens match near the lost place, and the position behind them."""
        reach, recent = self._reach, self._recent
        first, last = max(1, self._position - reach), min(len(tokens) - 1, self._position + reach)
        best, place = 0, 0
        for index, token in enumerate(tokens[first - 1 : last], first):
            if token == recent[-1]:  # `index` is behind it
                matched = 1
                while matched < min(len(recent), index) and tokens[index - 1 - matched] == recent[-1 - matched]:
                    matched += 1
                nearness = -abs(index - self._position)
                if (matched, nearness) > (best, -abs(place - self._position)):
                    best, place = matched, index
        return best, place
