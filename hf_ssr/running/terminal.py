"""What a terminal shows and how Ctrl-C is taken."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


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
