"""What the command writes to a terminal: thought and answer as they come."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import torch
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from .config import SSRConfig
from .markers import resolve_markers
from .thinking import ThinkingState


def moving(file: TextIO) -> bool | None:
    """
    `False` where nothing should move, for `force_interactive` or `force_terminal` of a rich console: a pipe keeps every
    frame, also one that asks for colours (`FORCE_COLOR`), and so does a notebook's `!hf-ssr`, though it is a terminal.
    """
    return None if file.isatty() and "JPY_PARENT_PID" not in os.environ else False


def dim() -> tuple[str, str]:
    """What begins and ends dim text on stderr; nothing where it is no terminal."""
    return ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")


@contextmanager
def handling(handler: Callable) -> Iterator[None]:
    """What Ctrl-C does within, unless it is ignored; elsewhere it ends the command at once (`__main__.py`)."""
    earlier = signal.getsignal(signal.SIGINT)
    if earlier is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


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
    """Streams the thought, dim, to stderr, and the answer to stdout, without the markers between them."""

    def __init__(self, tokenizer, config: SSRConfig, prompt: list[int]):
        self._state = ThinkingState(resolve_markers(config, tokenizer), prompt)
        self._thought = _TextTo(tokenizer, sys.stderr, *dim())
        self._answer = _TextTo(tokenizer, sys.stdout, skip_special_tokens=True)
        self._held: list[int] = []  # may turn out to be a marker
        self._is_prompt = True

    @property
    def is_thinking(self) -> bool:
        """Whether a thought is open."""
        return self._state.open

    def put(self, value: torch.LongTensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        for token in value.flatten().tolist():
            self._route(token)

    def _route(self, token: int) -> None:
        phase = self._state.phase
        self._state.push(token)
        if phase == "open":
            self._thought.put(torch.tensor([token]))
            if self._state.phase == "closed":
                self._thought.end()
                print(file=sys.stderr, flush=True)
            return
        self._held.append(token)
        if self._state.open:
            self._held.clear()
        elif phase == "unstarted" and len(self._held) <= self._state.markers.start.window:
            return  # the start marker may yet be completed
        elif phase == "closed" and self._leads_to_answer():
            return
        self._flush()

    def _leads_to_answer(self) -> bool:
        """Whether what is held may be what follows the marker in a close (`\\n\\n`, a channel's header)."""
        tail, held = list(self._state.tail), self._held
        if self._state.close_position == 0 or len(self._state.tokens) - self._state.close_position > len(tail):
            return False
        if held == tail:
            held.clear()
        return held == tail[: len(held)]

    def _flush(self) -> None:
        if self._held:
            self._answer.put(torch.tensor(self._held))
            self._held.clear()

    def end(self) -> None:
        self._flush()
        self._thought.end()
        self._answer.end()
        print(flush=True)
