"""Shared fixtures: models, a tokenizer with one piece of text a token, and plain runs to compare with."""

import math
import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
from tiny_models import EOS, VOCAB_SIZE, build, prompt_ids
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import hf_ssr.scheduling
from hf_ssr.costs import UnitCosts

torch.set_num_threads(1)

build_once = lru_cache(maxsize=2)(build)


@pytest.fixture(autouse=True)
def steady_costs(request, monkeypatch):
    """Measured costs are noise on tiny models: tests count forwards at one cost each, unless `measured_costs`."""
    if request.node.get_closest_marker("measured_costs") is None:
        monkeypatch.setattr(hf_ssr.scheduling, "costs_of", lambda model: UnitCosts(model.device))


@pytest.fixture
def model():
    """A tiny Qwen3, full attention."""
    return build_once("qwen3")


@pytest.fixture
def sliding_model():
    """A tiny Gemma 3 with windows shorter than the prompt."""
    return build_once("gemma3")


@pytest.fixture(scope="session")
def tokenizer():
    """Every printable character is a token, so are some pairs, `<think>` and `</think>`; it fits the tiny models."""
    characters = [" ", "\n", *map(chr, range(33, 127))]
    pairs = [a + b for a in "aeiou" for b in "bcdfglmnrst"]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *characters, *pairs])}
    merges = [(pair[0], pair[1]) for pair in pairs]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<pad>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    assert len(tokenizer) <= VOCAB_SIZE and tokenizer.eos_token_id == EOS
    return tokenizer


@dataclass
class ForwardCounter:
    """Counts a model's forwards from outside: the rows and tokens of each, and the position behind its last token."""

    shapes: list[tuple[int, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def __call__(self, module, args, kwargs, output) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.shapes.append(tuple(ids.shape))
        self.ends.append(int(kwargs["position_ids"].max()) + 1 if kwargs.get("position_ids") is not None else 0)

    @property
    def count(self) -> int:
        return len(self.shapes)


@pytest.fixture
def count_forwards(request):
    """`count_forwards(model)`: a [`ForwardCounter`] on the model until the test ends."""

    def attach(model) -> ForwardCounter:
        counter = ForwardCounter()
        request.addfinalizer(model.register_forward_hook(counter, with_kwargs=True).remove)
        return counter

    return attach


@dataclass
class Plain:
    """
    A plain run to compare with: prompt, new tokens, and a token to be declared the closing marker, new to the text at
    `close` (index among the new tokens).
    """

    ids: torch.LongTensor
    sequences: torch.LongTensor
    settings: dict[str, Any]
    close: int

    @property
    def new(self) -> list[int]:
        return self.sequences[0, self.ids.shape[1] :].tolist()

    @property
    def marker(self) -> int:
        return self.new[self.close]

    @property
    def answer(self) -> list[int]:
        return self.new[self.close + 1 :]


def chi_square_limit(degrees: int) -> float:
    """What chi-square exceeds once in a million (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.753 * math.sqrt(2 / (9 * degrees))) ** 3


def run(model, ids, settings: dict[str, Any], seed: int = 7, **kwargs):
    """`generate` from a fixed seed; `settings` holds keywords of a call."""
    torch.manual_seed(seed)
    kwargs.setdefault("attention_mask", torch.ones_like(ids))  # a random text may hold the padding token
    return model.generate(ids, **{"pad_token_id": 0, "eos_token_id": None, **settings, **kwargs})


def plain_run(model, settings: dict[str, Any], seed: int = 7, earliest_close: int = 16, **kwargs) -> Plain:
    """A plain run, checked to be lively enough to tell right from wrong."""
    ids = prompt_ids()
    sequences = run(model, ids, settings, seed, **kwargs)
    new = sequences[0, ids.shape[1] :].tolist()
    assert len(set(new)) >= 12, f"degenerate baseline: {len(set(new))} distinct tokens"
    close = next(i for i, token in enumerate(new) if i >= earliest_close and token not in new[:i])
    return Plain(ids, sequences, settings, close)
