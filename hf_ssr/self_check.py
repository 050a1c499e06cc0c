"""
Does a model read several tokens in one forward, and roll them back, as it does one by one? And two texts in one row
that a mask tells apart? Tried once, on a few tokens.
"""

import inspect
import weakref

import torch
from transformers import DynamicCache

from .forking import Rollback

PROMPT_TOKENS, BLOCK_TOKENS = 12, 4
# Largest error in standard deviations of the logits; in float32 models that fail are off by 0.04 and more, others 1e-5.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}
# In half precision rounding can hide a small fault: a few times the rounding of a forward without cache is allowed, and
# what is known to fail is named.
ROUNDINGS = 3
FAILING_TYPES = {"jamba", "mamba", "falcon_mamba", "recurrent_gemma", "minimax"}

_results: "weakref.WeakKeyDictionary[torch.nn.Module, dict]" = weakref.WeakKeyDictionary()
_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError)  # a cache of its own kind


def reads_blocks(model) -> bool:
    """
    Whether a forward over several tokens leaves a recurrent cache as forwards over single tokens do, also after tokens
    were rolled back. Some architectures drop their state there, without an error. The answer is kept as long as the
    model lives. Draws nothing from the global random generator.

    Args:
        model (`PreTrainedModel`): with a recurrent cache.
    """
    return _known(model, _try_block)


def tells_texts_apart(model) -> bool:
    """
    Whether a forward over two texts in one row, with a mask that lets each see itself and what both begin with, yields
    what forwards over each of them yield. The answer is kept as long as the model lives.

    Args:
        model (`PreTrainedModel`): with full attention only.
    """
    return model.config._attn_implementation in ("sdpa", "eager") and _known(model, _try_two_texts)


def _known(model, trial) -> bool:
    known = _results.setdefault(model, {})
    key = trial, model.dtype, model.config._attn_implementation
    if key not in known:
        try:
            known[key] = trial(model)
        except torch.OutOfMemoryError:
            return False  # this time
        except _ERRORS:
            known[key] = False
    return known[key]


@torch.no_grad()
def _try_two_texts(model) -> bool:
    text_config = model.config.get_text_config(decoder=True)
    ids = _random_ids(model, 1, PROMPT_TOKENS + 2 * BLOCK_TOKENS)
    prompt, first, second = ids.split([PROMPT_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS], dim=1)

    def read(tokens, positions, cache=None, mask=None):
        kwargs = {"attention_mask": mask} if mask is not None else {}
        return (
            model.forward(tokens, position_ids=positions[None], cache=cache, use_cache=cache is not None, **kwargs)
            .logits[0]
            .float()
        )

    places = torch.arange(PROMPT_TOKENS + 2 * BLOCK_TOKENS, device=ids.device)
    branch = places[: PROMPT_TOKENS + BLOCK_TOKENS]
    expected = torch.cat([read(torch.cat([prompt, text], dim=1), branch)[PROMPT_TOKENS:] for text in (first, second)])
    cache = DynamicCache(config=text_config)
    read(prompt, branch[:PROMPT_TOKENS], cache)
    seen = torch.ones(2 * BLOCK_TOKENS, len(places), device=ids.device).tril(PROMPT_TOKENS).bool()
    seen[BLOCK_TOKENS:, PROMPT_TOKENS : PROMPT_TOKENS + BLOCK_TOKENS] = False
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=ids.device)
    mask = mask.masked_fill(~seen, torch.finfo(model.dtype).min)[None, None]
    found = read(torch.cat([first, second], dim=1), branch[PROMPT_TOKENS:].repeat(2), cache, mask)
    error = (found - expected).abs().max()
    if model.dtype in TOLERANCE:
        return bool(error <= TOLERANCE[model.dtype] * expected.std())
    cache = DynamicCache(config=text_config)
    read(prompt, branch[:PROMPT_TOKENS], cache)
    block = read(first, branch[PROMPT_TOKENS:], cache)
    return bool(error <= ROUNDINGS * (block - expected[:BLOCK_TOKENS]).abs().max().clamp(min=1e-2 * expected.std()))


def _random_ids(model, rows: int, tokens: int) -> torch.LongTensor:
    """Of shape `(rows, tokens)`. Draws nothing from the global random generator."""
    generator = torch.Generator().manual_seed(0)
    high = min(model.config.get_text_config(decoder=True).vocab_size, 1000)
    ids = torch.randint(min(3, high - 1), high, (rows, tokens), generator=generator)
    # offloaded weights are fetched, and inputs moved, by hooks
    return ids if model.device.type == "meta" else ids.to(model.device)


@torch.no_grad()
def _try_block(model) -> bool:
    text_config = model.config.get_text_config(decoder=True)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    ids = _random_ids(model, 2, PROMPT_TOKENS + BLOCK_TOKENS)
    wrong, ids = ids[:1, PROMPT_TOKENS:], ids[1:]

    def read(cache: DynamicCache, tokens: torch.LongTensor, begin: int) -> torch.Tensor:
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)[None]
        kwargs = {"position_ids": positions} if takes_positions else {}
        # not `model(...)`: hooks that count forwards are not asked
        return model.forward(tokens, cache=cache, use_cache=True, **kwargs).logits[0].float()

    steps, block = DynamicCache(config=text_config), DynamicCache(config=text_config)
    read(steps, ids[:, :PROMPT_TOKENS], 0)
    read(block, ids[:, :PROMPT_TOKENS], 0)
    expected = torch.cat(
        [read(steps, ids[:, t : t + 1], t) for t in range(PROMPT_TOKENS, PROMPT_TOKENS + BLOCK_TOKENS)]
    )
    rollback = Rollback(block, PROMPT_TOKENS)
    rollback.record(True)
    rollback.begin(is_draft=True)
    read(block, wrong, PROMPT_TOKENS)
    rollback.complete()
    rollback.roll_back(BLOCK_TOKENS, BLOCK_TOKENS)
    found = read(block, ids[:, PROMPT_TOKENS:], PROMPT_TOKENS)
    error = (found - expected).abs().max()
    if model.dtype in TOLERANCE:
        return bool(error <= TOLERANCE[model.dtype] * expected.std())
    whole = model.forward(ids, use_cache=False).logits[0, PROMPT_TOKENS:].float()
    return text_config.model_type not in FAILING_TYPES and bool(error <= ROUNDINGS * (whole - expected).abs().max())
