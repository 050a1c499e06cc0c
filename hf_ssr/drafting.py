"""What proposes tokens: a draft, the contract of every drafter, and the child that drafts while its parent thinks."""

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation.candidate_generator import CandidateGenerator

from .target import Row
from .verifying import DraftProbs, gumbel_choice


@dataclass
class Draft:
    """
    Proposed tokens.

    Args:
        ids (`list[int]`): the proposed tokens; empty = nothing to propose.
        source (`str`, *optional*): where they come from: draft, thought, prompt or answer.
        is_prefix (`bool`): whether they go on from the beginning of a draft that has agreed so far.
        kind (`str`): how they were found. Drafts of a kind are kept about equally often.
        chance (`float`): how often a token of such a draft was kept so far, if those before it were.
        probs (`list[DraftProbs | None]`): what each was drawn from, as far as no decision has looked at it yet. Empty,
            and `None` for a token, where it was not drawn. One longer than `ids` if `then` is there.
        then (`int`, *optional*): the token drafted behind `ids`: it needs no forward of its own to be verified.
    """

    ids: list[int] = field(default_factory=list)
    source: str | None = None
    is_prefix: bool = False
    kind: str = ""
    chance: float = 1.0
    probs: list[DraftProbs | None] = field(default_factory=list)
    then: int | None = None


class AcceptanceRecord:
    """
    How often drafts of each kind were kept. A kind that is new is supposed to be as good as its match is long; what was
    long ago counts less.
    """

    def __init__(self):
        self._counts: dict[str, list[float]] = {}

    def chance(self, kind: str) -> float:
        """How often a token of such a draft is kept, if those before it are."""
        kept, lost = self._counts.get(kind, (0.0, 0.0))
        name, _, length = kind.partition(" ")
        supposed = 8.0 if name == "prefix" else 2.0 + int(length) if name == "aligned" else float(length)
        return (kept + supposed) / (kept + lost + supposed + 1)

    def note(self, draft: Draft, kept: int) -> None:
        """So many tokens of a draft were kept."""
        if draft.ids:
            counts = self._counts.setdefault(draft.kind, [0.0, 0.0])
            counts[0] = FORGETTING * counts[0] + kept
            counts[1] = FORGETTING * counts[1] + (kept < len(draft.ids))


FORGETTING = 0.95  # of what a kind was worth, at each of its drafts


class Drafter(CandidateGenerator):
    """
    The contract of every drafter: it is told each token of the text, and proposes what may come next.

    As a transformers `CandidateGenerator` it also serves `_assisted_decoding`.

    Args:
        num_draft_tokens (`int`): most tokens of a draft.
        max_length (`int`): most tokens of prompt and output.
        record ([`AcceptanceRecord`], *optional*): of drafts so far.
    """

    def __init__(self, num_draft_tokens: int, max_length: int, record: AcceptanceRecord | None = None):
        self.record = AcceptanceRecord() if record is None else record
        self._proposed = Draft()
        self.num_draft_tokens = num_draft_tokens
        self.max_length = max_length
        self.length = 0  # tokens of the text that the drafter knows of

    @abstractmethod
    def observe(self, token: int) -> None:
        """The next token of the text."""

    @abstractmethod
    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens that may come next."""

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, None]:
        """
        The text with a draft behind it.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): the text so far.

        Returns:
            `tuple[torch.LongTensor, None]`: ids of shape `(1, sequence_length + draft_length)`; no probabilities, as
            the draft is one fixed sequence.
        """
        for token in input_ids[0, self.length :].tolist():
            self.observe(token)
        self.length = input_ids.shape[1]
        draft = self._proposed = self.propose(min(self.num_draft_tokens, self.max_length - self.length - 1))
        return torch.cat([input_ids, input_ids.new_tensor([draft.ids])], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        """What was accepted is seen in the next `input_ids`; how much, is noted."""
        self.record.note(self._proposed, num_matches)


class Child:
    """
    The fork of the text that closes the thought early and drafts the answer: one token a step, or as many as its own
    drafter proposes and it would have picked itself. So an earlier draft is gone through in a few steps.

    It has its own random generator, and calls only processors that have no state: nothing of the parent's is touched.

    Args:
        row (`Row`): its text, forked from the parent's.
        draft_budget (`int`): thinking tokens before the fork.
        forced_close (`Sequence[int]`): the tokens that close the thought; they are not chosen.
        logits_processor (`LogitsProcessorList`): of the parent, see [`child_processors`].
        sampling ([`DraftSampling`]): how it picks its tokens.
        eos_ids (`set[int]`): tokens that end the draft.
        drafter ([`Drafter`]): proposes what the child may pick; is told what it picks.
        max_length (`int`): most tokens of its text.
        max_draft_length (`int`, *optional*): most drafted tokens.
    """

    def __init__(
        self,
        row: Row,
        draft_budget: int,
        forced_close,
        logits_processor: LogitsProcessorList,
        sampling: "DraftSampling",
        eos_ids: set[int],
        drafter: "Drafter",
        max_length: int,
        max_draft_length: int | None = None,
    ):
        self.row = row
        self.drafter = drafter
        self.forwards = 0  # that it has taken part in
        self._drafted = Draft()
        self.draft_budget = draft_budget
        self.tokens: list[int] = []  # the draft, without the close
        self.probs: list[DraftProbs | None] = []  # what each was drawn from, if `sampling` keeps it
        self.ended_by = ""
        self._forced = list(forced_close)
        self._processors = logits_processor
        self._sampling = sampling
        self._eos_ids = eos_ids
        self._max_length = max_length
        self._max_draft_length = max_draft_length

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens of what is left of the close."""
        return self._forced[: max(0, limit)]

    def propose(self, limit: int) -> Draft:
        """A draft of at most `limit` tokens that may come next, behind the close."""
        return self.drafter.propose(min(self.drafter.num_draft_tokens, limit))

    def behind_close(self, forced: list[int], draft: Draft) -> Draft:
        """What is left of the close, and a draft behind it, as one."""
        self._drafted = draft if len(forced) == len(self._forced) else Draft()
        return Draft(forced + self._drafted.ids)

    def choose(self, draft: Draft, logits: torch.FloatTensor) -> None:
        """
        Appends the child's next tokens, as long as what it picks is what was proposed, and one more.

        Args:
            draft ([`Draft`]): what was proposed.
            logits (`torch.FloatTensor` of shape `(1, draft_length + 1, vocab_size)`): what the target says comes after
                the text, and after each draft token.
        """
        drafted, self._drafted = self._drafted, Draft()
        forced = len(draft.ids) - len(drafted.ids)
        for kept in range(logits.shape[1]):
            token = self._next(logits[:, kept])
            self.row.append(token)
            if self.row.length == self._max_length and not self.ended_by:
                self.ended_by = "max_length"
            if self.ended_by or draft.ids[kept : kept + 1] != [token]:
                break
        agrees = draft.ids[kept : kept + 1] == [token]
        self.drafter.record.note(drafted, max(0, kept + agrees - forced))

    def _next(self, logits: torch.FloatTensor) -> int:
        """The next token of the close, or one that the child picks."""
        if self._forced:
            return self._forced.pop(0)
        ids = self.row.ids
        scores = self._processors(ids, logits.to(copy=True, dtype=torch.float32, device=ids.device))
        token, probs = self._sampling.pick(scores, len(self.tokens))
        self.tokens.append(token)
        self.probs.append(probs)
        self.drafter.observe(token)
        if token in self._eos_ids:
            self.ended_by = "eos"
        elif len(self.tokens) == self._max_draft_length:
            self.ended_by = "max_draft_length"
        return token


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

    def pick(self, scores: torch.FloatTensor, index: int) -> tuple[int, DraftProbs | None]:
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


MOST_PROBS_BYTES = 2**28  # of one draft: 200 tokens of a distribution over 160,000, or any length under a top-k
THOUGHT, ANSWER = 0, 1  # parts of a text: where noise is keyed by position


# transformers' processors that depend on nothing but their arguments: a child can use the parent's own
_STATELESS = {
    getattr(logits_process, name, None)
    for name in (
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    )
}
_WARPERS = {  # they cut the tail of a distribution: no matter to a greedy child
    getattr(logits_process, name, None)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "MinPLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
}


# those that do with a row of a batch what they do with it among the others
ROW_WISE_PROCESSORS = _STATELESS | _WARPERS | {logits_process.TemperatureLogitsWarper}


def processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """For one row: a repetition penalty knows how far each is padded."""

    def of_row(processor):
        is_penalty = type(processor) is logits_process.RepetitionPenaltyLogitsProcessor
        padding = processor.prompt_ignore_length if is_penalty else None
        return type(processor)(processor.penalty, padding[row : row + 1]) if torch.is_tensor(padding) else processor

    return LogitsProcessorList(map(of_row, processors))


def child_processors(parent: LogitsProcessorList, greedy: bool, own_temperature: bool = True) -> LogitsProcessorList:
    """
    Those of the parent's processors that a child may call: known ones without state. Any other could draw from the
    random stream, count its calls, or fail on a text that is not the output; without it the draft may be worse, the
    output is the same. The temperature is left out if the child has its own.
    """
    usable = _STATELESS if greedy else _STATELESS | _WARPERS if own_temperature else ROW_WISE_PROCESSORS
    return LogitsProcessorList([processor for processor in parent if type(processor) in usable])
