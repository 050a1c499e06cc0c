"""
The layers of a cache that keep a state instead of keys and values: each row goes back to behind what it keeps.

- Convolutions, the short ones of recurrent layers too: the inputs of a step are kept, and cut behind what a row keeps.
- The gated delta rule (Qwen3.5, Qwen3-Next, Olmo Hybrid, Kimi Linear): the state before a step is kept, and what the
  rule was given. Then the rule alone is applied again, to what a row keeps: the model reads nothing twice, and rows may
  keep differently many places. A place that is not kept has no decay and a beta of 0: it leaves the state as it is, bit
  for bit.
- Other recurrent layers (Mamba, ...): a copy from before the step. What a row keeps has to be fed again.

Over chunks of 64, as in a prefill, what the rule yields depends on where a block begins; token by token it does not.
So steps of a few places take the latter. Milliseconds of a layer, 16 heads of 128 (float32, one thread of a CPU):

    places                   1     2     4     8    16    32    64
    1 row, over chunks       -   4.3   5.6   3.8   3.8   11    4.3
    1 row, token by token  0.7   1.3   2.1   5.1   8.0   23    29
    4 rows, over chunks      -    18    16    21    18    18    25
    4 rows, token by token 2.9   5.1    10    22    47    92   155

Feeding a token again costs more than either: a whole model with 6 such layers takes 15 ms or more for each place. So a
single row, too, goes back by the rule: 2.2 to 3.0 s of a processor against 2.7 to 3.7 s by copy and replay, for a text
of 48 tokens with a draft that is wrong at each sixth (three pairs of runs).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

FEW_PLACES = 16  # of a step, that the rule goes through token by token
# functions of transformers' modelling files: the rule over chunks, and token by token
RULES = (
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
)


class States:
    """
    The layers of a cache that keep a state. A forward is made within [`~States.stepping`]; then [`~States.settle`] says
    how much of it is kept, or [`~States.abandon`] forgets a forward that failed.

    Args:
        model (`PreTrainedModel`): whose cache it is.
        cache (`Cache`): after its first forward; until then a layer does not know whether it is recurrent.
    """

    def __init__(self, model, cache: Cache):
        self._layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
        self._recurrent = [layer for layer in self._layers if is_recurrent(layer)]
        self._has_rule = bool(self._recurrent) and _watch_rules(model)
        self._step: _Step | None = None  # that is not settled yet
        self._is_under_way = False

    @property
    def settles_rows(self) -> bool:
        """
        Whether rows may keep differently many places of a forward, if the model calls the rule as it seems to: whether
        it does is for [`~hf_ssr.self_check.why_not_in_rows`] to try.
        """
        return self._has_rule or not self._recurrent

    @property
    def can_settle(self) -> bool:
        """Whether places of the last forward can still be rejected, if there are any that were not settled."""
        return self._step is None or self._step.before is not None

    @contextmanager
    def stepping(self, may_reject: bool) -> Iterator[None]:
        """
        A forward over the cache. What it raises leaves the states for [`~States.abandon`].

        Args:
            may_reject (`bool`): whether places of it may not be kept, or it may have to be abandoned.
        """
        if not self._layers:
            yield
            return
        assert self._step is None or self._step.before is None, "the forward before has not been settled"
        self._step = _Step([_copy_of_state(layer) for layer in self._layers] if may_reject else None)
        recording = self._layers if self.settles_rows and may_reject else ()
        self._is_under_way = True
        for layer in recording:
            layer.record_past = True
        token = _current.set(self._step)
        try:
            yield
        finally:
            _current.reset(token)
            for layer in recording:
                layer.record_past = False
        self._is_under_way = False

    def settle(self, kept: Sequence[int], places: int) -> list[int]:
        """
        The last forward is over: each row goes on behind what it keeps of it.

        Args:
            kept (`Sequence[int]`): how many of its first places each row keeps.
            places (`int`): of each row in the last forward.

        Returns:
            `list[int]`: places of it that the states hold now: `kept`, or 0 for all rows where the layers only go
            forward and not all was kept: then these tokens have to be fed again.

        Raises:
            `RuntimeError`: if the rows keep differently many, and the layers only go forward.
        """
        step, self._step = self._step, None
        kept = list(kept)
        if step is None or step.before is None:
            assert not self._layers or set(kept) <= {places}, "the forward was to be kept whole"
            return kept
        is_whole = set(kept) <= {0, places}
        if not is_whole and not all(step.has_given(layer) for layer in self._recurrent):
            if len(set(kept)) > 1:
                raise RuntimeError("The rows of this cache can only go back together: its states go forward only.")
            kept = [0] * len(kept)
        if not any(kept):
            self._restore(step.before)
            return kept
        rows = _Rows(kept, places)
        for layer, (conv_states, recurrent_states) in zip(self._layers, step.before, strict=True):
            for index, before in conv_states.items():
                seen = layer.conv_states[index]
                if before is not None and seen is not None:
                    layer.conv_states[index] = rows.cut(before, seen)
            for index, before in recurrent_states.items():
                state = layer.recurrent_states[index]
                if before is not None and state is not None and not rows.keep_all:
                    after = rows.chosen(before, state) if is_whole else rows.applied(before, step.given[id(state)])
                    state.copy_(after)  # in place, as the layer does it
        return kept

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keeps, repeats or drops rows: the old row of each new one."""
        assert self._step is None or self._step.before is None, "the forward before has not been settled"
        for layer in self._layers:
            index: Any = torch.tensor(rows)  # which transformers has as a LongTensor
            LinearAttentionLayer.reorder_cache(layer, index)

    def abandon(self) -> bool:
        """
        Puts the states back to before a forward that failed and may have reached some layers only.

        Returns:
            `bool`: whether it could: not if nothing of that forward was to be rejected.
        """
        if not self._is_under_way:
            return True
        step, self._step = self._step, None
        self._is_under_way = False
        assert step is not None, "a forward under way was settled"
        if step.before is None:
            return False
        self._restore(step.before)
        return True

    def _restore(self, before: list[tuple[dict, dict]]) -> None:
        for layer, (conv_states, recurrent_states) in zip(self._layers, before, strict=True):
            layer.conv_states, layer.recurrent_states = conv_states, recurrent_states


def is_recurrent(layer) -> bool:
    """Whether a layer keeps a state that only goes forward. Known after its first forward."""
    return isinstance(layer, LinearAttentionLayer) and not layer.is_croppable


def _copy_of_state(layer: LinearAttentionLayer) -> tuple[dict, dict]:
    """Copies: the layer overwrites its states in place."""
    conv_states, recurrent_states = (
        {index: None if state is None else state.clone() for index, state in states.items()}
        for states in (layer.conv_states, layer.recurrent_states)
    )
    return conv_states, recurrent_states


class _Rows:
    """What rows keep of the places of a forward."""

    def __init__(self, kept: list[int], places: int):
        self._kept, self._most = kept, max(kept)
        self._is_even = len(set(kept)) == 1
        self.keep_all = min(kept) == places
        self._counts: dict[torch.device, torch.Tensor] = {}

    def _count(self, device: torch.device) -> torch.Tensor:
        """What each row keeps, shape `(rows,)`; moved to a device once."""
        if device not in self._counts:
            self._counts[device] = torch.tensor(self._kept, device=device)
        return self._counts[device]

    def cut(self, before: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """
        The inputs of a convolution that each row goes on with.

        Args:
            before (`torch.Tensor` of shape `(rows, channels, kernel_size)`): the inputs before the forward.
            seen (`torch.Tensor` of shape `(rows, channels, kernel_size + places)`): these, and those of the forward. A
                layer that does not record, or is given a single place, has the last `kernel_size` only.
        """
        size = before.shape[-1]
        if seen.shape[-1] == size:
            return self.chosen(before, seen)
        if self._is_even:
            return seen[..., self._most : self._most + size].clone()  # not a view of all that was seen
        index = self._count(seen.device)[:, None] + torch.arange(size, device=seen.device)
        return seen.gather(-1, index[:, None].expand(*before.shape))

    def chosen(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The state behind a forward of rows that keep all of it, and the one before it of rows that keep nothing."""
        if self.keep_all:
            return after
        is_kept = self._count(after.device) > 0
        return torch.where(is_kept.view(-1, *[1] * (after.ndim - 1)), after, before)

    def applied(self, before: torch.Tensor, given: "_Given") -> torch.Tensor:
        """The state that the rule makes of the one before the forward, from the places that each row keeps."""
        count = self._most
        key, value, g, beta = (each[:, :count] for each in (given.key, given.value, given.g, given.beta))
        if not self._is_even:
            is_kept = torch.arange(count, device=g.device) < self._count(g.device)[:, None]
            g, beta = _zeroed(g, is_kept), _zeroed(beta, is_kept)
        rule = given.per_token if count <= FEW_PLACES else given.chunked
        settings = {**given.settings, "initial_state": before, "output_final_state": True}
        return rule(key, key, value, g=g, beta=beta, **settings)[1]  # what a query finds is of no interest


def _zeroed(values: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
    """`(rows, places, heads, ...)`, 0 where a row does not keep a place."""
    return values.masked_fill(~is_kept.view(*is_kept.shape, *[1] * (values.ndim - 2)), 0)


@dataclass
class _Given:
    """What the rule of a layer was given in a step: tensors of shape `(rows, places, heads, ...)`."""

    chunked: Callable
    per_token: Callable
    key: torch.Tensor
    value: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    settings: dict[str, Any]


class _Step:
    """
    A forward, as long as it is not settled.

    Args:
        before (`list[tuple[dict, dict]]`, *optional*): copies of the states before it, if places may be rejected.
    """

    def __init__(self, before: list[tuple[dict, dict]] | None):
        self.before = before
        self.given: dict[int, _Given] = {}  # by the id of the state: the layer updates it in place

    def has_given(self, layer: LinearAttentionLayer) -> bool:
        """Whether the layer's rule was seen."""
        return all(id(state) in self.given for state in layer.recurrent_states.values() if state is not None)

    def apply(self, chunked: Callable, per_token: Callable, query, key, value, g, beta, initial_state=None, **settings):
        """The rule of a layer, as the modelling file calls it for several places."""
        is_short = initial_state is not None and key.shape[1] <= FEW_PLACES
        rule = per_token if is_short else chunked
        if self.before is not None and initial_state is not None:
            self.given[id(initial_state)] = _Given(chunked, per_token, key, value, g, beta, settings)
        return rule(query, key, value, g=g, beta=beta, initial_state=initial_state, **settings)


# The step of this thread, if it makes one: others use the same modelling files.
_current: ContextVar[_Step | None] = ContextVar("step", default=None)


def _watch_rules(model) -> bool:
    """
    Lets steps see what the rules of a model are given, whatever kernel they stand for. Outside of steps, and in what is
    compiled, they are as they were.

    Returns:
        `bool`: whether it has any that can be seen: not in a module that is compiled.
    """
    if any(each._compiled_call_impl is not None for each in model.modules()):
        return False
    found = False
    for module in {type(each).__module__ for each in model.modules()}:
        names = vars(sys.modules[module]) if module in sys.modules else {}
        for chunked, per_token in RULES:
            if chunked in names and per_token in names:
                found = True
                if not hasattr(names[chunked], "watches"):  # not yet, or replaced by somebody
                    names[chunked] = _watched(names[chunked], names, per_token)
    return found


def _watched(chunked: Callable, names: dict[str, Any], per_token: str) -> Callable:
    @wraps(chunked)
    def rule(*args, **kwargs):
        step = None if torch.compiler.is_compiling() else _current.get()
        return chunked(*args, **kwargs) if step is None else step.apply(chunked, names[per_token], *args, **kwargs)

    rule.watches = True  # type: ignore[attr-defined]  # a mark, which functions do not declare
    return rule
