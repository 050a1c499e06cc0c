"""The child: the fork that drafts the answer while its parent thinks, and how it picks its tokens."""

from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList

from .drafting import ANSWER, Draft, Drafter
from .rows import Row
from .verifying import DraftProbs, gumbel_choice

MOST_PROBS_BYTES = 2**28  # of one draft: 200 tokens of a distribution over 160,000, or any length under a top-k


class Child:
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
    """

    def __init__(
        self,
        row: Row,
        draft_budget: int,
        forced_close,
        logits_processor: LogitsProcessorList,
        sampling: "DraftSampling",
        eos_ids: set[int],
        drafter: Drafter,
        max_draft_length: int | None = None,
    ):
        self.row = row
        self.drafter = drafter
        self.forwards, self.seconds = 0, 0.0  # that it has taken part in, and what they took
        self._drafted = Draft()
        self.draft_budget = draft_budget
        self.tokens: list[int] = []  # the draft, without the close
        self.probs: list[DraftProbs | None] = []  # what each was drawn from, if `sampling` keeps it
        self.ended_by = ""
        self._forced = list(forced_close)
        self._processors = logits_processor
        self._sampling = sampling
        self._eos_ids = eos_ids
        self._max_draft_length = max_draft_length

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens of what is left of the close."""
        return self._forced[: max(0, limit)]

    def propose(self, limit: int) -> Draft:
        """A draft of at most `limit` tokens that may come next, behind the close."""
        return self.drafter.propose(min(self.drafter.num_draft_tokens, limit))

    def behind_close(self, forced: list[int], draft: Draft) -> Draft:
        """What is left of the close, and a draft behind it, as one."""
        self._drafted = draft if len(forced) == len(self._forced) else Draft()
        return Draft(forced + self._drafted.ids)

    def choose(self, draft: Draft, logits: torch.FloatTensor) -> None:
        """
        Appends the child's next tokens, as long as what it picks is what was proposed, and one more.

        Args:
            draft ([`Draft`]): what was proposed.
            logits (`torch.FloatTensor` of shape `(1, draft_length + 1, vocab_size)`): what the target says comes after
                the text, and after each draft token.
        """
        drafted, self._drafted = self._drafted, Draft()
        forced = len(draft.ids) - len(drafted.ids)
        for kept in range(logits.shape[1]):
            token = self._next(logits[:, kept])
            self.row.append(token)
            if self.row.room <= 0 and not self.ended_by:
                self.ended_by = "max_length"
            if self.ended_by or draft.ids[kept : kept + 1] != [token]:
                break
        agrees = draft.ids[kept : kept + 1] == [token]
        self.drafter.record.note(drafted, max(0, kept + agrees - forced))

    def _next(self, logits: torch.FloatTensor) -> int:
        """The next token of the close, or one that the child picks."""
        if self._forced:
            return self._forced.pop(0)
        ids = self.row.ids
        scores = self._processors(ids, logits.to(copy=True, dtype=torch.float32, device=ids.device))
        token, probs = self._sampling.pick(scores, len(self.tokens))
        self.tokens.append(token)
        self.probs.append(probs)
        self.drafter.observe(token)
        if token in self._eos_ids:
            self.ended_by = "eos"
        elif len(self.tokens) == self._max_draft_length:
            self.ended_by = "max_draft_length"
        return token


@dataclass
class DraftSampling:
    """
    How a child picks a token.

    Args:
        temperature (`float`): 0 = the likeliest. Processors of the parent come before it.
        generator (`torch.Generator`, *optional*): the child's own.
        noise (`tuple[int, int]`, *optional*): seed of the text, and the position of the draft's first token in the
            answer: the child draws with the very noise with which its parent will draw there.
        keeps_probs (`bool`): whether to keep what a token was drawn from, as long as `kept_bytes` allow.
    """

    temperature: float = 0.0
    generator: torch.Generator | None = None
    noise: tuple[int, int] | None = None
    keeps_probs: bool = False
    kept_bytes: int = 0

    def pick(self, scores: torch.FloatTensor, index: int) -> tuple[int, DraftProbs | None]:
        """
        The token number `index` of the draft, and what it was drawn from.

        Args:
            scores (`torch.FloatTensor` of shape `(1, vocab_size)`): processed.
        """
        if self.temperature == 0:
            return int(scores.argmax(dim=-1)), None
        scores = scores / self.temperature
        if self.noise is not None:
            seed, begin = self.noise
            return gumbel_choice(scores, seed, (ANSWER, begin + index)), None
        probs = scores.softmax(dim=-1)
        token = int(torch.multinomial(probs, num_samples=1, generator=self.generator))
        if not self.keeps_probs:
            return token, None
        support = probs[0].nonzero()[:, 0]
        kept = DraftProbs(support.int(), probs[0, support])
        if self.kept_bytes + kept.nbytes > MOST_PROBS_BYTES:
            return token, None  # as good as a token that was not drawn
        self.kept_bytes += kept.nbytes
        return token, kept
