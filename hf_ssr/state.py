"""The state of one generation: the text so far, what the cache holds of it, and how the target picks the next token."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .forking import Rollback, select_rows
from .metrics import SSRMetrics
from .output import SSROutput, Stream
from .thinking import ThinkingState, force_token


class TargetState:
    """
    One prompt's text and cache under the target. Does what plain `generate` does for each token, in the same order:
    pick it with the same processors and one random draw, append it, ask the stopping criteria, stream it.

    Row 0 is the parent, whose text is the output. While a child is there it is row 1, as long as the parent; both go
    through one forward.

    Args:
        model (`PreTrainedModel`): the target.
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): the prompt.
        generation_config, logits_processor, stopping_criteria, model_kwargs: as `generate` prepares them.
        thinking ([`ThinkingState`]): follows the text; also forces the tokens of a thinking budget.
        stream ([`Stream`]): is given each token.
        metrics ([`SSRMetrics`]): counts.
    """

    def __init__(
        self,
        model,
        input_ids: torch.LongTensor,
        generation_config: GenerationConfig,
        thinking: ThinkingState,
        stream: Stream,
        metrics: SSRMetrics,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        **model_kwargs: Any,
    ):
        self.model = model
        self.logits_processor = logits_processor
        self.stopping_criteria = stopping_criteria
        self.config = generation_config
        self.model_kwargs = model_kwargs
        self.thinking = thinking
        self.stream = stream
        self.metrics = metrics
        self.done = False
        self.rows = 1
        self.length = self.prompt_length = input_ids.shape[1]
        keep = generation_config.return_dict_in_generate
        self.scores: tuple | None = () if keep and generation_config.output_scores else None
        self.logits: tuple | None = () if keep and generation_config.output_logits else None
        self._ids = input_ids.new_zeros((2, self.length + 1024))  # row 0 the parent's text, row 1 the child's
        self._ids[0, : self.length] = input_ids
        self._described = self.length  # tokens that `model_kwargs` (positions, mask) describes
        self._next_logits: torch.Tensor | None = None  # of the next token, if they are there
        self._cached = self._fed = 0  # tokens of the text that the cache holds, and that the last forward fed

    @property
    def ids(self) -> torch.LongTensor:
        """The text so far, shape `(1, sequence_length)`."""
        return self._ids[:1, : self.length]

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return self._ids[0, : self.prompt_length].tolist()

    @property
    def eos_ids(self) -> set[int]:
        """Tokens that end the text."""
        eos = self.config._eos_token_tensor
        return set() if eos is None else set(eos.flatten().tolist())

    @property
    def child_ids(self) -> torch.LongTensor:
        """The child's text so far, shape `(1, sequence_length)`."""
        return self._ids[1:, : self.length]

    @property
    def room(self) -> int:
        """Tokens that `max_length` still allows."""
        return self.config.max_length - self.length

    @property
    def has_logits(self) -> bool:
        """Whether the next token can be picked without a forward: only after the prefill."""
        return self._next_logits is not None

    def prefill(self) -> None:
        """The forward over the prompt."""
        with self.metrics.timed_forward("prefill", 1, self.length, self._ids.device):
            outputs = self.model._prefill(self.ids, self.config, self.model_kwargs, is_first_iteration=True)
        self.cache = self.model_kwargs["cache"] = outputs.cache
        self._next_logits = outputs.logits[:, -1:]
        self.rollback = Rollback(self.cache, self.length)
        self._cached = self.length

    def forward(self, phase: str, draft: Sequence[int] = ()) -> torch.Tensor:
        """
        One forward of the target over what the cache does not hold yet, and over a draft behind it.

        Args:
            phase (`str`): of the metrics.
            draft (`Sequence[int]`): proposed tokens of the parent's text; without a child only.

        Returns:
            `torch.FloatTensor` of shape `(rows, draft_length + 1, vocab_size)`: what comes after the text, and after
            each draft token.
        """
        if self._next_logits is not None:  # left over from the prefill
            logits, self._next_logits = self._next_logits, None
            return logits
        self._describe(self.length)
        model_kwargs = self.model_kwargs
        end = self.length + len(draft)
        if draft:
            self._reserve(end)
            self._ids[0, self.length : end] = self._ids.new_tensor(draft)
            model_kwargs = self._extended(model_kwargs, len(draft))
        return self._feed(phase, end, model_kwargs, len(draft) + 1)

    def _feed(self, phase: str, end: int, model_kwargs: dict[str, Any], keep: int) -> torch.Tensor:
        """A forward over the tokens before `end` that the cache lacks; the logits of the last `keep`."""
        fed = end - self._cached
        inputs = self.model.prepare_inputs_for_generation(
            self._ids[: self.rows, :end], next_sequence_length=fed, **model_kwargs
        )
        if "logits_to_keep" in inputs:  # set last: some models overwrite it while preparing
            inputs["logits_to_keep"] = keep
        self.rollback.begin(is_draft=end > self.length)
        with self.metrics.timed_forward(phase, self.rows, fed, self._ids.device):
            outputs = self.model(**inputs, return_dict=True)
        self.rollback.complete()
        self._cached, self._fed = end, fed
        return outputs.logits[:, -keep:]

    def roll_back_rejected(self) -> None:
        """The cache forgets draft tokens that are not part of the text."""
        excess = max(0, self._cached - (self.length - 1))
        self._cached -= self.rollback.roll_back(excess, self._fed)

    def choose(self, logits: torch.FloatTensor) -> int:
        """
        The target's next token, as plain `generate` picks it.

        Args:
            logits (`torch.FloatTensor` of shape `(1, vocab_size)`): what the target says comes next.
        """
        logits = logits.to(copy=True, dtype=torch.float32, device=self._ids.device)
        scores = self.logits_processor(self.ids, logits)
        if self.thinking.forced is not None:
            scores = force_token(scores, self.thinking.forced)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self.config.do_sample:
            return int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))
        return int(scores.argmax(dim=-1))

    def choices(self, logits: torch.FloatTensor) -> Iterator[int]:
        """
        The target's tokens at consecutive positions. Each must be emitted before the next is asked for.

        Args:
            logits (`torch.FloatTensor` of shape `(1, positions, vocab_size)`): what comes at each, if the ones before
                agree.
        """
        argmax_will_do = not (self.config.do_sample or self.logits_processor or self.thinking.forced is not None)
        if argmax_will_do and self.scores is None and self.logits is None:
            yield from logits[0].float().argmax(dim=-1).tolist()
        else:
            for position in range(logits.shape[1]):
                yield self.choose(logits[:, position])

    def emit(self, token: int, child_token: int | None = None) -> None:
        """Appends the parent's next token, and the child's; the text may be done after it."""
        self._reserve(self.length + 1)
        self._ids[0, self.length] = token
        if child_token is not None:
            self._ids[1, self.length] = child_token
        self.length += 1
        self.thinking.push(token)
        self.done = bool(self.stopping_criteria(self.ids, self.scores).all())
        self.stream.put(self._ids[0, self.length - 1 : self.length].clone())

    def can_draft_ahead_of(self, token: int) -> bool:
        """Whether the thought goes on with `token`, and there is room for its close and an answer."""
        closing = self.thinking.forced is not None or self.thinking.closes_with(token)
        return not closing and self.room > len(self.thinking.markers.forced_close) + 1

    def fork(self) -> None:
        """
        A second row, the child, with the same text and cache.

        Raises:
            `torch.OutOfMemoryError`: if the row does not fit; there is one row then.
        """
        self._ids[1, : self.length] = self._ids[0, : self.length]
        try:
            self._select_rows([0, 0])
        except torch.OutOfMemoryError:
            self._select_rows([0])  # some layers may have their second row already
            raise

    def drop_child(self) -> None:
        """Back to one row."""
        if self.rows > 1:
            self._select_rows([0])

    def settle(self) -> None:
        """Leaves the cache as plain `generate` leaves it: one row, all of the text but its last token."""
        self.drop_child()
        if not self.rollback.abandon(self._cached):
            return
        if self.rollback.can_roll_back and not self.has_logits:
            self.roll_back_rejected()
        is_kept = self.config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False)
        if is_kept and self._cached < self.length - 1 and not self.thinking.open:
            described = self._extended(self.model_kwargs, self.length - 1 - self._described)
            self._feed("speculate", self.length - 1, described, 1)

    def output(self) -> SSROutput | torch.LongTensor:
        """What `generate` returns."""
        sequences = self.ids.clone()
        self.metrics.new_tokens = self.length - self.prompt_length
        self.metrics.thinking_tokens = self.thinking.thinking_tokens
        self.metrics.thinking_budget = self.thinking.budget
        self.metrics.thinking_budget_capped = self.thinking.budget_capped
        if not self.config.return_dict_in_generate:
            return sequences
        return SSROutput(
            sequences=sequences, scores=self.scores, logits=self.logits, cache=self.cache, metrics=self.metrics
        )

    def _select_rows(self, rows: list[int]) -> None:
        self._describe(self.length)
        self.model_kwargs = select_rows(self.cache, self.model_kwargs, rows)
        self.rows = len(rows)

    def _describe(self, length: int) -> None:
        """Lets `model_kwargs` (positions, mask) describe the first `length` tokens of the text."""
        if length > self._described:
            self.model_kwargs = self._extended(self.model_kwargs, length - self._described)
            self._described = length

    def _extended(self, model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
        """`model_kwargs` that describe `count` tokens more, or fewer if it is negative."""
        if count >= 0:
            return self.model._update_model_kwargs_for_generation({}, dict(model_kwargs), num_new_tokens=count)
        names = ("position_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
        cut = {name: model_kwargs[name][..., :count] for name in names if model_kwargs.get(name) is not None}
        return {**model_kwargs, **cut}

    def _reserve(self, length: int) -> None:
        if length > self._ids.shape[1]:
            grown = self._ids.new_zeros((2, 2 * length))
            grown[:, : self._ids.shape[1]] = self._ids
            self._ids = grown
