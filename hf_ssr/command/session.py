"""What the lines of a chat do: a message, or a command such as `/retry`."""

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import Any

from ..bench.tasks import EXAMPLE, task_of
from ..config import SETTINGS, SSRConfig
from ..running.loading import reasoner_notice, settle_markers
from ..running.parsing import integer
from ..running.terminal import dim, handling
from .conversation import Conversation, Reply
from .interrupts import Interrupts
from .options import SAMPLING
from .streaming import ThoughtAndAnswer

HELP = """\
/new [SYSTEM]        begin another chat, with a system prompt if there is text
/retry               ask the last message again
/undo                take back the last message and its answer
/set [NAME VALUE]    a setting from the next message on, such as /set draft_budgets [64, 256]; None = its default
/template NAME VALUE what the chat template is told, such as /template reasoning_effort high
/thinking on|off     the template's enable_thinking
/stats               what was counted in the last answer
/save FILE           the chat as JSON
/load FILE           go on with a saved chat
/exit                leave (or Ctrl-D)
A line that ends in \\ goes on in the next. A message that begins with / is written with two.
Ctrl-C: answer now; again, or when no thought is open: stop, and keep what there is."""
TO_COPY = EXAMPLE.replace("\n", "\\\n")  # as a message of several lines is written
OF_TEXT = {"max_new_tokens": integer(1), "do_sample": bool, **SAMPLING}


def note(text: str) -> None:
    """A line that is not the model's, dim on a terminal."""
    begin, end = dim()
    print(f"{begin}{text}{end}", file=sys.stderr, flush=True)


class _Shown(ThoughtAndAnswer):
    """Tells `interrupts` when the text is over."""

    def __init__(self, tokenizer, config: SSRConfig, prompt: list[int], interrupts: Interrupts):
        super().__init__(tokenizer, config, prompt)
        self._interrupts = interrupts

    def end(self) -> None:
        self._interrupts.is_over = True
        super().end()


class Session:
    """
    What the lines of a user do to a conversation.

    Args:
        conversation ([`Conversation`]): the chat.
        settings (`dict`): of its config; `/set` changes them.
        of_reasoner (`bool`): whether it is with the small reasoner, which is given its own kinds of task only.
    """

    def __init__(self, conversation: Conversation, settings: dict[str, Any], of_reasoner: bool = False):
        self.conversation = conversation
        self.settings = settings
        self.last: Reply | None = None
        self._of_reasoner = of_reasoner

    def handle(self, line: str) -> bool:
        """
        A message, or a command. Returns whether the chat goes on.

        Raises:
            `ValueError`, `OSError`: for a command that cannot be done; nothing has changed then.
        """
        if not line.startswith("/") or line.startswith("//"):
            self.ask(line[1:] if line.startswith("//") else line)
            return True
        name, _, rest = line[1:].strip().partition(" ")
        if name in ("exit", "quit"):
            return False
        command = getattr(self, f"_{name}", None) if name in COMMANDS else None
        if command is None:
            raise ValueError(f"there is no command /{name}: /help lists them; //{name} is a message.")
        command(rest.strip())
        return True

    def ask(self, text: str) -> None:
        """The model answers: the thought goes to stderr, the answer to stdout."""
        if self._of_reasoner and task_of(text := text.strip()) is None:
            note(reasoner_notice(TO_COPY))
            return
        if self._of_reasoner and self.conversation.messages:
            self.conversation.restart()
            note("a new chat: the small reasoner was trained on one task at a time")
        streamers = []

        def streamer_of(prompt: list[int]) -> _Shown:
            streamers.append(_Shown(self.conversation.tokenizer, self.conversation.config, prompt, interrupts))
            return streamers[0]

        interrupts = Interrupts(lambda: bool(streamers) and streamers[0].is_thinking)
        with handling(interrupts.interrupt):
            try:
                reply = self.conversation.ask(text, streamer_of, interrupts.criteria)
            except KeyboardInterrupt:  # before the model began to write
                note("\nstopped; the message is not part of the chat")
                return
            self.last = reply if reply.metrics is not None else self.last
            self._tell(reply, interrupts.halt.is_set)

    def _tell(self, reply: Reply, was_stopped: bool) -> None:
        """What became of a message."""
        if not reply.answer:
            note("no answer, so the message is not part of the chat")
        elif was_stopped:
            note("stopped; what there is of the answer is part of the chat")
        if (metrics := reply.metrics) is None:
            return
        note(
            f"[{metrics.thinking_tokens} tokens of thought and {metrics.answer_tokens} of answer in "
            f"{metrics.target_forwards} forwards, {metrics.total_seconds:.1f} s; {reply.cached_tokens} of "
            f"{reply.prompt_tokens} tokens of the chat were in the cache]"
        )

    def _help(self, rest: str) -> None:
        note(HELP)

    def _new(self, rest: str) -> None:
        self.conversation.restart(rest or None)
        note("a new chat")

    def _undo(self, rest: str) -> None:
        text = self.conversation.undo()
        note("there is nothing to take back" if text is None else f"taken back: {text}")

    def _retry(self, rest: str) -> None:
        text = self.conversation.undo()
        if text is None:
            raise ValueError("there is no message to ask again.")
        self.ask(text)

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        known = (*SETTINGS, *OF_TEXT)
        if not name:
            note("\n".join(f"{key} = {self.settings[key]!r}" for key in known if self.settings.get(key) is not None))
            return
        if name not in known:
            raise ValueError(f"there is no setting {name!r}: it must be one of {', '.join(known)}.")
        if not value:
            note(f"{name} = {self.settings.get(name)!r}")
            return
        settings = {**self.settings, name: _value(value)}
        if name in OF_TEXT and settings[name] is not None:
            _check(name, settings[name], value)
        config = SSRConfig(**settings)
        settle_markers(config, self.conversation.tokenizer)
        self.conversation.config, self.settings = config, settings
        note(f"{name} = {settings[name]!r} from the next message on")

    def _template(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not value:
            note(str(self.conversation.template_settings))
            return
        self.conversation.template_settings[name] = _value(value)

    def _thinking(self, rest: str) -> None:
        if rest not in ("on", "off"):
            raise ValueError(f"/thinking must be on or off, but is {rest!r}.")
        self.conversation.template_settings["enable_thinking"] = rest == "on"

    def _stats(self, rest: str) -> None:
        if self.last is None:
            raise ValueError("there is no answer yet.")
        note(str(self.last.metrics))

    def _save(self, rest: str) -> None:
        if not rest:
            raise ValueError("/save needs a file.")
        Path(rest).write_text(json.dumps(self.conversation.messages, indent=1, ensure_ascii=False), encoding="utf-8")
        note(f"{len(self.conversation.messages)} messages written to {rest}")

    def _load(self, rest: str) -> None:
        if not rest:
            raise ValueError("/load needs a file.")
        try:
            loaded = json.loads(Path(rest).read_text(encoding="utf-8"))
        except (ValueError, RecursionError):  # no text, no JSON, or JSON too deep
            loaded = None
        if not isinstance(loaded, list) or not all(map(_is_message, loaded)):
            raise ValueError(f"{rest} must be a list of messages with `role` and `content`, as /save writes it.")
        self.conversation.messages = loaded
        note(f"{len(loaded)} messages")


COMMANDS = ("help", "new", "undo", "retry", "set", "template", "thinking", "stats", "save", "load")


def _value(text: str) -> Any:
    """A Python value, such as `[64, 256]` or `0.7`; what is none is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _check(name: str, value: Any, text: str) -> None:
    """Whether a setting of the text is of its type and in its range."""
    if OF_TEXT[name] is bool:
        if not isinstance(value, bool):
            raise ValueError(f"`{name}` must be True or False, but is {text}.")
        return
    try:
        OF_TEXT[name](text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"`{name}` {error}.") from None


def _is_message(entry: Any) -> bool:
    """Whether it is as `/save` writes one."""
    if not isinstance(entry, dict) or not {"role", "content"} <= entry.keys() <= {
        "role",
        "content",
        "reasoning_content",
    }:
        return False
    return entry["role"] in ("system", "user", "assistant") and all(isinstance(part, str) for part in entry.values())
