"""A text read in several ways by one model: how far logits, cache and the tokens picked lie apart."""

import inspect
import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache

from ..forking import unsupported_cache
from ..host import kernels_for_steps

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Reader:
    """
    A model and a cache that is given a text, some tokens a forward; the prompt in the first.

    Args:
        model (`PreTrainedModel`): what reads.
        ids (`torch.LongTensor` of shape `(1, prompt_length)`): the prompt.
        rows (`int`): that all hold the same text.

    Raises:
        `ValueError`: if the cache is of a kind that cannot be compared.
    """

    def __init__(self, model, ids: torch.Tensor, rows: int = 1):
        self._model, self._rows, self._length = model, rows, 0
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.next_logits = self.read(ids)[:, -1]
        reason = unsupported_cache(self.cache)
        if reason is None and not any(map(contents, self.cache.layers)):
            reason = "the model keeps its state outside of the cache"
        if reason is not None:
            raise ValueError(f"the cache of {model.config.model_type} cannot be compared: {reason}.")

    @torch.no_grad()
    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        A forward over tokens of shape `(1, count)`, the same in each row.

        Returns:
            `torch.FloatTensor` of shape `(rows, count, vocab_size)`: the logits behind each.
        """
        end = self._length + tokens.shape[1]
        positions = torch.arange(self._length, end, device=tokens.device).expand(self._rows, -1)
        kwargs = {"position_ids": positions} if self._takes_positions else {}
        self._length = end
        tokens = tokens.repeat(self._rows, 1)
        return self._model(input_ids=tokens, cache=self.cache, use_cache=True, **kwargs).logits


class Steps(NamedTuple):
    """
    A plain greedy continuation, token by token.

    Args:
        tokens (`torch.LongTensor` of shape `(1, steps)`): what was read after the prompt.
        logits (`torch.FloatTensor` of shape `(steps, vocab_size)`): behind each of them.
        cache (`Cache`): after the last.
        std (`float`): standard deviation of the logits.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    cache: Cache
    std: float


def plain_steps(model, ids: torch.Tensor, steps: int) -> Steps:
    """
    Writes so many tokens behind a prompt of shape `(1, prompt_length)`, greedily, past the end of the text if need be.

    Raises:
        `ValueError`: if the cache is of a kind that cannot be compared, or the logits are no numbers.
    """
    reader = Reader(model, ids)
    token, tokens, logits = reader.next_logits.float().argmax(dim=-1)[None], [], []
    with kernels_for_steps(model):
        for _ in range(steps):
            tokens.append(token)
            logits.append(reader.read(token)[0])
            token = logits[-1].float().argmax(dim=-1)[None]
    all_logits = torch.cat(logits)
    if all_logits.isnan().any():
        raise ValueError(f"the model's logits are no numbers in {model.dtype}: set another --dtype.")
    std = float(all_logits[all_logits.isfinite()].double().std())
    return Steps(torch.cat(tokens, dim=1), all_logits, reader.cache, std)


class Flip(NamedTuple):
    """
    Another token than that of single steps.

    Args:
        position (`int`): of the token, among the new ones.
        token, other (`int`): of single steps, and here.
        margin, relative_margin (`float`): how far the scores of the two lie apart in single steps; in their std.
    """

    position: int
    token: int
    other: int
    margin: float
    relative_margin: float


@dataclass
class Comparison:
    """
    One way to read the text, against single steps.

    Args:
        name (`str`): of the way.
        rows, width (`int`): of a forward. Each row counts as a text of its own.
        tokens, equal_tokens (`int`): positions compared, and those with the same bits in all logits.
        max_difference, relative_difference (`float`): of a logit; in standard deviations of the logits.
        flips (`list[Flip]`): where another token has the highest score.
        layers, equal_layers (`int`): of the cache, and those with the same bits after the last token.
        cache_difference, cache_relative_difference (`float`): of a number in the cache; in standard deviations of the
            keys, the values, or the state that it belongs to.
    """

    name: str
    rows: int
    width: int
    tokens: int = 0
    equal_tokens: int = 0
    max_difference: float = 0.0
    relative_difference: float = 0.0
    flips: list[Flip] = field(default_factory=list)
    layers: int = 0
    equal_layers: int = 0
    cache_difference: float = 0.0
    cache_relative_difference: float = 0.0

    @property
    def equal_share(self) -> float:
        """Of the positions, those with the same bits in all logits."""
        return self.equal_tokens / self.tokens

    @property
    def is_bit_equal(self) -> bool:
        """Whether all logits and all of the cache have the same bits."""
        return self.equal_tokens == self.tokens and self.equal_layers == self.layers

    @property
    def flips_per_1000(self) -> float:
        """Divergences in 1,000 tokens."""
        return 1000 * len(self.flips) / self.tokens

    @property
    def largest_margin(self) -> float:
        """Of the divergences, in standard deviations of the logits; 0 if there are none."""
        return max((flip.relative_margin for flip in self.flips), default=0.0)

    def add_logits(self, found: torch.Tensor, steps: Steps, begin: int) -> None:
        """Logits of shape `(count, vocab_size)`, of one row, from the `begin`th new token on."""
        expected = steps.logits[begin : begin + len(found)]
        self.tokens += len(found)
        self.equal_tokens += int((_bits(found) == _bits(expected)).all(dim=-1).sum())
        self.max_difference = max(self.max_difference, _difference(found, expected))
        self.relative_difference = self.max_difference / steps.std
        ours, theirs = expected.float().argmax(dim=-1), found.float().argmax(dim=-1)
        for index in (ours != theirs).nonzero()[:, 0].tolist():
            token, other = int(ours[index]), int(theirs[index])
            margin = float(expected[index, token].double() - expected[index, other].double())
            self.flips.append(Flip(begin + index + 1, token, other, margin, margin / steps.std))

    def add_cache(self, found: Cache, expected: Cache) -> None:
        """After the last token; what is expected has one row."""
        for layer, other in zip(found.layers, expected.layers, strict=True):
            pairs = [(a, b.expand_as(a)) for a, b in zip(contents(layer), contents(other), strict=True)]
            if not pairs:
                continue
            self.layers += 1
            self.equal_layers += all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)
            for a, b in pairs:
                difference = _difference(a, b)
                self.cache_difference = max(self.cache_difference, difference)
                if difference:
                    scale = float(b.double().std())
                    relative = difference / scale if scale > 0 else math.inf
                    self.cache_relative_difference = max(self.cache_relative_difference, relative)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what is not finite is `None`."""
        rates = {name: getattr(self, name) for name in ("equal_share", "is_bit_equal", "flips_per_1000")}
        values = {**asdict(self), **rates, "flips": [flip._asdict() for flip in self.flips]}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


@dataclass
class Report:
    """
    What was measured.

    Args:
        dtype, device (`str`), threads (`int`): of the model, and of PyTorch on a CPU.
        prompt_tokens, steps (`int`): read at once, and token by token.
        end (`int`, *optional*): new tokens before the text's own end, if that comes before the last step.
        logits_std (`float`): standard deviation of the logits of single steps: what differences are relative to.
        comparisons (`list[Comparison]`): single steps again, blocks by rising width, and two rows.
    """

    dtype: str
    device: str
    threads: int
    prompt_tokens: int
    steps: int
    end: int | None
    logits_std: float
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def blocks(self) -> list[Comparison]:
        """Of one row and several tokens."""
        return [each for each in self.comparisons if each.width > 1]

    @property
    def again(self) -> Comparison:
        """Single steps a second time."""
        return next(each for each in self.comparisons if (each.rows, each.width) == (1, 1))

    @property
    def two_rows(self) -> Comparison:
        """Plain steps of a batch of two equal rows."""
        return next(each for each in self.comparisons if each.rows == 2)

    @property
    def widest_equal_block(self) -> int:
        """The widest block that, as all narrower ones tried, gives the bits of single steps; 1 if none does."""
        widest = 1
        for block in self.blocks:
            if not block.is_bit_equal:
                break
            widest = block.width
        return widest

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what is not finite is `None`."""
        comparisons = [each.to_dict() for each in self.comparisons]
        own = {"law": "by construction, not measured", "widest_equal_block": self.widest_equal_block}
        return {**asdict(self), **own, "comparisons": comparisons}


def contents(layer) -> list[torch.Tensor]:
    """What a layer of a cache holds: keys and values, states, or both."""
    held = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    for name in ("conv_states", "recurrent_states"):
        held += getattr(layer, name, {}).values()
    return [tensor for tensor in held if tensor is not None and tensor.numel()]


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(_INTEGERS[numbers.element_size()])


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest; infinite where one of two is no number."""
    wide = torch.float64 if found.dtype == torch.float64 else torch.float32
    apart = (found.to(wide) - expected.to(wide)).abs().nan_to_num(nan=torch.inf)
    return float(apart.masked_fill(found == expected, 0.0).max())
