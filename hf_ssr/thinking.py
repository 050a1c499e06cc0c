"""The thinking budget in plain `generate`, and how thought and answer are told apart."""

from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor

from .markers import require_markers
from .think_state import ThinkingState


class ThinkingBudgetLogitsProcessor(LogitsProcessor):
    """
    Enforces a thinking budget in plain `generate` exactly as SSR does: after `thinking_budget` thinking tokens the
    tokens of the forced close follow, whatever the model prefers. A thought that closes by itself is left alone.

    The two agree on where earlier turns of the prompt end if `config` says so: if it is from
    [`SSRConfig.from_tokenizer`], or sets `turn_ends`. Without that SSR also knows the model's own end of text.

    It is a function of `input_ids`, so it is right at every position of a draft that may be rolled back. It remembers
    what it has read of each row; a step compares that in one tensor operation and reads only what is new.

    Args:
        config (`SSRConfig`): `thinking_budget` and the markers; see [`SSRConfig.from_tokenizer`].
        prompt_length (`int`): tokens of the prompt, padding included.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): finds markers that `config` gives as text, or not at all, and
            tells whether a character is whole, as the one does that [`SSRConfig.from_tokenizer`] has seen.
        max_new_tokens (`int`, *optional*): as given to `generate`; a budget that leaves no room for the forced close
            and one token of the answer is cut until it does, as SSR cuts it.
        stop (`Callable[[], bool]`, *optional*): whether thoughts are to end now; `thinking_budget` need not be set.

    Raises:
        `ValueError`: if `config.thinking_budget` is not set, or no thinking marker is known.
    """

    supports_continuous_batching = False  # of transformers: its steps mix prompts, and a row is not one text

    def __init__(self, config, *, prompt_length: int, tokenizer=None, max_new_tokens: int | None = None, stop=None):
        if config.thinking_budget is None and stop is None:
            raise ValueError(
                "`thinking_budget` is not set: give `ThinkingBudgetLogitsProcessor` a config that sets it."
            )
        self.markers = require_markers(config, tokenizer)
        self.thinking_budget = config.thinking_budget
        self.prompt_length = prompt_length
        self.max_new_tokens = max_new_tokens
        self._stop = stop
        self._read: dict[int, tuple[torch.Tensor, ThinkingState]] = {}  # of each row: its ids, and where they lead

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read": {}}  # a copy reads for itself

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): the text so far.
            scores (`torch.FloatTensor` of shape `(batch_size, vocab_size)`): the scores of the next token.

        Returns:
            `torch.FloatTensor` of shape `(batch_size, vocab_size)`: in a row that is forced, 0 at the forced token and
            minus infinity elsewhere; other rows as they came.
        """
        for row, ids in enumerate(input_ids):
            forced = self._state(row, ids).forced
            if forced is not None:
                scores = force_token(scores, forced, row)
        return scores

    def _state(self, row: int, ids: torch.Tensor) -> ThinkingState:
        read, state = self._read.get(row, (ids[:0], None))
        shared = min(len(read), len(ids))
        differing = (read[:shared] != ids[:shared]).nonzero()
        same = int(differing[0]) if len(differing) else shared
        if state is None or same < self.prompt_length:
            same = self.prompt_length
            prompt = ids[:same].tolist()
            state = ThinkingState(self.markers, prompt, self.thinking_budget, self.max_new_tokens, self._stop)
        state.rewind(same - self.prompt_length)
        for token in ids[same:].tolist():
            state.push(token)
        self._read[row] = (ids, state)
        return state


def force_token(scores: torch.Tensor, token: int, row: int = 0) -> torch.Tensor:
    """`scores` `(batch_size, vocab_size)` with everything but `token` ruled out in `row`."""
    scores = scores.clone()
    scores[row] = -torch.inf
    scores[row, token] = 0.0
    return scores


class SplitThinking(NamedTuple):
    """
    The thought without its markers, and the answer without what a close leads to it with (`\\n\\n`). Of several
    thoughts: all of them, and all that stands behind one, each joined.
    """

    thought: Any
    answer: Any


def split_thinking(ids, config, prompt_length: int = 0, tokenizer=None) -> SplitThinking:
    """
    Separates the thought from the answer.

    Args:
        ids (`list[int]` or `torch.LongTensor` of shape `(sequence_length,)` or `(1, sequence_length)`): prompt and
            output, as `generate` returns them.
        config (`SSRConfig`): the thinking markers; see [`SSRConfig.from_tokenizer`].
        prompt_length (`int`): tokens of the prompt.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): finds markers that `config` gives as text, or not at all.

    Returns:
        [`SplitThinking`]: `thought` and `answer`, lists or 1-D tensors as `ids` was. Without a thought all is answer; a
        thought that was never closed leaves an empty answer.

    Raises:
        `ValueError`: if no thinking marker is known, or `ids` has several rows.
    """
    if isinstance(ids, torch.Tensor) and ids.ndim == 2:
        if len(ids) > 1:
            raise ValueError(f"`ids` must be one text, but has {len(ids)} rows: split each row on its own.")
        ids = ids[0]
    tokens = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
    state = ThinkingState(require_markers(config, tokenizer), tokens[:prompt_length])
    for token in tokens[prompt_length:]:
        state.push(token)
    new = ids[prompt_length:]
    return SplitThinking(*(_joined(new, slices) for slices in _slices(state)))


def _joined(ids, slices: list[slice]):
    if isinstance(ids, torch.Tensor):
        return torch.cat([ids[:0], *(ids[each] for each in slices)])
    return [token for each in slices for token in ids[each]]


def _slices(state: ThinkingState) -> tuple[list[slice], list[slice]]:
    """Where the thoughts stand among the new tokens, and what is between and behind them."""
    tokens, markers, thoughts = state.tokens, state.known_markers, state.thoughts
    thinking, others = [], []
    begin = None if thoughts and state.progress_of_prompt == "unstarted" else 0  # before a first thought is no answer
    for thought in thoughts:
        if begin is not None and thought.opens:
            assert markers.later_start is not None  # which has opened it
            end = begin + markers.later_start.begin_in(tokens[begin : thought.opens])
            is_tail = begin > 0 and tuple(tokens[begin:end]) == state.tail[: end - begin]
            others.append(slice(end if is_tail else _behind_tail(state, begin), end))
        length = len(tokens) - thought.opens
        if thought.closes is not None:
            length = markers.end.begin_in(tokens[thought.opens : thought.closes])
        thinking.append(slice(thought.opens, thought.opens + length))
        begin = thought.closes
    if begin is not None:
        others.append(slice(_behind_tail(state, begin), len(tokens)))
    return thinking, others


def _behind_tail(state: ThinkingState, begin: int) -> int:
    """Where the answer begins that a close at `begin` leads to; there is none at the beginning."""
    end = begin + len(state.tail)
    return end if begin and tuple(state.tokens[begin:end]) == state.tail else begin
