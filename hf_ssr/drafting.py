"""What proposes tokens: a draft, how often drafts are kept, and the contract of every drafter."""

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation.candidate_generator import CandidateGenerator

from .metrics import Stage
from .verifying import DraftProbs


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
        stage (`Stage`, *optional*): whose draft it is.
        then (`int`, *optional*): the token drafted behind `ids`: it needs no forward of its own to be verified.
        parents (`list[int]`, *optional*): of a tree, which of `ids` each token comes after, `-1` = the text; none comes
            before its parent. `None` = a chain.
    """

    ids: list[int] = field(default_factory=list)
    source: str | None = None
    is_prefix: bool = False
    kind: str = ""
    chance: float = 1.0
    probs: list[DraftProbs | None] = field(default_factory=list)
    then: int | None = None
    stage: Stage | None = None
    parents: list[int] | None = None


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


_ALWAYS_LAST = _WARPERS | {
    getattr(logits_process, name, None)
    for name in (
        "LogitNormalization",
        "SynthIDTextWatermarkLogitsProcessor",
        "TemperatureLogitsWarper",
        "WatermarkLogitsProcessor",
    )
}


def place_of_budget(processors: LogitsProcessorList) -> int:
    """Where `generate` puts a processor that is passed to it: before its own that cut, watermark and normalize."""
    place = len(processors)
    while place and type(processors[place - 1]) in _ALWAYS_LAST:
        place -= 1
    return place


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
