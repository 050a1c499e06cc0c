"""Does a model read several tokens in one forward, and roll them back, as it does one by one? Tried once, on a few."""

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


def reads_blocks(model) -> bool:
    """
    Whether a forward over several tokens leaves a recurrent cache as forwards over single tokens do, also after tokens
    were rolled back. Some architectures drop their state there, without an error. The answer is kept as long as the
    model lives. Draws nothing from the global random generator.

    Args:
        model (`PreTrainedModel`): with a recurrent cache.
    """
    known = _results.setdefault(model, {})
    if model.dtype not in known:
        try:
            known[model.dtype] = _try_block(model)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError):
            known[model.dtype] = False  # a cache of its own kind
    return known[model.dtype]


@torch.no_grad()
def _try_block(model) -> bool:
    text_config = model.config.get_text_config(decoder=True)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    high = min(text_config.vocab_size, 1000)
    ids = torch.randint(min(3, high - 1), high, (2, PROMPT_TOKENS + BLOCK_TOKENS), generator=generator)
    if model.device.type != "meta":  # offloaded weights are fetched, and inputs moved, by hooks
        ids = ids.to(model.device)
    wrong, ids = ids[:1, PROMPT_TOKENS:], ids[1:]

    def read(cache: DynamicCache, tokens: torch.LongTensor, begin: int) -> torch.Tensor:
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)[None]
        kwargs = {"position_ids": positions} if takes_positions else {}
        return model(tokens, cache=cache, use_cache=True, **kwargs).logits[0].float()

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
    whole = model(ids, use_cache=False).logits[0, PROMPT_TOKENS:].float()
    return text_config.model_type not in FAILING_TYPES and bool(error <= ROUNDINGS * (whole - expected).abs().max())
