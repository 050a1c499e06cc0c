"""What generation hands out: `SSROutput` at its end, and the stream meanwhile."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .host import pad_token_id
from .metrics import SSRMetrics


@dataclass
class SSROutput(GenerateDecoderOnlyOutput):
    """
    What `generate` returns under `return_dict_in_generate`: the fields of plain `generate`, and `metrics`.

    Args:
        sequences (`torch.LongTensor` of shape `(batch_size, sequence_length)`): prompt and new tokens.
        scores, logits (`tuple[torch.FloatTensor]`, *optional*): one `(batch_size, vocab_size)` a new token, if asked
            for.
        cache (`Cache`, *optional*): holds all but the last token of `sequences`; `None` for a batch.
        metrics ([`SSRMetrics`]): what was counted.
    """

    metrics: SSRMetrics | None = None


class Stream:
    """
    A streamer that is ended once: at the end, on Ctrl-C, and after an error if its reader iterates over it
    (`TextIteratorStreamer`), as that reader would wait for ever. To any other an end says that the text is complete
    (`transformers serve` would send half an answer as a whole one): after an error it has none, as in plain `generate`.

    Tokens pass through `put` one by one, in the shapes of plain `generate`. A child's draft is shown as it grows, but
    only to a streamer that has transformers' `put_draft`.
    """

    def __init__(self, streamer=None):
        self.streamer = streamer
        self._ended = streamer is None

    @classmethod
    def around(cls, streamer) -> "Stream":
        """`streamer` itself if it is a `Stream` already."""
        return streamer if isinstance(streamer, cls) else cls(streamer)

    def put(self, tokens: torch.Tensor) -> None:
        """Tokens that stay, shape `(batch_size,)`."""
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())

    def preview(self, draft: list[int]) -> None:
        """A child's draft of the answer so far."""
        if draft and hasattr(self.streamer, "put_draft"):
            self.streamer.put_draft(torch.tensor(draft))

    def end(self) -> None:
        """The text is complete."""
        if not self._ended:
            self._ended = True
            self.streamer.end()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind, error, trace) -> None:
        is_waited_for = hasattr(self.streamer, "__iter__") or hasattr(self.streamer, "__aiter__")
        if error is None:
            self.end()
        elif is_waited_for or not isinstance(error, Exception):
            with contextlib.suppress(Exception):  # the first error is the one to report
                self.end()


def collect(target, texts) -> SSROutput | torch.Tensor:
    """What `generate` returns: the texts (each a [`Parent`]), padded at their end, and what was counted."""
    config, metrics = target.config, target.metrics
    for text in texts:
        text.metrics.new_tokens = text.row.length - text.prompt_length
        text.metrics.thinking_tokens = text.thinking.thinking_tokens
        text.metrics.thoughts = text.thinking.spans
        text.metrics.thinking_budget = text.thinking.budget
        text.metrics.thinking_budget_capped = text.thinking.budget_capped
    if len(texts) > 1:
        metrics.add_rows([text.metrics for text in texts])
    length = max(text.row.length for text in texts)
    pad = pad_token_id(config)
    padded = [F.pad(text.row.ids, (0, length - text.row.length), value=pad) for text in texts]
    sequences: Any = torch.cat(padded)  # which transformers has as a LongTensor
    if not config.return_dict_in_generate:
        return sequences
    if len(texts) > 1:
        return SSROutput(sequences=sequences, metrics=metrics)
    chooser = texts[0].chooser
    return SSROutput(
        sequences=sequences, scores=chooser.scores, logits=chooser.logits, cache=target.cache, metrics=metrics
    )
