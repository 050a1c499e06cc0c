"""How the next token is picked: of the text as plain `generate` does, of a draft by the child."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList

from .costs import RoundClock
from .processors import ROW_WISE_PROCESSORS, index_of_budget
from .think_state import ThinkingState
from .thinking import force_token
from .verifying import DraftProbs, gumbel_choice

THOUGHT, ANSWER = 0, 1  # parts of a text: where noise is keyed by position
MOST_PROBS_BYTES = 2**28  # of one draft: 200 tokens of a distribution over 160,000, or any length under a top-k


class Chooser:
    """
    Picks the tokens of a text as plain `generate` does: with the same processors and one random draw each, in order.

    Args:
        row (`Row`): the text.
        generation_config, logits_processor: as `generate` prepares them.
        thinking ([`ThinkingState`]): forces the tokens of a thinking budget.
        clock ([`RoundClock`]): of the rounds.
        seed (`int`): of rules that draw in other ways than plain `generate`.
    """

    def __init__(
        self,
        row,
        generation_config,
        thinking: ThinkingState,
        logits_processor: LogitsProcessorList,
        clock: RoundClock,
        seed: int = 0,
    ):
        self.row, self.config, self.thinking, self.clock, self.seed = row, generation_config, thinking, clock, seed
        self.logits_processor = logits_processor
        index = index_of_budget(logits_processor)
        self._before_budget: Callable[..., torch.Tensor] = LogitsProcessorList(logits_processor[:index])
        self._behind_budget: Callable[..., torch.Tensor] = LogitsProcessorList(logits_processor[index:])
        self.processors_keep_no_state = all(type(each) in ROW_WISE_PROCESSORS for each in logits_processor)
        keep = generation_config.return_dict_in_generate
        self.scores: tuple | None = () if keep and generation_config.output_scores else None
        self.logits: tuple | None = () if keep and generation_config.output_logits else None

    def picks(self, logits: torch.Tensor) -> Callable[[int], int]:
        """
        The target's token at each place. It must be taken before that of another place is asked for.

        Args:
            logits (`torch.FloatTensor` of shape `(1, places, vocab_size)`): what the target says there.
        """
        # in a block of the thought, the budget may be reached on the way
        argmax_will_do = not (self.config.do_sample or self.logits_processor or self.thinking.may_be_forced)
        if argmax_will_do and self.scores is None and self.logits is None:
            return logits[0].float().argmax(dim=-1).tolist().__getitem__
        return lambda place: self.choose(logits[:, place])

    @RoundClock.as_plain
    def choose(self, logits: torch.Tensor) -> int:
        """
        The target's next token, as plain `generate` picks it; under the coupled rule, with noise of its own.

        Args:
            logits (`torch.FloatTensor` of shape `(1, vocab_size)`): what the target says comes next.
        """
        scores, logits = self.processed(logits)
        self.keep_scores(scores, logits)
        if not self.config.do_sample:
            return int(scores.argmax(dim=-1))
        if self.config.rule == "coupled":
            return gumbel_choice(scores, self.seed, self._position)
        return int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))

    def processed(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Scores of the next token after the processors, and the logits as these leave them (some work in place); both of
        shape `(1, vocab_size)`.

        Args:
            logits (`torch.FloatTensor` of shape `(1, vocab_size)`): what the target says comes next.
        """
        return self._processed(self.row.ids, logits, self.thinking.forced)

    def processed_ahead(self, logits: torch.Tensor, draft: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The same at consecutive places, each behind the draft tokens before it; of shape `(places, vocab_size)`.

        Args:
            logits (`torch.FloatTensor` of shape `(1, places, vocab_size)`): what the target says there.
            draft (`Sequence[int]`): tokens to suppose behind the text.
        """
        ids = torch.cat([self.row.ids, self.row.ids.new_tensor([draft])], dim=1)
        rows = []
        for place, forced in zip(range(logits.shape[1]), self.thinking.forced_along(draft), strict=False):
            rows.append(self._processed(ids[:, : self.row.length + place], logits[:, place], forced))
        scores, raw = zip(*rows, strict=True)
        return torch.cat(scores), torch.cat(raw)

    def _processed(
        self, ids: torch.Tensor, logits: torch.Tensor, forced: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = self._before_budget(ids, logits)
        if forced is not None:
            scores = force_token(scores, forced)
        return self._behind_budget(ids, scores), logits

    def keep_scores(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """For the output, where it was asked for: those of each emitted token, as they were processed."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    @property
    def _position(self) -> tuple[int, int]:
        """Of the next token: what it is part of, and its index among all of that kind: a child knows it beforehand."""
        thinking = self.thinking
        return (THOUGHT, thinking.thinking_tokens) if thinking.open else (ANSWER, thinking.other_tokens)


@dataclass
class DraftSampling:
    """
    How a child picks a token.

    Args:
        temperature (`float`): 0 = the likeliest. Processors of the parent come before it.
        generator (`torch.Generator`, *optional*): the child's own.
        noise (`tuple[int, int]`, *optional*): seed of the text, and the position of the draft's first token in the
            answer: the child draws with the very noise with which its parent will draw there.
        keeps_probs (`bool`): whether to keep what a token was drawn from, as long as `kept_bytes` allow.
    """

    temperature: float = 0.0
    generator: torch.Generator | None = None
    noise: tuple[int, int] | None = None
    keeps_probs: bool = False
    kept_bytes: int = 0

    def pick(self, scores: torch.Tensor, index: int) -> tuple[int, DraftProbs | None]:
        """
        The token number `index` of the draft, and what it was drawn from.

        Args:
            scores (`torch.FloatTensor` of shape `(1, vocab_size)`): processed.
        """
        if self.temperature == 0:
            return int(scores.argmax(dim=-1)), None
        scores = scores / self.temperature
        if self.noise is not None:
            seed, begin = self.noise
            return gumbel_choice(scores, seed, (ANSWER, begin + index)), None
        probs = scores.softmax(dim=-1)
        token = int(torch.multinomial(probs, num_samples=1, generator=self.generator))
        if not self.keeps_probs:
            return token, None
        support = probs[0].nonzero()[:, 0]
        kept = DraftProbs(support.int(), probs[0, support])
        if self.kept_bytes + kept.nbytes > MOST_PROBS_BYTES:
            return token, None  # as good as a token that was not drawn
        self.kept_bytes += kept.nbytes
        return token, kept
