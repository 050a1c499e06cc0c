"""
Does a model read several tokens in one forward, and roll them back, as it does one by one, past its windows too? Do
the rows of a batch go back by counts of their own? Does it draw random numbers meanwhile? And does it read two texts in
one row that a mask tells apart? Tried on a few tokens, before SSR is trusted.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from threading import RLock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from .forking import Rollback, shift_rows

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


def why_not_in_rows(model) -> str | None:
    """
    Why rows of a batch cannot keep differently many tokens of a forward; `None` if they can. The answer is kept as that
    of [`why_not_in_blocks`].

    Args:
        model (`PreTrainedModel`): with layers that keep a state.
    """
    with _lock:
        return _known(model, _try_rows)


def tells_texts_apart(model) -> bool:
    """
    Whether a forward over two texts in one row, with a mask that lets each see itself and what both begin with, yields
    what forwards over each of them yield. The answer is kept as that of [`why_not_in_blocks`].

    Args:
        model (`PreTrainedModel`): with full attention only.
    """
    with _lock:
        return model.config._attn_implementation in ("sdpa", "eager") and _known(model, _try_two_texts) is None


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
    names = ("_attn_implementation", "_experts_implementation")
    return (
        *((each.training, getattr(each, "gradient_checkpointing", False)) for each in model.modules()),
        *(each._compiled_call_impl is None for each in model.modules()),
        frozenset((parameter.dtype, parameter.device) for parameter in model.parameters()),
        tuple(getattr(each, name, None) for each in (model.config, config) for name in names),
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


def _random_ids(model, rows: int, tokens: int) -> torch.LongTensor:
    """Of shape `(rows, tokens)`, whatever the default device is."""
    high = min(model.config.get_text_config(decoder=True).vocab_size, 1000)
    ids = torch.randint(min(3, high - 1), high, (rows, tokens), generator=_generator(), device="cpu")
    # offloaded weights are fetched, and inputs moved, by hooks
    return ids if model.device.type == "meta" else ids.to(model.device)


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


def _read(model, tokens: torch.LongTensor, begin: int, cache: DynamicCache | None, **inputs) -> torch.Tensor:
    """Logits of tokens from position `begin` on, shape `(rows, tokens, vocab_size)`, called as `generate` does."""
    count = tokens.shape[1]
    kwargs = {"use_cache": cache is not None}
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


def _prefilled(model, prompts: torch.LongTensor) -> DynamicCache:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    _read(model, prompts, 0, cache)
    return cache


def _one_by_one(model, tokens: torch.LongTensor, begin: int, cache: DynamicCache) -> torch.Tensor:
    logits = [_read(model, token, begin + t, cache) for t, token in enumerate(tokens.split(1, dim=1))]
    return torch.cat(logits, dim=1)


class _NoCache(Exception):
    """The model does not return the cache that it was given."""


def _try_forward(model) -> None:
    _read(model, _random_ids(model, 1, BLOCK_TOKENS), 0, None)


def _try_blocks(model, window: int | None) -> str | None:
    """Behind a short prompt, or where the text passes a window: there the cache is filled as if it had been read."""
    begin, sizes = (PROMPT_TOKENS, (BLOCK_TOKENS,)) if window is None else (max(1, window - 1), (2, BLOCK_TOKENS - 2))
    ids = _random_ids(model, 2, PROMPT_TOKENS + BLOCK_TOKENS)
    prompt, wrong, right = ids[:1, :PROMPT_TOKENS], ids[1:, PROMPT_TOKENS:], ids[:1, PROMPT_TOKENS:]
    try:
        prefilled = _prefilled(model, prompt)
    except _NoCache:
        return f"{type(model).__name__} returns no `cache`"
    expected = _one_by_one(model, right, begin, _at(prefilled, begin))
    blocks = _at(prefilled, begin)
    rollback = Rollback(model, blocks, begin)
    rollback.record(True)
    found = []
    for block, is_right in [(wrong, False), *((block, True) for block in right.split(sizes, dim=1))]:
        with rollback.stepping(is_draft=True):
            logits = _read(model, block, begin, blocks)
        rollback.roll_back(0 if is_right else BLOCK_TOKENS, block.shape[1])
        if is_right:
            found.append(logits)
            begin += block.shape[1]
    error = (torch.cat(found, dim=1) - expected).abs().max()
    most = _tolerance(model, prefilled)
    if most is None:
        most = MOST_ROUNDING if window is not None else _most_rounding(model, ids[:1], expected)
    if error <= most * expected.std():
        return None
    where = "" if window is None else f" where a text passes its window of {window} tokens"
    return f"{type(model).__name__} does not read several tokens at once as it reads them one by one{where}"


def _most_rounding(model, ids: torch.LongTensor, expected: torch.Tensor) -> float:
    """Of half precision, as found in a forward without cache over a prompt and the tokens of the `expected` logits."""
    if model.config.get_text_config(decoder=True).model_type in FAILING_TYPES:
        return 0
    rounding = (_read(model, ids, 0, None)[:, PROMPT_TOKENS:] - expected).abs().max() / expected.std()
    return min(MOST_ROUNDING, ROUNDINGS * rounding)


def _try_rows(model) -> str | None:
    """Two rows: of a first block they keep 1 and 3 tokens, of a second 3 and 1, and go on."""
    count = BLOCK_TOKENS + 1
    ids = _random_ids(model, 2, PROMPT_TOKENS + count + BLOCK_TOKENS)
    prompts, texts, wrong = ids.split([PROMPT_TOKENS, count, BLOCK_TOKENS], dim=1)
    expected = _one_by_one(model, texts, PROMPT_TOKENS, _prefilled(model, prompts))
    cache = _prefilled(model, prompts)
    rollback = Rollback(model, cache, PROMPT_TOKENS)
    rollback.record(True)
    if not rollback.states.settles_rows:
        return f"in a batch, the recurrent state of {type(model).__name__} would have to go back for each row alone"
    ends, mask, error = [0, 0], torch.ones_like(prompts), 0.0
    for width, kept in ((BLOCK_TOKENS, [1, 3]), (BLOCK_TOKENS - 1, [3, 1]), (1, [1, 1])):
        block = wrong[:, :width].clone()
        positions = torch.stack([torch.arange(end, end + width, device=ids.device) for end in ends]) + PROMPT_TOKENS
        for row, end in enumerate(ends):
            block[row, : kept[row]] = texts[row, end : end + kept[row]]
        mask = torch.cat([mask, torch.ones_like(block)], dim=1)
        with rollback.stepping(is_draft=True):
            logits = _read(model, block, 0, cache, attention_mask=mask, position_ids=positions)
        for row, end in enumerate(ends):
            ends[row] = end + kept[row]
            error = max(error, (logits[row, : kept[row]] - expected[row, end : ends[row]]).abs().max())
        rollback.states.settle(kept, width)
        excess, length = [width - each for each in kept], PROMPT_TOKENS + max(ends)
        mask = shift_rows(cache, {"attention_mask": mask}, [0, 1], 2, excess, length)["attention_mask"]
    most = _tolerance(model, cache)
    if most is None:
        most = _most_rounding(model, ids[:, : PROMPT_TOKENS + count], expected)
    reason = f"in a batch, rows of {type(model).__name__} do not go back each by its own count"
    return None if error <= most * expected.std() else reason


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


def _try_two_texts(model) -> str | None:
    ids = _random_ids(model, 1, PROMPT_TOKENS + 2 * BLOCK_TOKENS)
    prompt, first, second = ids.split([PROMPT_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS], dim=1)
    alone = [_read(model, torch.cat([prompt, text], dim=1), 0, None)[:, PROMPT_TOKENS:] for text in (first, second)]
    expected = torch.cat(alone, dim=1)
    prefilled = _prefilled(model, prompt)
    places = torch.arange(ids.shape[1], device=ids.device)
    seen = places[None] <= places[PROMPT_TOKENS:, None]
    seen[BLOCK_TOKENS:, PROMPT_TOKENS : PROMPT_TOKENS + BLOCK_TOKENS] = False
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=ids.device)
    mask = mask.masked_fill(~seen, torch.finfo(model.dtype).min)[None, None]
    positions = places[PROMPT_TOKENS : PROMPT_TOKENS + BLOCK_TOKENS].repeat(2)[None]
    both = torch.cat([first, second], dim=1)
    found = _read(model, both, 0, copy.deepcopy(prefilled), attention_mask=mask, position_ids=positions)
    error = (found - expected).abs().max()
    most = _tolerance(model, prefilled)
    if most is None:
        block = _read(model, first, PROMPT_TOKENS, prefilled)
        rounding = (block - expected[:, :BLOCK_TOKENS]).abs().max() / expected.std()
        most = min(MOST_ROUNDING, ROUNDINGS * rounding.clamp(min=1e-2))
    return None if error <= most * expected.std() else f"{type(model).__name__} mixes two texts in one row"
