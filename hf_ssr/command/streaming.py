"""Thought and answer on a terminal, as they come."""

import sys

import torch
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from ..config import SSRConfig
from ..markers import resolve_markers
from ..running.terminal import dim
from ..think_state import ThinkingState


class _TextTo(TextStreamer):
    """Writes text to a file, without the white space it begins with, each piece between two strings."""

    def __init__(self, tokenizer, file, before: str = "", after: str = "", **kwargs):
        super().__init__(tokenizer, **kwargs)
        self._file, self._before, self._after = file, before, after
        self._begun = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        if text:
            print(f"{self._before}{text}{self._after}", end="", file=self._file, flush=True)


class ThoughtAndAnswer(BaseStreamer):
    """Streams thoughts, dim, to stderr, and the answer to stdout, without the markers between them."""

    def __init__(self, tokenizer, config: SSRConfig, prompt: list[int]):
        self._tokenizer = tokenizer
        markers = resolve_markers(config, tokenizer)
        self._state = ThinkingState(markers, prompt)
        self._start = None if markers is None else markers.start
        self._later_start = None if markers is None else markers.later_start
        self._thought = self._stream_of_thought()
        self._answer = _TextTo(tokenizer, sys.stdout, skip_special_tokens=True)
        self._held: list[int] = []  # may turn out to be a marker, or to lead to the answer
        self._is_behind_close = False  # nothing is held or shown of what is behind it, but what is held
        self._is_prompt = True

    @property
    def is_thinking(self) -> bool:
        """Whether a thought is open."""
        return self._state.open

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        for token in value.flatten().tolist():
            self._route(token)

    def _stream_of_thought(self) -> _TextTo:
        return _TextTo(self._tokenizer, sys.stderr, *dim())

    def _route(self, token: int) -> None:
        state, progress = self._state, self._state.progress
        state.push(token)
        if progress == "open":
            self._thought.put(torch.tensor([token]))
            if not state.open:
                self._thought.end()
                print(file=sys.stderr, flush=True)
                self._is_behind_close = True
            return
        self._held.append(token)
        if state.open:
            self._open_thought(progress)
        elif progress == "closed":
            self._show_answer()
        elif self._start is None or len(self._held) > self._start.window:  # else the start marker may yet be completed
            self._flush()

    def _open_thought(self, progress: str) -> None:
        """What is held ends with a start marker. What is before the first thought is no answer."""
        marker = None if progress == "unstarted" else self._later_start
        length = 0 if marker is None else marker.begin_in(self._held)
        if self._may_be_tail(self._held[:length]):
            length = 0
        del self._held[length:]
        self._flush()
        self._thought = self._stream_of_thought()

    def _show_answer(self) -> None:
        """As far as what is held is no marker, does not begin one, and does not lead from a close to the answer."""
        if self._is_behind_close and self._held == list(self._state.tail):
            self._held.clear()
            self._is_behind_close = False
        begun = 0 if self._later_start is None else self._later_start.begun_by(self._held)
        if not self._may_be_tail(self._held) and not (begun and self._may_be_tail(self._held[:-begun])):
            self._flush(begun)

    def _may_be_tail(self, tokens: list[int]) -> bool:
        """Whether some tokens are what follows the marker in a close (`\\n\\n`, a channel's header), or begin that."""
        return self._is_behind_close and tuple(tokens) == self._state.tail[: len(tokens)]

    def _flush(self, kept: int = 0) -> None:
        """All that is held, but for the last `kept` tokens."""
        shown = self._held[: len(self._held) - kept]
        if shown:
            self._answer.put(torch.tensor(shown))
            del self._held[: len(shown)]
            self._is_behind_close = False

    def end(self) -> None:
        self._flush()
        self._thought.end()
        self._answer.end()
        print(flush=True)
