"""
What the command takes: how it is parsed, and the options of `hf-ssr PROMPT` and `hf-ssr chat`.

Neither torch nor transformers is imported here: help, and errors in what was typed, need not wait for them.
"""

import argparse
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from .bench.tasks import EXAMPLE, task_of
from .loading import check_model, reasoner_notice
from .validating import SETTINGS, validate_settings
from .version import __version__

MOST = 2**31 - 1  # of integers that count something
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
_OF_SSR = (
    "draft_budgets",
    "draft_interval",
    "max_draft_length",
    "num_draft_tokens",
    "thinking_budget",
    "thinking_start",
    "thinking_end",
    "forced_close",
)


class Help(argparse.HelpFormatter):
    """Breaks lines between words, not at the hyphens of a name (`ssr-qwen3-8b`, `hf-ssr`)."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent("\n".join(self._split_lines(text, width - len(indent))), indent)


class HelpAsWritten(Help):
    """Keeps the lines of a description and of what stands below the options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(text, indent)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def __init__(self, *args, formatter_class=Help, **kwargs):
        super().__init__(*args, formatter_class=formatter_class, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Ends the command."""
        fail(f"{message}; see {self.prog} --help")


def fail(message: str) -> NoReturn:
    """One line on stderr, exit status 2."""
    print(f"hf-ssr: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def integer(least: int, most: int | None = MOST) -> Callable[[str], int]:
    """A type of argparse: an integer in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is not None and least <= value and (most is None or value <= most):
            return value
        is_small = most is None or (most == MOST and (value is None or value < least))
        raise _refused(f"an integer {f'of at least {least}' if is_small else f'from {least} to {most}'}", text, value)

    return parse


def number(least: float, most: float = 1e6, is_open: bool = False) -> Callable[[str], float]:
    """A type of argparse: a number in a range, `is_open` if `least` itself is not in it."""
    rule = f"a number {'above' if is_open else 'of at least'} {least:g} and at most {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = None
        if value is not None and (least < value if is_open else least <= value) and value <= most:
            return value
        raise _refused(rule, text, value)

    return parse


def names(known) -> Callable[[str], list[str]]:
    """A type of argparse: some of the names of `known`, with commas between."""

    def parse(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return found

    return parse


def one_of(known) -> Callable[[str], str]:
    """A type of argparse: a name of `known`."""

    def parse(text: str) -> str:
        if text not in known:
            raise _refused(f"one of {', '.join(known)}", text)
        return text

    return parse


def text_file(text: str) -> Path:
    """A type of argparse: the path of a file of text."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    try:
        path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        raise argparse.ArgumentTypeError(f"must be a readable text in UTF-8, but {text!r} is none") from None
    return path


def integers(rule: str, least: int) -> Callable[[str], list[int]]:
    """A type of argparse: integers with commas between; `rule` says so."""

    def parse(text: str) -> list[int]:
        try:
            return [integer(least)(part) for part in text.split(",") if part]
        except argparse.ArgumentTypeError:
            raise _refused(rule, text) from None

    return parse


def _refused(rule: str, text: str, value: float | None = None) -> argparse.ArgumentTypeError:
    """What a value must be, and what it is: in quotes where it is no number."""
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    return argparse.ArgumentTypeError(f"must be {rule}, but is {repr(shown) if value is None else shown}")


def _budgets(text: str) -> list[int] | str:
    return text if text == "auto" else integers("'auto' or integers of at least 0 with commas between", 0)(text)


SEED = integer(0, 2**64 - 1)  # as `torch.manual_seed` takes it
SAMPLING = {"temperature": number(0, is_open=True), "top_p": number(0, 1), "top_k": integer(0)}


def add_model_arguments(parser) -> None:
    """How the model is loaded; `--model` is the command's own."""
    parser.add_argument("--gguf-file", metavar="F", help="GGUF file in the model's folder or repository")
    dtypes = "float32, bfloat16, float16, float64; auto = as stored (default)"
    parser.add_argument("--dtype", type=one_of(DTYPES), default="auto", help=dtypes)
    parser.add_argument("--device", default="cpu", help="where the model runs, e.g. cuda (default cpu)")


def _add_model_group(parser: argparse.ArgumentParser, prefill: str):
    model = parser.add_argument_group("model")
    shipped = "a folder, or an id on the Hub (default: the small reasoner of `hf-ssr demo`, which knows its tasks only)"
    model.add_argument("--model", metavar="PATH_OR_ID", help=shipped)
    add_model_arguments(model)
    model.add_argument("--prefill", default="", metavar="TEXT", help=prefill)
    return model


def _add_drafting_group(parser: argparse.ArgumentParser):
    """When and how much to draft."""
    ssr = parser.add_argument_group("drafting")
    budgets = "thinking tokens after which to fork, 'auto' (default: as the thought grows), or '' = never"
    ssr.add_argument("--draft-budgets", type=_budgets, metavar="N,N", help=budgets)
    interval = "fork after every N thinking tokens instead"
    ssr.add_argument("--draft-interval", type=integer(1), metavar="N", help=interval)
    length = "most tokens of a fork's draft (default: no limit)"
    ssr.add_argument("--max-draft-length", type=integer(1), metavar="N", help=length)
    most = "most draft tokens in a forward (default 16)"
    ssr.add_argument("--num-draft-tokens", type=integer(1), metavar="N", help=most)
    return ssr


def _add_text_groups(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """How a thought begins and ends, how long the text is, and whether it is sampled."""
    thought = parser.add_argument_group("thought")
    budget = "most thinking tokens; then the close is forced. The only option here that changes the tokens"
    thought.add_argument("--thinking-budget", type=integer(0), metavar="N", help=budget)
    opens = "opens a thought (default: detected; '' = open from the first new token)"
    thought.add_argument("--thinking-start", metavar="TEXT", help=opens)
    thought.add_argument("--thinking-end", metavar="TEXT", help="closes a thought (default: detected)")
    thought.add_argument(
        "--forced-close", metavar="TEXT", help="appended when a thought is cut (default: as the model does)"
    )
    text = parser.add_argument_group("text")
    length = f"thought and answer (default {max_new_tokens})"
    text.add_argument("--max-new-tokens", type=integer(1), default=max_new_tokens, metavar="N", help=length)
    text.add_argument("--sample", action="store_true", help="sample instead of greedy decoding")
    text.add_argument("--temperature", type=SAMPLING["temperature"], metavar="T", help="of sampling, above 0")
    text.add_argument("--top-p", type=SAMPLING["top_p"], metavar="P", help="of sampling, from 0 to 1")
    text.add_argument("--top-k", type=SAMPLING["top_k"], metavar="K", help="of sampling")
    text.add_argument("--seed", type=SEED, default=0, metavar="N", help="of sampling (default 0)")


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr PROMPT` takes."""
    parser.usage = (
        "hf-ssr PROMPT [--model PATH_OR_ID] [options]\n       hf-ssr chat [--model PATH_OR_ID] [options]\n       "
        "hf-ssr demo\n       hf-ssr bench | report DIR | whatif DIR | probe\n       hf-ssr export FOLDER"
    )
    parser.epilog = "A prompt that is one of these words goes last: hf-ssr --model M -- export"
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask; put into the model's chat template")
    parser.add_argument("--version", action="version", version=f"hf-ssr {__version__}")
    _add_model_group(parser, prefill="how the model's turn begins, e.g. '<think>'")
    prediction = "a draft of the answer that you have, e.g. the text to be edited"
    _add_drafting_group(parser).add_argument("--prediction", type=text_file, metavar="FILE", help=prediction)
    _add_text_groups(parser, max_new_tokens=1024)
    report = parser.add_argument_group("report")
    report.add_argument("--compare", action="store_true", help="also run plain generate, and compare tokens and time")
    report.add_argument("--stats", action="store_true", help="print what was counted (--json always has it)")
    report.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def check_prompt_arguments(arguments: argparse.Namespace) -> None:
    """
    Looks at what `hf-ssr PROMPT` was given as a whole. What the small reasoner cannot do ends here, with what it can.

    Raises:
        `ValueError`: for what does not fit.
    """
    settings_of(arguments)
    if not arguments.prompt.strip():
        raise ValueError("the prompt is empty: say what to ask.")
    check_model(arguments)
    if arguments.model is None:
        arguments.prompt = arguments.prompt.strip()
        if task_of(arguments.prompt) is None:
            print(reasoner_notice(f"hf-ssr '{EXAMPLE}'"), file=sys.stderr)
            raise SystemExit(2)
        print("hf-ssr: no --model, so the small reasoner answers", file=sys.stderr)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr chat` takes."""
    model = _add_model_group(parser, prefill="how each of its turns begins, e.g. '<think>'")
    model.add_argument("--system", metavar="TEXT", help="the system prompt")
    _add_drafting_group(parser)
    _add_text_groups(parser, max_new_tokens=4096)


def check_chat_arguments(arguments: argparse.Namespace) -> None:
    """
    Looks at what `hf-ssr chat` was given as a whole.

    Raises:
        `ValueError`: for what does not fit.
    """
    settings_of(arguments)
    check_model(arguments)
    if arguments.model is None and arguments.system is not None:
        raise ValueError("--system: the small reasoner was trained without a system prompt: name a --model.")


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Settings of an [`SSRConfig`], from the options.

    Raises:
        `ValueError`: for an option of sampling without `--sample`, and for options that contradict each other.
    """
    settings = {name: getattr(arguments, name) for name in _OF_SSR}
    if settings["thinking_start"] == "":
        settings["thinking_start"] = []
    sampling = {name: getattr(arguments, name) for name in SAMPLING}
    given = [name for name, value in sampling.items() if value is not None]
    if given and not arguments.sample:
        raise ValueError(f"--{given[0].replace('_', '-')} is for sampling: add --sample.")
    validate_settings(SimpleNamespace(**{**dict.fromkeys(SETTINGS), **settings}))
    return {**settings, "max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.sample, **sampling}
