"""Is a text before, in, or past its thought; the thinking budget; and how thought and answer are told apart."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor

from .markers import ThinkingMarkers, require_markers


class ThinkingState:
    """
    Follows one text token by token: is it before a thought, in it, or past it, and which token does the thinking budget
    force next? A thought opens once and closes once: a later marker is text.

    Args:
        markers (`ThinkingMarkers`, *optional*): of the model; `None` = it never thinks.
        prompt (`Sequence[int]`): the prompt's token ids.
        thinking_budget (`int`, *optional*): most thinking tokens; the forced close follows, token by token.
        max_new_tokens (`int`, *optional*): most new tokens. A thinking budget that leaves no room for the forced close
            and one token of the answer is cut until it does.
        stop (`Callable[[], bool]`, *optional*): whether the thought is to end now; asked at each token.
    """

    def __init__(
        self,
        markers: ThinkingMarkers | None,
        prompt: Sequence[int],
        thinking_budget: int | None = None,
        max_new_tokens: int | None = None,
        stop: Callable[[], bool] | None = None,
    ):
        self.markers = markers
        phase = "closed" if markers is None else markers.phase_of_prompt(prompt)
        self.tokens: list[int] = []  # the new tokens so far
        self.open_position = 0 if phase == "open" else None  # new tokens before the thought's first
        self.close_position = 0 if phase == "closed" else None  # new tokens up to and with the close
        self._thinks = phase != "closed"
        self._budget = thinking_budget
        self._max_new_tokens = max_new_tokens
        self._stop = stop

    @property
    def phase(self) -> str:
        """`"unstarted"`, `"open"` or `"closed"`: what the next token is."""
        if self.close_position is not None:
            return "closed"
        return "unstarted" if self.open_position is None else "open"

    @property
    def open(self) -> bool:
        """Whether the next token belongs to the thought."""
        return self.open_position is not None and self.close_position is None

    @property
    def thinking_tokens(self) -> int:
        """Tokens of the thought so far, its closing marker among them."""
        if self.open_position is None:
            return 0
        return (len(self.tokens) if self.close_position is None else self.close_position) - self.open_position

    @property
    def thought(self) -> list[int]:
        """The tokens of the thought so far, its closing marker among them."""
        return [] if self.open_position is None else self.tokens[self.open_position : self.close_position]

    @property
    def tail(self) -> tuple[int, ...]:
        """What follows the end marker inside the forced close."""
        return () if self.markers is None else self.markers.tail

    @property
    def budget(self) -> int | None:
        """The thinking budget in force, in tokens; `None` where nothing thinks."""
        if self._budget is None or not self._thinks:
            return None
        return self._budget if self._max_new_tokens is None else max(0, min(self._budget, self._room))

    @property
    def _room(self) -> int:
        """Thinking tokens behind which the forced close and one token of the answer fit."""
        return self._max_new_tokens - (self.open_position or 0) - len(self.markers.forced_close) - 1

    @property
    def budget_capped(self) -> bool:
        """Whether the budget was cut so that an answer fits."""
        return self._thinks and self._budget is not None and self.budget < self._budget

    @property
    def may_be_forced(self) -> bool:
        """Whether a token that is to come may be forced."""
        return (self._budget is not None or self._stop is not None) and (self.open or self.forced is not None)

    @property
    def forced(self) -> int | None:
        """The token that the thinking budget forces at the next position, if any."""
        self._stop_if_asked()
        if self._budget is None or self.open_position is None:
            return None
        begin = self.open_position + self.budget
        if self.close_position is not None and self.close_position <= begin:
            return None  # the thought closed by itself
        step = len(self.tokens) - begin
        return self.markers.forced_close[step] if 0 <= step < len(self.markers.forced_close) else None

    def forced_along(self, draft: Sequence[int]) -> list[int | None]:
        """The same at the next position, and behind each of some tokens that are only supposed."""
        count, forced = len(self.tokens), [self.forced]
        for token in draft:
            self.push(token)
            forced.append(self.forced)
        self.rewind(count)
        return forced

    def closes_with(self, token: int) -> bool:
        """Whether `token` would complete the closing marker of the open thought."""
        end = self.markers.end
        return end.ends([*self.tokens[max(self.open_position, len(self.tokens) + 1 - end.window) :], token])

    def push(self, token: int) -> None:
        """Take the next token into account: O(1)."""
        closes = self.open and self.closes_with(token)
        self.tokens.append(token)
        count = len(self.tokens)
        if closes:
            self.close_position = count
        elif self.phase == "unstarted" and self.markers.start.ends(self.tokens[-self.markers.start.window :]):
            self.open_position = count

    def _stop_if_asked(self) -> None:
        """The thinking budget is what has been thought, if a thought is to end and an answer fits."""
        if self._stop is None or self.close_position is not None or not self._stop():
            return
        so_far = self.thinking_tokens
        fits = self._max_new_tokens is None or so_far <= self._room
        if fits and (self._budget is None or so_far < self._budget):
            self._budget = so_far

    def rewind(self, count: int) -> None:
        """Forget all but the first `count` new tokens."""
        del self.tokens[count:]
        if self._thinks and self.close_position is not None and self.close_position > count:
            self.close_position = None
        if self.open_position is not None and self.open_position > count:
            self.open_position = None


class ThinkingBudgetLogitsProcessor(LogitsProcessor):
    """
    Enforces a thinking budget in plain `generate` exactly as SSR does: after `thinking_budget` thinking tokens the
    tokens of the forced close follow, whatever the model prefers. A thought that closes by itself is left alone.

    It is a function of `input_ids`, so it is right at every position of a draft that may be rolled back. It remembers
    what it has read of each row; a step compares that in one tensor operation and reads only what is new.

    Args:
        config (`SSRConfig`): `thinking_budget` and the markers; see [`SSRConfig.from_tokenizer`].
        prompt_length (`int`): tokens of the prompt, padding included.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): finds markers that `config` gives as text, or not at all.
        max_new_tokens (`int`, *optional*): as given to `generate`; a budget that leaves no room for the forced close
            and one token of the answer is cut until it does, as SSR cuts it.
        stop (`Callable[[], bool]`, *optional*): whether thoughts are to end now; `thinking_budget` need not be set.

    Raises:
        `ValueError`: if `config.thinking_budget` is not set, or no thinking marker is known.
    """

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
        self._read: dict[int, tuple[torch.LongTensor, ThinkingState]] = {}  # of each row: its ids, and where they lead

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
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

    def _state(self, row: int, ids: torch.LongTensor) -> ThinkingState:
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


def force_token(scores: torch.FloatTensor, token: int, row: int = 0) -> torch.FloatTensor:
    """`scores` `(batch_size, vocab_size)` with everything but `token` ruled out in `row`."""
    scores = scores.clone()
    scores[row] = -torch.inf
    scores[row, token] = 0.0
    return scores


class SplitThinking(NamedTuple):
    """A thought without its markers, and the answer without what the close leads to it with (`\\n\\n`)."""

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
    markers = require_markers(config, tokenizer)
    state = ThinkingState(markers, tokens[:prompt_length])
    for token in tokens[prompt_length:]:
        state.push(token)
    new = ids[prompt_length:]
    if state.open_position is None:
        return SplitThinking(new[:0], new[state.close_position or 0 :])
    if state.close_position is None:
        return SplitThinking(new[state.open_position :], new[len(new) :])
    thought = state.tokens[state.open_position : state.close_position]
    length = next(n for n in range(len(thought) - 1, -1, -1) if markers.end.ends(thought[n:]))
    answer = state.close_position
    if tuple(state.tokens[answer : answer + len(state.tail)]) == state.tail:
        answer += len(state.tail)
    return SplitThinking(new[state.open_position :][:length], new[answer:])
