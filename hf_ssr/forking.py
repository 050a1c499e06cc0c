"""Rows of a cache: fork one, drop one, and forget its last tokens; and which cache layers allow it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

# Layer types that are tested: exact types, since a subclass may keep state that a crop does not undo.
SUPPORTED_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)


def unsupported_cache(cache: Cache | None) -> str | None:
    """Why tokens of this cache cannot be forgotten for certain, or `None` if they can."""
    if cache is None:
        return "there is no cache (`use_cache=False`, or a model with a cache of its own)"
    if type(cache) is not DynamicCache:
        return f"the cache is a {type(cache).__name__}, and only DynamicCache is supported"
    if cache.offloading:
        return "the cache is offloaded"
    unknown = {type(layer).__name__ for layer in cache.layers if type(layer) not in SUPPORTED_LAYERS}
    if unknown:
        return f"the cache has layers of type {', '.join(sorted(unknown))}, whose last tokens cannot be forgotten"
    return None


def select_rows(cache: Cache, model_kwargs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """
    Keeps, repeats or drops rows of the cache (in place: it may be the user's own object) and of what goes with it.

    Args:
        cache (`Cache`): holds `batch_size` rows.
        model_kwargs (`dict`): what `prepare_inputs_for_generation` is given.
        rows (`list[int]`): the old row of each new one; `[0, 0]` forks, `[0]` drops the child.

    Returns:
        `dict`: `model_kwargs` for the new rows.
    """
    index = torch.tensor(rows)
    cache.reorder_cache(index)
    selected = dict(model_kwargs)
    for name, value in model_kwargs.items():
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            batch_dim = 1 if name == "position_ids" and value.ndim == 3 else 0
            selected[name] = value.index_select(batch_dim, index.to(value.device))
    return selected


@contextmanager
def recording(cache: Cache) -> Iterator[None]:
    """
    Lets the cache forget tokens that have left a sliding window: such layers keep everything until [`forget`] trims
    them. On only while drafts are verified, and off again whatever happens: on, a prefill would keep the whole prompt.
    """
    cache.activate_past_recording()
    try:
        yield
    finally:
        for layer in cache.layers:
            if getattr(layer, "record_past", False):
                layer.crop(0)
                layer.record_past = False


def attention_layers(cache: Cache) -> list[DynamicLayer]:
    """The layers that hold keys and values of their own (some models share them between layers)."""
    return [layer for layer in cache.layers if type(layer) is not DummyLayer and layer.get_seq_length() > 0]


def forget(cache: Cache, length: int) -> None:
    """Forgets all but the first `length` tokens of every layer, and trims layers that record their past."""
    for layer in attention_layers(cache):
        excess = layer.get_seq_length() - length
        if excess > 0 or getattr(layer, "record_past", False):
            layer.crop(-max(excess, 0))
