"""Rows of a cache: fork them, drop them, and roll back their last tokens; and which cache layers allow it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
)

from .cache_slots import SlotLayer
from .cache_states import States

# Layer types that are tested: exact types, since a subclass may keep state that is not rolled back.
_WITHOUT_KEYS = (DummyLayer, LinearAttentionLayer)
SUPPORTED_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DummyLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    StaticLayer,
)


def unsupported_cache(cache: Cache | None) -> str | None:
    """Why tokens of this cache cannot be rolled back for certain, or `None` if they can."""
    if cache is None:
        return "there is no cache (`use_cache=False`, or a model with a cache of its own)"
    if type(cache) not in (DynamicCache, StaticCache):
        return f"the cache is a {type(cache).__name__}, and only DynamicCache and StaticCache are supported"
    if cache.offloading:
        return "the cache is offloaded"
    unknown = {type(layer).__name__ for layer in cache.layers if type(layer) not in SUPPORTED_LAYERS}
    if unknown:
        return f"the cache has layers of type {', '.join(sorted(unknown))}, whose last tokens cannot be rolled back"
    return None


def has_linear_attention(cache: Cache) -> bool:
    """Whether some layer keeps a state instead of keys and values: recurrent, or of a convolution."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)


# What `model_kwargs` hold of each place of the cache, along their last dimension.
PLACE_WISE = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def select_rows(cache: Cache, model_kwargs: dict[str, Any], rows: list[int], count: int) -> dict[str, Any]:
    """
    Keeps, repeats or drops rows of the cache (in place: it may be the user's own object) and of what goes with it.

    Args:
        cache (`Cache`): holds `count` rows.
        model_kwargs (`dict`): what `prepare_inputs_for_generation` is given; other tensors than those of `count` rows
            (pixels, ...) stay as they are.
        rows (`list[int]`): the old row of each new one; `[0, 0]` forks, `[0]` drops the child.
        count (`int`): of rows until now.

    Returns:
        `dict`: `model_kwargs` for the new rows.
    """
    index: Any = torch.tensor(rows, device="cpu")  # which transformers has as a LongTensor
    cache.reorder_cache(index)
    return _select_kwargs(model_kwargs, rows, count)


def _select_kwargs(model_kwargs: dict[str, Any], rows: list[int], count: int) -> dict[str, Any]:
    index = torch.tensor(rows, device="cpu")
    selected = dict(model_kwargs)
    for name, value in model_kwargs.items():
        if isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[_batch_dim(name, value)] == count:
            selected[name] = value.index_select(_batch_dim(name, value), index.to(value.device))
    return selected


def _batch_dim(name: str, value: torch.Tensor) -> int:
    return 1 if name == "position_ids" and value.ndim == 3 else 0


def shift_rows(
    cache: Cache, model_kwargs: dict[str, Any], rows: list[int], count: int, excess: list[int], length: int
) -> dict[str, Any]:
    """
    Keeps some rows, each up to an end of its own, so that all end at the same place again: padding goes in front.

    Args:
        cache (`Cache`): holds `count` rows; attention layers are of slots; those that keep states have settled each row
            already, see [`States`].
        model_kwargs (`dict`): describe all places of the cache.
        rows (`list[int]`): the rows to keep.
        count (`int`): of rows until now.
        excess (`list[int]`): places of each, from the end of the cache, that it forgets.
        length (`int`): places from now on.

    Returns:
        `dict`: `model_kwargs` for the new rows and places.
    """
    behind = torch.tensor(excess)[:, None]

    def places(values: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """Where in `values` the last `size` that each row keeps are, below 0 in front of them; `(rows, size)`."""
        end = values.shape[dim]
        return (torch.arange(end - size, end)[None] - behind).to(values.device)

    def shifted(values: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """Of a layer's `(rows, heads, length, head_dim)`. Padding is any finite value."""
        index = places(values, dim, size).clamp(min=0)[:, None]
        heads = torch.arange(values.shape[1], device=values.device)[None, :, None]
        return values[torch.tensor(rows, device=values.device)[:, None, None], heads, index]

    kwargs = _select_kwargs(model_kwargs, rows, count)
    for name in PLACE_WISE:
        if (value := kwargs.get(name)) is not None:
            place = places(value, -1, length)
            # positions may be given once for all rows
            value = value.expand(*value.shape[:-2], len(rows), value.shape[-1])
            kwargs[name] = value.gather(-1, place.clamp(min=0).expand(*value.shape[:-1], length))
            if name == "attention_mask":
                kwargs[name] = kwargs[name] * (place >= 0)
    for layer in cache.layers:
        if type(layer) is SlotLayer and layer.is_initialized:
            size = length if layer.window is None else min(length, layer.window - 1)
            keys, values = layer.all_held()
            layer.hold(shifted(keys, -2, size), shifted(values, -2, size), length)
    return kwargs


class Rollback:
    """
    Rolls back the last tokens of a cache, each layer in the way it allows:

    - attention: crop. A layer of slots can do that past its window;
    - layers that keep a state: see [`States`]. Where they only go forward, all of the block is rolled back, and the
      tokens to keep have to be fed again, together with what comes next.

    Args:
        model (`PreTrainedModel`): whose cache it is.
        cache (`Cache`): after its first forward; until then a layer does not know whether it is recurrent.
        length (`int`): tokens of the text that it holds. A user's cache may hold more before them.
    """

    def __init__(self, model, cache: Cache, length: int):
        self.states = States(model, cache)
        self._layers: list[Any] = [layer for layer in cache.layers if type(layer) not in _WITHOUT_KEYS]
        self._ahead = [int(layer.get_seq_length()) - length for layer in self._layers]
        self._is_under_way = False

    @property
    def holds_more(self) -> bool:
        """Whether a layer that keeps keys and values holds some of before the text."""
        return self.places_ahead > 0

    @property
    def places_ahead(self) -> int:
        """Places before the text that a layer holds keys and values of."""
        return max(self._ahead, default=0)

    @property
    def spare_places(self) -> float:
        """Tokens that may still come, where a layer has so many places and no more."""
        static = (layer for layer in self._layers if isinstance(layer, StaticLayer))
        return min((layer.max_cache_len - int(layer.get_seq_length()) for layer in static), default=math.inf)

    @property
    def can_roll_back(self) -> bool:
        """Whether tokens of the last forward can be rolled back: beside a state, not those of a plain step."""
        return self.states.can_settle

    @contextmanager
    def stepping(self, is_draft: bool) -> Iterator[None]:
        """A forward; tokens of it may be rolled back if it verifies a draft. What it raises leaves it under way."""
        self._is_under_way = True
        with self.states.stepping(may_reject=is_draft):
            yield
        self._is_under_way = False

    def roll_back(self, count: int, fed: int, rows: int = 1) -> int:
        """
        Rolls back the last `count` of the `fed` tokens of the last forward, or all of these, in all `rows`.

        Returns:
            `int`: how many were rolled back: `count`, or `fed` if the cache only goes forward.
        """
        count = fed - self.states.settle([fed - count] * rows, fed)[0]
        for layer in self._layers:
            _crop(layer, count)
        return count

    def abandon(self, length: int) -> bool:
        """
        Puts the cache back to before a forward that was interrupted and may have reached some layers only.

        Args:
            length (`int`): tokens of the text that the cache held then.

        Returns:
            `bool`: whether it could. Outside of verification it cannot beside states; plain `generate` is left in the
            middle of a step there as well.
        """
        if not self._is_under_way:
            return True
        self._is_under_way = False
        if not self.states.abandon():
            return False
        for layer, ahead in zip(self._layers, self._ahead, strict=True):
            _crop(layer, int(layer.get_seq_length()) - (length + ahead))
        return True


def _crop(layer, count: int) -> None:
    if isinstance(layer, LinearAttentionAndFullAttentionLayer):
        DynamicLayer.crop(layer, -count)  # its state goes back by itself
    elif count:
        layer.crop(-count)
