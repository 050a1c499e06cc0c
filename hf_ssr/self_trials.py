"""
The trials of the self-check: short forwards whose outcome is known from others. Each returns why a model fails, or
`None` if it passes.
"""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from .cache_slots import SlotLayer, into_slots
from .drafting import Draft
from .forking import Rollback, shift_rows
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


def _random_ids(model, rows: int, tokens: int) -> torch.Tensor:
    """Of shape `(rows, tokens)`, whatever the default device is."""
    high = min(model.config.get_text_config(decoder=True).vocab_size, 1000)
    ids = torch.randint(min(3, high - 1), high, (rows, tokens), generator=_generator(), device="cpu")
    # offloaded weights are fetched, and inputs moved, by hooks
    return ids if model.device.type == "meta" else ids.to(model.device)


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


def _read(model, tokens: torch.Tensor, begin: int, cache: DynamicCache | None, **inputs) -> torch.Tensor:
    """Logits of tokens from position `begin` on, shape `(rows, tokens, vocab_size)`, called as `generate` does."""
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


def _prefilled(model, prompts: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    _read(model, prompts, 0, cache)
    return cache


def _one_by_one(model, tokens: torch.Tensor, begin: int, cache: DynamicCache) -> torch.Tensor:
    logits = [_read(model, token, begin + t, cache) for t, token in enumerate(tokens.split(1, dim=1))]
    return torch.cat(logits, dim=1)


class _NoCache(Exception):
    """The model does not return the cache that it was given."""


def try_forward(model) -> None:
    _read(model, _random_ids(model, 1, BLOCK_TOKENS), 0, None)


def try_blocks(model, window: int | None) -> str | None:
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
    into_slots(blocks)
    rollback = Rollback(model, blocks, begin)
    found = []
    for block, is_right in [(wrong, False), *((block, True) for block in right.split(sizes, dim=1))]:
        with rollback.stepping(is_draft=True):
            logits = _read(model, block, begin, blocks)
        rollback.roll_back(0 if is_right else BLOCK_TOKENS, block.shape[1])
        if is_right:
            found.append(logits)
            begin += block.shape[1]
    error = (torch.cat(found, dim=1) - expected).abs().max()
    most = tolerance(model, prefilled)
    if most is None:
        most = MOST_ROUNDING if window is not None else _most_rounding(model, ids[:1], expected)
    if error <= most * expected.std():
        return None
    where = "" if window is None else f" where a text passes its window of {window} tokens"
    return f"{type(model).__name__} does not read several tokens at once as it reads them one by one{where}"


def _most_rounding(model, ids: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """
    Of half precision: some times what is found, or is the least to expect, in a forward without cache over a prompt and
    the tokens of the `expected` logits.
    """
    if model.config.get_text_config(decoder=True).model_type in FAILING_TYPES:
        return 0
    rounding = (_read(model, ids, 0, None)[:, PROMPT_TOKENS:] - expected).abs().max() / expected.std()
    return min(MOST_ROUNDING, ROUNDINGS * max(least, float(rounding)))


def try_rows(model) -> str | None:
    """Two rows: of a first block they keep 1 and 3 tokens, of a second 3 and 1, and go on."""
    count = BLOCK_TOKENS + 1
    ids = _random_ids(model, 2, PROMPT_TOKENS + count + BLOCK_TOKENS)
    prompts, texts, wrong = ids.split([PROMPT_TOKENS, count, BLOCK_TOKENS], dim=1)
    expected = _one_by_one(model, texts, PROMPT_TOKENS, _prefilled(model, prompts))
    cache = _prefilled(model, prompts)
    into_slots(cache)
    rollback = Rollback(model, cache, PROMPT_TOKENS)
    if not rollback.states.settles_rows:
        return f"in a batch, the recurrent state of {type(model).__name__} would have to go back for each row alone"
    ends, mask, errors = [0, 0], torch.ones_like(prompts), []
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
            errors.append((logits[row, : kept[row]] - expected[row, end : ends[row]]).abs().max())
        rollback.states.settle(kept, width)
        excess, length = [width - each for each in kept], PROMPT_TOKENS + max(ends)
        mask = shift_rows(cache, {"attention_mask": mask}, [0, 1], 2, excess, length)["attention_mask"]
    most = tolerance(model, cache)
    if most is None:
        most = _most_rounding(model, ids[:, : PROMPT_TOKENS + count], expected)
    reason = f"in a batch, rows of {type(model).__name__} do not go back each by its own count"
    return None if torch.stack(errors).max() <= most * expected.std() else reason  # not if one is NaN


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


def tolerance(model, cache: Cache) -> float | None:
    """
    Of what is least precise in a forward; `None` where rounding may decide between two tokens: in half precision, with
    quantized weights, and where matrices of float32 are multiplied in less.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()} | set(autocast_dtypes())
    for layer in cache.layers:  # what autocast inside of the forward leaves behind
        states = [getattr(layer, name, None) for name in ("keys", "values")]
        states += [state for name in ("conv_states", "recurrent_states") for state in getattr(layer, name, {}).values()]
        dtypes |= {state.dtype for state in states if state is not None}
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    if is_quantized or not dtypes <= TOLERANCE.keys() or (torch.float32 in dtypes and rounds_float32()):
        return None
    return max(TOLERANCE[dtype] for dtype in dtypes)


def try_masks(model, window: int | None) -> str | None:
    """
    Two rows, which go on by differently many tokens behind a wrong draft; the first has a child. Each of the three must
    yield what it yields alone, one by one.
    """
    begin = PROMPT_TOKENS if window is None else max(1, window - 1)
    ids = _random_ids(model, 3, PROMPT_TOKENS + BLOCK_TOKENS)
    prompt, (text, other, wrong) = ids[:1, :PROMPT_TOKENS], ids[:, PROMPT_TOKENS:].tolist()
    config = model.config.get_text_config(decoder=True)
    prefilled = _prefilled(model, prompt)
    alone = [_at(prefilled, begin) for _ in range(2)]
    expected = [
        _one_by_one(model, prompt.new_tensor([tokens]), begin, cache)[0]
        for tokens, cache in zip((text, other), alone, strict=True)
    ]
    del alone
    cache = _at(prefilled, begin)
    into_slots(cache)
    for layer in cache.layers:
        if type(layer) is SlotLayer and layer.is_initialized:
            layer.bases = [layer.bases[0] + begin - layer.end]  # layers without a window have read less
    both: Any = torch.tensor([0, 0], device="cpu")  # which transformers has as a LongTensor
    cache.reorder_cache(both)
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
    most = tolerance(model, prefilled)
    if most is None:
        most = MOST_ROUNDING if window is not None else _most_rounding(model, ids[:1], expected[0][None], least=0.01)
    return None if error <= most * wanted.std() else f"{type(model).__name__} mixes texts that a mask tells apart"


def _read_places(model, cache: DynamicCache, slots: SlotsOfCache, lines: list[list[Fed]], blocks: list) -> torch.Tensor:
    """Logits of shape `(rows, places, vocab_size)`."""
    tokens = torch.tensor(blocks, device=model.device if model.device.type != "meta" else None)
    places = Places.of(lines, tokens.shape[1], tokens.device)
    mask = slots.begin(places, model.dtype)
    try:
        return _read(model, tokens, 0, cache, attention_mask=mask, position_ids=places.indices)
    finally:
        slots.end()


def autocast_dtypes() -> Iterator[torch.dtype]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for kind in {"cpu"} if accelerator is None else {"cpu", accelerator.type}:
        if torch.is_autocast_enabled(kind):
            yield torch.get_autocast_dtype(kind)


def rounds_float32() -> bool:
    """Whether matrices of float32 may be multiplied in less (TF32, bfloat16)."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by its newer name only
        return True
