"""
Does a model read several tokens in one forward, and roll them back, as it does one by one, past its windows too? Does
it draw random numbers meanwhile? And does it do as a mask says: does it tell a child from its parent in one row, rows
of different lengths? Tried on a few tokens, before SSR is trusted.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from threading import RLock
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from .cache_slots import SlotLayer, into_slots
from .drafting import Draft
from .forking import Rollback
from .host import attention_of, kernels_of
from .places import Fed, Places
from .slot_masks import SlotsOfCache

PROMPT_TOKENS, BLOCK_TOKENS = 12, 4
# Largest error in standard deviations of the logits; in float32 models that fail are off by 0.04 and more, others 1e-5.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}
# In half precision rounding can hide a small fault: a few times the rounding of a forward without cache is allowed, and
# what is known to fail is named.
ROUNDINGS, MOST_ROUNDING = 3, 0.5
FAILING_TYPES = {"jamba", "mamba", "falcon_mamba", "recurrent_gemma", "minimax"}
# the oldest places of a window must be missed when they leave it: as loud as it is long, short of what float16 holds
EDGE, LOUDEST = 8, 1024

_results: "weakref.WeakKeyDictionary[torch.nn.Module, dict]" = weakref.WeakKeyDictionary()
_lock = RLock()  # what another thread draws would look as if the model drew it


def why_not_in_blocks(model, windows: Iterable[int] = ()) -> str | None:
    """
    Why a forward over several tokens does not yield what forwards over single tokens yield, also after tokens were
    rolled back; `None` if it does. The answer is kept for as long as the model computes in the same way, unless it is
    an error. The global random generators are left as they were.

    Args:
        model (`PreTrainedModel`): with a cache that can be rolled back.
        windows (`Iterable[int]`): lengths of those windows of the cache that the text may pass.
    """
    with _lock:
        if _is_training(model):
            reason, _ = _tried(model, _try_forward)  # each time: a rate of dropout may have changed
            if reason is not None:
                return reason
        for window in (None, *sorted(windows)):
            reason = _known(model, _try_blocks, window)
            if reason is not None:
                return reason
    return None


def tells_texts_apart(model, windows: Iterable[int] = ()) -> bool:
    """
    Whether forwards over two rows of slots, which go on by differently many tokens and one of which has a child, with
    masks that say who sees whom, yield what forwards over each text alone yield. The answer is kept as that of
    [`why_not_in_blocks`].

    Args:
        model (`PreTrainedModel`): whose cache has attention layers only.
        windows (`Iterable[int]`): lengths of those windows of the cache that the text may pass.
    """
    with _lock:
        takes_masks = attention_of(model) in ("sdpa", "eager")
        return takes_masks and all(_known(model, _try_masks, window) is None for window in (None, *sorted(windows)))


def _known(model, trial: Callable, *args) -> str | None:
    known = _results.setdefault(model, {})
    key = trial, args, _mode(model)
    if key not in known:
        reason, is_lasting = _tried(model, trial, *args)
        if not is_lasting:
            return reason
        known[key] = reason
    return known[key]


def _mode(model) -> tuple:
    """How the model computes: what was tried in one way need not hold in another."""
    config = model.config.get_text_config(decoder=True)
    return (
        tuple((module.training, getattr(module, "gradient_checkpointing", False)) for module in model.modules()),
        frozenset((parameter.dtype, parameter.device) for parameter in model.parameters()),
        (*kernels_of(model.config), *kernels_of(config)),
        id(vars(model).get("forward")),  # wrapped, for instance in autocast; by its id, as it holds the model
        frozenset(_autocast_dtypes()),
        _rounds_float32(),
    )


def _autocast_dtypes() -> Iterator[torch.dtype]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for kind in {"cpu"} if accelerator is None else {"cpu", accelerator.type}:
        if torch.is_autocast_enabled(kind):
            yield torch.get_autocast_dtype(kind)


def _rounds_float32() -> bool:
    """Whether matrices of float32 may be multiplied in less (TF32, bfloat16)."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by its newer name only
        return True


def _tried(model, trial: Callable, *args) -> tuple[str | None, bool]:
    """What speaks against the model by a trial, or `None`; and whether that lasts."""
    name, generators = type(model).__name__, _generators()
    states = [get() for get, _ in generators]
    try:
        with torch.no_grad():
            reason = trial(model, *args)
            if all(torch.equal(get(), state) for (get, _), state in zip(generators, states, strict=True)):
                return reason, True
            with _Draws() as draws:  # or was it another thread?
                trial(model, *args)
            if not draws.seen:
                return reason, True
    except torch.OutOfMemoryError:
        return f"there is no memory to try whether {name} reads several tokens at once", False
    except Exception as error:  # of whatever kind: plain `generate` may know better how to call it
        message = (str(error).strip().splitlines() or [""])[0]
        return f"{name} raises {type(error).__name__} where it reads several tokens at once: {message}", False
    for (_, put_back), state in zip(generators, states, strict=True):
        put_back(state)
    cure = ", as dropout does in training mode: call `model.eval()`" if _is_training(model) else ""
    return f"{name} draws random numbers in its forward{cure}", False


class _Draws(TorchDispatchMode):
    """Sees whether what this thread computes draws from a global random generator."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = {each.name: each.default_value for each in func._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            is_off = given.get("dropout_p") == 0 or given.get("train") is False
            self.seen |= not is_off and given.get("generator") is None
        return func(*args, **kwargs)


def _is_training(model) -> bool:
    return any(module.training for module in model.modules())


def _generators() -> list[tuple[Callable, Callable]]:
    """Of the global random generators: what reads and what sets their states."""
    generators = [(torch.default_generator.get_state, torch.default_generator.set_state)]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if hasattr(module, "default_generators"):  # one of each device
            generators += [(each.get_state, each.set_state) for each in module.default_generators]
        else:
            generators.append((module.get_rng_state, module.set_rng_state))
    return generators


def _random_ids(model, rows: int, tokens: int) -> torch.Tensor:
    """Of shape `(rows, tokens)`, whatever the default device is."""
    high = min(model.config.get_text_config(decoder=True).vocab_size, 1000)
    ids = torch.randint(min(3, high - 1), high, (rows, tokens), generator=_generator(), device="cpu")
    # offloaded weights are fetched, and inputs moved, by hooks
    return ids if model.device.type == "meta" else ids.to(model.device)


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


def _read(model, tokens: torch.LongTensor, begin: int, cache: DynamicCache | None) -> torch.Tensor:
    """Logits of one row, of shape `(tokens, vocab_size)`."""
    return _read_rows(model, tokens, begin, cache)[0]


def _read_rows(model, tokens: torch.LongTensor, begin: int, cache: DynamicCache | None, **inputs) -> torch.Tensor:
    """Logits at the positions from `begin` on, of shape `(rows, tokens, vocab_size)`, called as `generate` does."""
    count = tokens.shape[1]
    kwargs: dict[str, Any] = {"use_cache": cache is not None}
    if "position_ids" in inspect.signature(model.forward).parameters:
        kwargs["position_ids"] = torch.arange(begin, begin + count, device=tokens.device)[None]
    kwargs = model.prepare_inputs_for_generation(tokens, next_sequence_length=count, cache=cache, **kwargs)
    if "logits_to_keep" in kwargs:
        kwargs["logits_to_keep"] = count
    # not `model(...)`: hooks that count forwards are not asked
    outputs = model.forward(**{**kwargs, **inputs}, return_dict=True)
    if cache is not None and getattr(outputs, "cache", None) is not cache:
        raise _NoCache
    return outputs.logits.float()


class _NoCache(Exception):
    """The model does not return the cache that it was given."""


def _try_forward(model) -> None:
    _read(model, _random_ids(model, 1, BLOCK_TOKENS), 0, None)


def _try_blocks(model, window: int | None) -> str | None:
    """Behind a short prompt, or where the text passes a window: there the cache is filled as if it had been read."""
    begin, sizes = (PROMPT_TOKENS, (BLOCK_TOKENS,)) if window is None else (max(1, window - 1), (2, BLOCK_TOKENS - 2))
    ids = _random_ids(model, 2, PROMPT_TOKENS + BLOCK_TOKENS)
    prompt, wrong, right = ids[:1, :PROMPT_TOKENS], ids[1:, PROMPT_TOKENS:], ids[:1, PROMPT_TOKENS:]
    text_config = model.config.get_text_config(decoder=True)
    prefilled = DynamicCache(config=text_config)
    try:
        _read(model, prompt, 0, prefilled)
    except _NoCache:
        return f"{type(model).__name__} returns no `cache`"
    steps = _at(prefilled, begin)
    expected = torch.cat([_read(model, token, begin + t, steps) for t, token in enumerate(right.split(1, dim=1))])
    del steps  # its windows may be large
    blocks = _at(prefilled, begin)
    into_slots(blocks)
    rollback = Rollback(blocks, begin)
    rollback.record(True)
    rollback.begin(is_draft=True)
    _read(model, wrong, begin, blocks)
    rollback.complete()
    rollback.roll_back(BLOCK_TOKENS, BLOCK_TOKENS)
    found = []
    for block in right.split(sizes, dim=1):
        found.append(_read(model, block, begin, blocks))
        rollback.trim()
        begin += block.shape[1]
    error = (torch.cat(found) - expected).abs().max()
    most = _tolerance(model, prefilled)
    if most is None:
        most = MOST_ROUNDING
        if window is None:
            whole = _read(model, ids[:1], 0, None)[PROMPT_TOKENS:]
            rounding = float(ROUNDINGS * (whole - expected).abs().max() / expected.std())
            most = 0 if text_config.model_type in FAILING_TYPES else min(MOST_ROUNDING, rounding)
    if error <= most * expected.std():
        return None
    where = "" if window is None else f" where a text passes its window of {window} tokens"
    return f"{type(model).__name__} does not read several tokens at once as it reads them one by one{where}"


def _at(prefilled: DynamicCache, length: int) -> DynamicCache:
    """
    A copy whose windows have read `length` tokens: loud ones, then silence. Layers without a window stay as they are,
    since each kind of mask is made from layers of its own kind.
    """
    cache = copy.deepcopy(prefilled)
    for layer in cache.layers:
        if not isinstance(layer, DynamicSlidingWindowLayer) or length == layer.cumulative_length:
            continue
        count = min(length, layer.sliding_window - 1)
        for name, volume in (("keys", 1), ("values", min(count, LOUDEST))):
            read = getattr(layer, name)
            filled = read.new_zeros((*read.shape[:-2], count, read.shape[-1]))
            edge = filled[..., :EDGE, :]
            noise = torch.randn(edge.shape, generator=_generator(), device="cpu").to(edge)
            edge.copy_(volume * read.float().std().to(edge) * noise)
            setattr(layer, name, filled)
        layer.cumulative_length = length
    return cache


def _tolerance(model, cache: DynamicCache) -> float | None:
    """Of what is least precise in a forward; `None` in half precision, and with quantized weights."""
    dtypes = {parameter.dtype for parameter in model.parameters()} | set(_autocast_dtypes())
    for layer in cache.layers:  # what autocast inside of the forward leaves behind
        states = [getattr(layer, name, None) for name in ("keys", "values")]
        states += [state for name in ("conv_states", "recurrent_states") for state in getattr(layer, name, {}).values()]
        dtypes |= {state.dtype for state in states if state is not None}
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    if is_quantized or not dtypes <= TOLERANCE.keys() or (torch.float32 in dtypes and _rounds_float32()):
        return None
    return max(TOLERANCE[dtype] for dtype in dtypes)


def _try_masks(model, window: int | None) -> str | None:
    """
    Two rows, which go on by differently many tokens behind a wrong draft; the first has a child. Each of the three must
    yield what it yields alone, one by one.
    """
    begin = PROMPT_TOKENS if window is None else max(1, window - 1)
    ids = _random_ids(model, 3, PROMPT_TOKENS + BLOCK_TOKENS)
    prompt, (text, other, wrong) = ids[:1, :PROMPT_TOKENS], ids[:, PROMPT_TOKENS:].tolist()
    config = model.config.get_text_config(decoder=True)
    prefilled = DynamicCache(config=config)
    _read(model, prompt, 0, prefilled)
    alone = [_at(prefilled, begin) for _ in range(2)]
    expected = [
        torch.cat([_read(model, prompt.new_tensor([[token]]), begin + t, cache) for t, token in enumerate(tokens)])
        for tokens, cache in zip((text, other), alone, strict=True)
    ]
    del alone
    cache = _at(prefilled, begin)
    into_slots(cache)
    for layer in cache.layers:
        if type(layer) is SlotLayer and layer.is_initialized:
            layer.bases = [layer.bases[0] + begin - layer.end]  # layers without a window have read less
    cache.reorder_cache(torch.tensor([0, 0], device="cpu"))
    slots = SlotsOfCache(cache, config, None, prompt.device)
    if not slots.takes_masks:
        return f"{type(model).__name__} has layers of several kinds, whose masks are not known"
    slots.fork({0: begin})
    half = BLOCK_TOKENS // 2
    first = [[Fed(begin, 1, Draft(wrong[1:]))], [Fed(begin, half, Draft())]]
    first[0].append(Fed(begin, BLOCK_TOKENS, Draft()))
    blocks = [[text[0], *wrong[1:], *other], [*other[:half], *[text[0]] * (2 * BLOCK_TOKENS - half)]]
    found = _read_places(model, cache, slots, first, blocks)
    results = [[found[0, :1]], [found[1, :half]], [found[0, BLOCK_TOKENS:]]]
    second = [[Fed(begin + 1, BLOCK_TOKENS - 1, Draft())], [Fed(begin + half, BLOCK_TOKENS - half, Draft())]]
    blocks = [text[1:], [*other[half:], *[text[0]] * (half - 1)]]
    found = _read_places(model, cache, slots, second, blocks)
    results[0].append(found[0])
    results[1].append(found[1, : BLOCK_TOKENS - half])
    wanted = torch.cat([expected[0], expected[1], expected[1]])
    error = (torch.cat([part for parts in results for part in parts]) - wanted).abs().max()
    most = _tolerance(model, prefilled)
    if most is None:
        most = MOST_ROUNDING
        if window is None:
            whole = _read(model, ids[:1], 0, None)[PROMPT_TOKENS:]
            rounding = (whole - expected[0]).abs().max() / expected[0].std()
            most = min(MOST_ROUNDING, ROUNDINGS * rounding.clamp(min=1e-2))
    return None if error <= most * wanted.std() else f"{type(model).__name__} mixes texts that a mask tells apart"


def _read_places(model, cache: DynamicCache, slots: SlotsOfCache, lines: list[list[Fed]], blocks: list) -> torch.Tensor:
    """Logits of shape `(rows, places, vocab_size)`."""
    tokens = torch.tensor(blocks, device=model.device if model.device.type != "meta" else None)
    places = Places.of(lines, tokens.shape[1], tokens.device)
    mask = slots.begin(places, model.dtype)
    try:
        return _read_rows(model, tokens, 0, cache, attention_mask=mask, position_ids=places.indices)
    finally:
        slots.end()
