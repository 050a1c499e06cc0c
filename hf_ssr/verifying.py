"""Which tokens of a draft are kept: the rules, as pure functions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class DraftProbs(NamedTuple):
    """
    The distribution that a draft token was drawn from. What is not listed has probability 0.

    Args:
        ids (`torch.IntTensor` of shape `(support,)`): token ids, each once.
        probs (`torch.FloatTensor` of shape `(support,)`): their probabilities.
    """

    ids: torch.Tensor
    probs: torch.Tensor

    @classmethod
    def one_hot(cls, token: int, like: torch.Tensor) -> "DraftProbs":
        """Of a token that was not drawn: a greedy draft, a suffix match."""
        return cls(
            torch.tensor([token], dtype=torch.int32, device=like.device),
            torch.ones(1, dtype=like.dtype, device=like.device),
        )

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.ids.nbytes + self.probs.nbytes

    def of(self, token: int) -> torch.Tensor:
        """The probability of a token, shape `()`."""
        return self.probs[self.ids == token].sum()

    def subtracted_from(self, probs: torch.Tensor) -> torch.Tensor:
        """`max(probs - self, 0)`, not normalised; shape `(vocab_size,)`."""
        return probs.index_add(0, self.ids, -self.probs.to(probs.dtype)).clamp_(min=0)


def residual(probs: torch.Tensor, q: DraftProbs) -> torch.Tensor:
    """
    What the token that replaces a rejected one is drawn from: `norm(max(p - q, 0))`; `p` if rounding leaves nothing.

    Args:
        probs (`torch.FloatTensor` of shape `(vocab_size,)`): the target's distribution p, or `P * p` of the block rule.
        q ([`DraftProbs`]): what the draft token was drawn from.
    """
    rest = q.subtracted_from(probs)
    total = rest.sum()
    return rest / total if total > 0 else probs / probs.sum()


def accepts(probs: torch.Tensor, token: int, q: DraftProbs, uniform: torch.Tensor) -> bool:
    """
    The token rule of speculative decoding (Leviathan et al. 2023, arXiv 2211.17192): accepted with probability
    min(1, p(x) / q(x)).

    Args:
        probs (`torch.FloatTensor` of shape `(vocab_size,)`): the target's distribution p.
        token (`int`): the draft token x.
        q ([`DraftProbs`]): what it was drawn from.
        uniform (`torch.Tensor` of shape `()`): a number drawn from [0, 1).
    """
    return bool(uniform * q.of(token) < probs[token])


def block_acceptance(
    probs: torch.Tensor, draft: Sequence[int], qs: Sequence[DraftProbs]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Block verification (Sun et al. 2024, arXiv 2403.10444): never fewer accepted tokens than the token rule, and the
    same distribution.

    Args:
        probs (`torch.FloatTensor` of shape `(draft_length or more, vocab_size)`): the target's distribution p at each
            draft token.
        draft (`Sequence[int]`): the draft tokens.
        qs (`Sequence[DraftProbs]`): what each was drawn from.

    Returns:
        `tuple[torch.FloatTensor, torch.FloatTensor]`: `h` of shape `(draft_length + 1,)`, where `h[i]` is the
        probability that the first `i` tokens pass (`h[0]` = 1), each judged on its own: the most that pass are kept;
        and the weights `P` of shape `(draft_length + 1,)`. After `i < draft_length` kept tokens, the next is drawn from
        `residual(P[i] * p[i], q[i])`.
    """
    length = len(draft)
    weight = probs.new_ones(length + 1)
    for i, (token, q) in enumerate(zip(draft, qs, strict=True)):
        ratio = probs[i, token] / q.of(token)
        weight[i + 1] = (weight[i] * ratio).clamp(max=1)
    passing = probs.new_ones(length + 1)
    for i in range(1, length):
        rest = qs[i].subtracted_from(weight[i] * probs[i]).sum()
        below = rest + 1 - weight[i]
        passing[i] = rest / below if below > 0 else 1
    if length:
        passing[length] = weight[length]
    return passing, weight


def gumbel_choice(scores: torch.Tensor, seed: int, position: tuple[int, int]) -> int:
    """
    A draw from `softmax(scores)` that depends on nothing but these arguments: Gumbel noise keyed by seed and position.
    Two texts that draw at the same position tend to the same token (drafter-invariant coupling, arXiv 2408.07978).

    Args:
        scores (`torch.FloatTensor` of shape `(1, vocab_size)`): processed scores.
        seed (`int`): of the text.
        position (`tuple[int, int]`): which part of the text, and which of its tokens.
    """
    part, index = position
    key = seed + (2 * index + part) * 0x9E3779B1  # apart in the low bits, which are all that a CPU generator takes
    generator = torch.Generator(scores.device).manual_seed(key % 2**63)
    uniform = torch.rand(scores.shape[-1], generator=generator, device=scores.device, dtype=torch.float64)
    return int((scores[0].double() - (-uniform.log()).log()).argmax())
