"""What proposes tokens: a draft, and the contract of every drafter."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from .draft_records import AcceptanceRecord
from .metrics import Stage
from .suffix_automaton import SuffixAutomaton
from .verifying import DraftProbs


@dataclass
class Draft:
    """
    Proposed tokens.

    Args:
        ids (`list[int]`): the proposed tokens; empty = nothing to propose.
        source (`str`, *optional*): where they come from: draft, thought, prompt or answer, or what a drafter names.
        is_prefix (`bool`): whether they go on from the beginning of a draft that has agreed so far.
        kind (`str`): how they were found. Drafts of a kind are kept about equally often.
        chance (`float`): how often a token of such a draft was kept so far, if those before it were.
        probs (`list[DraftProbs | None]`): what each was drawn from, as far as no decision has looked at it yet. Empty,
            and `None` for a token, where it was not drawn. One longer than `ids` if `then` is there.
        stage (`Stage`, *optional*): whose draft it is.
        then (`int`, *optional*): the token drafted behind `ids`: it needs no forward of its own to be verified.
        parents (`list[int]`, *optional*): of a tree, for each token the index of the one that it comes after; -1 = the
            text's last. No two tokens after the same one are equal. `None` = a chain.
        forced (`int`): of the first so many tokens none is chosen: they come next in any case.
    """

    ids: list[int] = field(default_factory=list)
    source: str | None = None
    is_prefix: bool = False
    kind: str = ""
    chance: float = 1.0
    probs: list[DraftProbs | None] = field(default_factory=list)
    then: int | None = None
    stage: Stage | None = None
    parents: list[int] | None = None
    forced: int = 0

    def after(self, node: int, token: int) -> int | None:
        """The index of a token that comes after the one at `node` (-1 = the text's last), if it was proposed."""
        if self.parents is None:
            return node + 1 if self.ids[node + 1 : node + 2] == [token] else None
        return next((i for i, at in enumerate(self.parents) if at == node and self.ids[i] == token), None)

    def behind(self, forced: list[int]) -> "Draft":
        """The same behind tokens that come in any case."""
        count, parents = len(forced), self.parents
        if parents is not None:
            parents = [*range(-1, count - 1), *(count + max(node, -1) for node in parents)]
        return replace(self, ids=forced + self.ids, parents=parents, forced=count)

    @property
    def chain(self) -> "Draft":
        """For a model that takes no trees: the path over the first token behind each."""
        if self.parents is None:
            return self
        path = [-1]
        while path[-1] in self.parents:
            path.append(self.parents.index(path[-1]))
        return replace(self, ids=[self.ids[node] for node in path[1:]], parents=None, probs=[], then=None)

    def cut(self, length: int) -> None:
        """To its first `length` tokens. What was drafted behind them, and drawn, can still be verified."""
        if length < len(self.ids):
            self.then = self.ids[length] if self.probs else None
            self.ids, self.probs = self.ids[:length], self.probs[: length + 1]
            self.parents = None if self.parents is None else self.parents[:length]


class Evidence(NamedTuple):
    """
    What a forward says of a lane's places: behind the text, and behind each token of the draft.

    Args:
        logits (`torch.FloatTensor` of shape `(1, draft_length + 1, vocab_size)`): of what comes next.
        hidden (`Mapping[int, torch.FloatTensor]`): of each layer that a drafter named, shape
            `(1, draft_length + 1, hidden_size)`.
    """

    logits: torch.Tensor
    hidden: Mapping[int, torch.Tensor] = {}

    def of(self, row: int, begin: int, end: int) -> "Evidence":
        """Of some places of one row."""
        rows, places = slice(row, row + 1), slice(begin, end)
        return Evidence(
            self.logits[rows, places], {layer: states[rows, places] for layer, states in self.hidden.items()}
        )


class Drafter(CandidateGenerator):
    """
    The contract of every drafter: it is told each token of the text, and proposes what may come next.

    As a transformers `CandidateGenerator` it also serves `_assisted_decoding`.

    Args:
        num_draft_tokens (`int`): most tokens of a draft.
        max_length (`int`): most tokens of prompt and output.
        record ([`AcceptanceRecord`], *optional*): of drafts so far.
    """

    layers: Sequence[int] = ()  # of the target, whose hidden states it is shown
    written: SuffixAutomaton  # the text that was observed, and what it goes on from; a child's becomes a draft

    def __init__(self, num_draft_tokens: int, max_length: int, record: AcceptanceRecord | None = None):
        self.record = AcceptanceRecord() if record is None else record
        self._proposed = Draft()
        self.num_draft_tokens = num_draft_tokens
        self.max_length = max_length
        self.length = 0  # tokens of the text that the drafter knows of

    def cost(self, limit: int) -> float:
        """What it would take to draft at most `limit` tokens, in plain steps of the target. It is asked beforehand."""
        return 0.0

    @abstractmethod
    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens that may come next."""

    @classmethod
    def propose_together(cls, drafters: "Sequence[Drafter]", limits: Sequence[int]) -> list[Draft]:
        """Drafts of several texts. A drafter with a model of its own makes one forward for all."""
        return [drafter.propose(limit) for drafter, limit in zip(drafters, limits, strict=True)]

    @abstractmethod
    def observe(self, token: int) -> None:
        """The next token of the text."""

    def add(self, name: str, tokens: SuffixAutomaton | Sequence[int]) -> None:
        """One more source, not a draft; it may still grow. Of equally long matches, an earlier source wins."""

    def add_draft(
        self,
        tokens: SuffixAutomaton | Sequence[int],
        probs: list[DraftProbs | None] | None = None,
        begin: int | None = 0,
        stage: Stage | None = None,
    ) -> None:
        """
        A draft of what comes next: followed from its token `begin`, if there is one, and searched before older drafts.
        `stage` is whose it is, `probs` are what each token was drawn from.
        """

    def show(self, evidence: Evidence, places: Sequence[int]) -> None:
        """
        What the target's forward says of the tokens before those that were observed in this round.

        Args:
            evidence ([`Evidence`]): of all places of the lane. Of the prompt it has no hidden states.
            places (`Sequence[int]`): of these, the kept ones, in the order of the text.
        """

    def get_candidates(  # type: ignore[override]  # transformers' own return `None` too
        self, input_ids: torch.Tensor, **kwargs
    ) -> tuple[torch.Tensor, None]:
        """
        The text with a draft behind it.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): the text so far.

        Returns:
            `tuple[torch.LongTensor, None]`: ids of shape `(1, sequence_length + draft_length)`; no probabilities, as
            the draft is one fixed sequence.
        """
        for token in input_ids[0, self.length :].tolist():
            self.observe(token)
        self.length = input_ids.shape[1]
        draft = self._proposed = self.propose(min(self.num_draft_tokens, self.max_length - self.length - 1))
        return torch.cat([input_ids, input_ids.new_tensor([draft.ids])], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        """What was accepted is seen in the next `input_ids`; how much, is noted."""
        self.record.note(self._proposed, num_matches)
