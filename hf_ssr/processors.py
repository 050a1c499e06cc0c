"""Which of a call's logits processors a child, a row of a batch, or a place ahead may call, and in which order."""

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

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


def index_of_budget(processors: LogitsProcessorList) -> int:
    """Where `generate` puts a processor that is passed to it: before its own that cut, watermark and normalize."""
    index = len(processors)
    while index and type(processors[index - 1]) in _ALWAYS_LAST:
        index -= 1
    return index


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
