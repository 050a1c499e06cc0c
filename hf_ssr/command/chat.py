"""`hf-ssr chat`: a conversation in the terminal. Ctrl-C means "answer now"."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import torch

from ..config import SSRConfig
from ..running.loading import load_model, load_tokenizer, reasoner_notice, settle_markers
from ..running.terminal import handling
from .conversation import Conversation
from .options import settings_of
from .session import TO_COPY, Session, note


def chat_command(arguments: argparse.Namespace) -> int:
    """
    Runs the chat until its input ends. Returns the exit status.

    Raises:
        `ValueError`, `OSError`: before the first message, for what does not fit. Later errors are printed.
        `KeyboardInterrupt`: for Ctrl-C twice where a message is waited for.
    """
    settings = settings_of(arguments)
    config = SSRConfig(**settings)
    tokenizer = load_tokenizer(arguments)
    settle_markers(config, tokenizer)
    conversation = Conversation(load_model(arguments), tokenizer, config, arguments.prefill)
    conversation.restart(arguments.system)
    torch.manual_seed(arguments.seed)
    of_reasoner = arguments.model is None
    if of_reasoner:
        note(reasoner_notice(TO_COPY))
    note("/help lists the commands; Ctrl-C while it thinks: answer now")
    session = Session(conversation, {**settings, "draft_budgets": config.draft_budgets}, of_reasoner)
    with handling(lambda *_: None):  # a Ctrl-C that comes when an answer is over ends nothing
        for line in messages():
            try:
                if not session.handle(line):
                    break
            except Exception as error:  # a template that refuses, no memory, ...: whatever it is, the chat is not lost
                note(f"hf-ssr: {error}")
    return 0


def messages() -> Iterator[str]:
    """What the user writes, until the end of input; at a terminal with a prompt, a history and line editing."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  `input` uses it where there is one
    held, was_interrupted = "", False
    while True:
        try:
            with handling(signal.default_int_handler):
                line = input(("... " if held else "> ") if is_terminal else "")
        except EOFError:
            if held:
                yield held
            return
        except KeyboardInterrupt:
            if was_interrupted or not is_terminal:
                raise
            held, was_interrupted = "", True
            note("\n/exit, Ctrl-D or Ctrl-C once more leaves")
            continue
        was_interrupted = False
        if line.endswith("\\"):
            held += line[:-1] + "\n"
            continue
        text, held = held + line, ""
        if text.strip():
            yield text
