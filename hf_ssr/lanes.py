"""Lanes: texts that are being written. The parent, in its thought or its answer, is one; a child is another."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from transformers import StoppingCriteriaList

from .choosing import Chooser
from .costs import RoundClock
from .draft_sources import DraftSources
from .drafting import Draft, Drafter, Evidence
from .following import Decisions, by_blocks, by_tokens, exact
from .metrics import SSRMetrics
from .output import Stream
from .rows import Row
from .think_state import ThinkingState


class Lane:
    """
    A text that is being written. A round moves every lane on, by a token at least.

    Args:
        row (`Row`): the text so far.
        drafter ([`Drafter`]): proposes what may come next.
    """

    done = False
    ended_by = ""  # why a child drafts no more

    def __init__(self, row: Row, drafter: Drafter):
        self.row = row
        self.drafter = drafter

    @property
    def child(self) -> "Lane | None":
        """The lane that drafts for it."""
        return None

    @property
    def lanes(self) -> list["Lane"]:
        """Its child, if there is one, and itself."""
        return [self] if self.child is None else [self.child, self]

    @property
    def is_child(self) -> bool:
        """Whether it drafts for another lane."""
        return self.row.origin is not None

    @property
    def is_thinking(self) -> bool:
        """Whether a thought is open, after which there is a draft to verify."""
        return False

    def limit(self, most: int) -> int:
        """Tokens to draft, where at most so many may be fed."""
        return max(0, min(self.drafter.num_draft_tokens, most))

    def behind_forced(self, draft: Draft, most: int) -> Draft:
        """A draft of what comes next, with what comes in any case in front of it; at most so many tokens."""
        return draft

    def phase(self, draft: Draft) -> str:
        """Of the metrics, for a forward over such a draft."""
        raise NotImplementedError

    def decide(self, draft: Draft, logits: torch.Tensor) -> Decisions:
        """What comes next, by the lane's rule. Arguments as of [`follow`]."""
        raise NotImplementedError

    def take(self, token: int, source: str | None) -> bool:
        """The next token, which was drafted from `source`. Whether the round may go on behind it."""
        raise NotImplementedError

    def part(self, token: int, evidence: Evidence) -> None:
        """The text is about to take a token that was not proposed; `evidence` of the place before it."""

    def note(self, draft: Draft, phase: str, kept: int, has_parted: bool) -> None:
        """So many tokens of a draft were kept, and whether a token of the target's own came behind them."""

    def count_forward(self, phase: str, seconds: float) -> None:
        """The lane took part in a forward."""

    def timed(self) -> AbstractContextManager:
        """Around what the lane does of a round."""
        return nullcontext()

    def end_round(self) -> None:
        """Every lane has gone on."""

    def end(self, reason: str) -> None:
        """A child drafts no more."""


class Forks(Protocol):
    """What a parent asks of its [`Stages`]."""

    @property
    def child(self) -> Lane | None:
        """Of the stage that is going on."""

    @property
    def tokens_until_budget(self) -> int:
        """Tokens that the thought may grow by before a budget that was asked for."""

    def begin_before(self, token: int, evidence: Evidence) -> None:
        """A stage may begin in front of a token of the thought."""

    def end(self, reason: str) -> None:
        """The child drafts no more."""


class Parent(Lane):
    """
    One prompt and its output. Does what plain `generate` does for each token, in the same order: pick it, append it,
    ask the stopping criteria, stream it.

    Args:
        row (`Row`): the prompt; its text is the output.
        chooser ([`Chooser`]): picks the tokens.
        sources ([`DraftSources`]): what may be drafted from.
        stopping_criteria (`StoppingCriteriaList`): as `generate` prepares them.
        stream ([`Stream`]): is given each token.
        metrics ([`SSRMetrics`]): counts tokens.
        counts_forwards (`bool`): whether they are the row's own, in a batch.
    """

    stages: Forks  # [`Stages`], which are made for it

    def __init__(
        self,
        row: Row,
        chooser: Chooser,
        sources: DraftSources,
        stopping_criteria: StoppingCriteriaList,
        stream: Stream,
        metrics: SSRMetrics,
        counts_forwards: bool = False,
    ):
        self.thinking: ThinkingState = chooser.thinking
        super().__init__(row, sources.first_drafter(self.thinking.open))
        self.prompt_length = row.length
        self.chooser, self.clock = chooser, chooser.clock
        self.sources = sources
        self.stopping_criteria = stopping_criteria
        self.stream, self.metrics = stream, metrics
        self._counts_forwards = counts_forwards
        self._speculates_thinking = chooser.config.setting("speculate_thinking")
        self._is_in_thought = self.thinking.open

    @property
    def is_thinking(self) -> bool:
        """Whether a thought is open."""
        return self.thinking.open

    @property
    def child(self) -> Lane | None:
        """The child of the stage that is going on."""
        return self.stages.child

    def limit(self, most: int) -> int:
        """Tokens to draft; not past a budget that was asked for."""
        if self.thinking.open:
            most = min(most, self.stages.tokens_until_budget) if self._speculates_thinking else 0
        return super().limit(most)

    def phase(self, draft: Draft) -> str:
        """Of the metrics."""
        if self.thinking.open:
            return "thinking" if self.child is None else "drafting"
        return "verify" if draft.is_prefix else "speculate"

    def decide(self, draft: Draft, logits: torch.Tensor) -> Decisions:
        """By the rule of the settings; by the exact one where nothing was drawn."""
        if self._keeps_then(draft):
            is_block = self.chooser.config.rule == "block" and self.chooser.processors_keep_no_state
            return (by_blocks if is_block else by_tokens)(self.chooser, draft, logits)
        return exact(draft, self.chooser.picks(logits))

    def _keeps_then(self, draft: Draft) -> bool:
        """Whether the rule may keep the token drafted behind the draft too."""
        return self.chooser.config.rule in ("speculative", "block") and any(q is not None for q in draft.probs)

    def take(self, token: int, source: str | None) -> bool:
        """The next token. The round ends where the text does, and where a thought opens or closes."""
        was_open = self.thinking.open
        self._emit(token, source)
        self.drafter.observe(token)
        return not self.done and self.thinking.open == was_open

    @RoundClock.as_plain
    def _emit(self, token: int, source: str | None) -> None:
        self.row.append(token)
        self.metrics.add_token(source)
        was_open = self.thinking.open
        self.thinking.push(token)
        if self.thinking.open and not was_open:
            self._is_in_thought = True
            self.drafter = self.sources.drafter_of_thought()
        self.done = bool(self.stopping_criteria(self.row.ids, self.chooser.scores).all())
        if self.stream.streamer is not None:
            self.stream.put(self.row.last.clone())

    def part(self, token: int, evidence: Evidence) -> None:
        """A stage may begin in front of a token of the thought."""
        if self.thinking.open:
            self.stages.begin_before(token, evidence)

    def note(self, draft: Draft, phase: str, kept: int, has_parted: bool) -> None:
        """For the metrics."""
        metrics = self.metrics
        if phase in ("thinking", "drafting"):
            metrics.thinking_drafted_tokens += len(draft.ids)
            metrics.thinking_accepted_tokens += kept
            return
        verified = len(draft.ids) + (self._keeps_then(draft) and draft.then is not None)
        metrics.add_round(draft, verified, kept, has_parted)

    def count_forward(self, phase: str, seconds: float) -> None:
        """A step of the answer past the first mismatch looks for a draft, whether it finds one or not."""
        self.metrics.forwards[phase] += self._counts_forwards
        self.metrics.lookups += phase == "speculate"

    def end_round(self) -> None:
        """A child that has ended leaves its draft; a thought that has ended is followed by the answer."""
        if self.child is not None and self.child.ended_by:
            self.child.end(self.child.ended_by)
        if self._is_in_thought and (self.done or not self.thinking.open):
            self.stages.end("stop" if self.thinking.open else "close")
            self._is_in_thought = self.thinking.open
            if not self.done:
                self.drafter = self.sources.drafter_of_answer()
