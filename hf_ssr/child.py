"""The child: the fork that drafts the answer while its parent thinks, and how it picks its tokens."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import LogitsProcessorList

from .choosing import DraftSampling
from .drafting import Draft, Drafter
from .following import Decisions, exact
from .lanes import Lane
from .metrics import SSRMetrics
from .output import Stream
from .rows import Row
from .verifying import DraftProbs


class Child(Lane):
    """
    The fork of the text that closes the thought early and drafts the answer: one token a step, or as many as its own
    drafter proposes and it would have picked itself. So an earlier draft is gone through in a few steps.

    It has its own random generator, and calls only processors that have no state: nothing of the parent's is touched.

    Args:
        row (`Row`): its text, forked from the parent's.
        draft_budget (`int`): thinking tokens before the fork.
        forced_close (`Sequence[int]`): the tokens that close the thought; they are not chosen.
        logits_processor (`LogitsProcessorList`): of the parent, see [`child_processors`].
        sampling ([`DraftSampling`]): how it picks its tokens.
        eos_ids (`set[int]`): tokens that end the draft.
        drafter ([`Drafter`]): proposes what the child may pick; is told what it picks.
        max_draft_length (`int`, *optional*): most drafted tokens.
        stream ([`Stream`]): is shown the draft.
        metrics ([`SSRMetrics`]): of the parent, which waits while the child picks.
        end (`Callable[[str], None]`): ends the stage, for a reason of [`Stage`].
    """

    def __init__(
        self,
        row: Row,
        draft_budget: int,
        forced_close,
        logits_processor: LogitsProcessorList,
        sampling: DraftSampling,
        eos_ids: set[int],
        drafter: Drafter,
        max_draft_length: int | None,
        stream: Stream,
        metrics: SSRMetrics,
        end: Callable[[str], None],
    ):
        super().__init__(row, drafter)
        self.forwards, self.seconds = 0, 0.0  # that it has taken part in, and what they took
        self.draft_budget = draft_budget
        self.tokens: list[int] = []  # the draft, without the close
        self.probs: list[DraftProbs | None] = []  # what each was drawn from, if `sampling` keeps it
        self._forced = list(forced_close)
        self._processors: Callable[..., torch.Tensor] = logits_processor
        self._picks_likeliest = sampling.temperature == 0 and not logits_processor
        self._sampling = sampling
        self._eos_ids = eos_ids
        self._max_draft_length = max_draft_length
        self._stream, self._metrics, self._end = stream, metrics, end

    def limit(self, most: int) -> int:
        """Tokens to draft behind the close."""
        return super().limit(most - len(self._forced))

    def behind_forced(self, draft: Draft, most: int) -> Draft:
        """What is left of the close, and a draft behind it."""
        forced = self._forced[: max(0, most)]
        return draft.behind(forced)

    def phase(self, draft: Draft) -> str:
        """Of the metrics."""
        return "drafting"

    def decide(self, draft: Draft, logits: torch.Tensor) -> Decisions:
        """The close, then what the child picks: where that is the likeliest token alone, of all places at once."""
        if not self._picks_likeliest:
            return exact(draft, lambda place: self._next(lambda: self._picked(logits[:, place])))
        likeliest = logits[0].float().argmax(dim=-1).tolist()
        return exact(draft, lambda place: self._next(lambda: (likeliest[place], None)))

    def take(self, token: int, source: str | None) -> bool:
        """Appends a token."""
        self.row.append(token)
        if self.row.room <= 0 and not self.ended_by:
            self.ended_by = "max_length"
        return not self.ended_by

    def _picked(self, logits: torch.Tensor) -> tuple[int, DraftProbs | None]:
        ids = self.row.ids
        scores = self._processors(ids, logits.to(copy=True, dtype=torch.float32, device=ids.device))
        return self._sampling.pick(scores, len(self.tokens))

    def _next(self, pick: Callable[[], tuple[int, DraftProbs | None]]) -> int:
        """The next token of the close, or one that the child picks."""
        if self._forced:
            return self._forced.pop(0)
        token, probs = pick()
        self.tokens.append(token)
        self.probs.append(probs)
        self.drafter.observe(token)
        if token in self._eos_ids:
            self.ended_by = "eos"
        elif len(self.tokens) == self._max_draft_length:
            self.ended_by = "max_draft_length"
        return token

    def count_forward(self, phase: str, seconds: float) -> None:
        """The parent's stage tells what it took."""
        self.forwards += 1
        self.seconds += seconds

    def timed(self) -> AbstractContextManager:
        """The parent waits for it."""
        return self._metrics.timed("drafting_exposed")

    def end_round(self) -> None:
        """The draft is shown as it grows."""
        self._stream.preview(self.tokens)

    def end(self, reason: str) -> None:
        """The stage is over."""
        self._end(reason)
