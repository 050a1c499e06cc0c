"""Drafts from what is already written: [`SuffixSearch`] as a [`Drafter`]."""

from collections.abc import Sequence
from typing import NamedTuple

from .drafting import Draft, Drafter
from .metrics import Stage
from .suffix_automaton import SuffixAutomaton
from .suffix_search import SuffixSearch
from .verifying import DraftProbs


class _Drawn(NamedTuple):
    """What is known of a draft: what each token was drawn from, if it was, and whose it is."""

    probs: list[DraftProbs | None] | None
    stage: Stage | None


class SuffixDrafter(Drafter):
    """
    Proposes what [`SuffixSearch`] finds: the place where a draft goes on, or where the longest suffix of the text
    occurred.

    Args:
        sources (`Sequence[str]`): which to use, of draft, thought, prompt, answer.
        min_match_length (`int`): fewest tokens of a suffix that occurs in a source.
        num_draft_tokens (`int`): most tokens of a draft.
        max_length (`int`): most tokens of prompt and output.
        tail (`Sequence[int]`): what may stand between a thought's close and the answer; a draft may have it or lack it.
        own (`str`): what the text is: `"answer"` or `"thought"`.
        record ([`AcceptanceRecord`], *optional*): of drafts so far, in texts of this kind.
        written (`SuffixAutomaton`, *optional*): what the text goes on from, of the same kind; grows with it.
    """

    def __init__(
        self,
        sources,
        min_match_length: int,
        num_draft_tokens: int,
        max_length: int,
        tail=(),
        own="answer",
        record=None,
        written: SuffixAutomaton | None = None,
    ):
        super().__init__(num_draft_tokens, max_length, record)
        self._search = SuffixSearch(sources, min_match_length, num_draft_tokens, tail, own, self.record, written)
        self.written = self._search.written

    @classmethod
    def from_config(cls, config, tail=(), own="answer", record=None, written=None) -> "SuffixDrafter":
        """A drafter with the settings of an [`SSRConfig`] that `generate` has prepared."""
        names = ("sources", "min_match_length", "num_draft_tokens")
        used, min_match_length, num_draft_tokens = (config.setting(name) for name in names)
        return cls(used, min_match_length, num_draft_tokens, config.max_length, tail, own, record, written)

    def add(self, name: str, tokens: SuffixAutomaton | Sequence[int]) -> None:
        """One more source, not a draft."""
        self._search.add(name, tokens)

    def add_draft(
        self,
        tokens: SuffixAutomaton | Sequence[int],
        probs: list[DraftProbs | None] | None = None,
        begin: int | None = 0,
        stage: Stage | None = None,
    ) -> None:
        """
        A draft of what comes next. `probs` are proposed with it until the first token that differs: what a decision has
        looked at counts as not drawn.
        """
        self._search.add_draft(tokens, begin, _Drawn(probs, stage))

    def observe(self, token: int) -> None:
        """The next token of the text."""
        self._search.observe(token)

    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens that may come next."""
        found = self._search.propose(limit)
        if found.source is None:
            return Draft()
        draft = Draft(found.ids, found.source.name, found.is_prefix, found.kind, found.chance)
        if found.source.owner is not None:
            probs, draft.stage = found.source.owner
            if found.is_unseen and probs is not None:
                end = found.begin + limit
                draft.then = next(iter(found.source.tokens[end : end + 1]), None)
                draft.probs = probs[found.begin : end + 1]
        return draft
