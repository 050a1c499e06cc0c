"""Seeds of the rows of a batch, for rules that draw in other ways than plain `generate`."""

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence

import torch


def row_seeds(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """
    One seed a row. It depends on a number drawn from the global generator, on the row's own prompt, and, where a call
    holds the same prompt several times, on which copy it is: not on padding, neighbours, or its place among them.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch_size, prompt_length)`): the prompts.
        attention_mask (`torch.LongTensor` of shape `(batch_size, length)`, *optional*): 0 = padding. Of a longer one,
            what the cache holds before the prompts comes first.
    """
    call_seed = int(torch.randint(2**62, (), device="cpu"))
    masks = [None] * len(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :].bool()
    copies: Counter[bytes] = Counter()
    seeds = []
    for ids, mask in zip(input_ids, masks, strict=True):
        prompt = _bytes((ids if mask is None else ids[mask]).tolist())
        key = _bytes([call_seed, copies[prompt]]) + prompt
        copies[prompt] += 1
        seeds.append(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 2)
    return seeds


def _bytes(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)  # on any machine
