"""
How a command line is parsed: types of options, and how what is wrong is said.

Neither torch nor transformers is imported here: help, and errors in what was typed, need not wait for them.
"""

import argparse
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

MOST = 2**31 - 1  # of integers that count something
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")


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

    def __init__(self, **kwargs: Any):
        super().__init__(**{"formatter_class": Help, **kwargs})

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


def add_model_arguments(parser) -> None:
    """How the model is loaded; `--model` is the command's own."""
    parser.add_argument("--gguf-file", metavar="F", help="GGUF file in the model's folder or repository")
    dtypes = "float32, bfloat16, float16, float64; auto = as stored (default)"
    parser.add_argument("--dtype", type=one_of(DTYPES), default="auto", help=dtypes)
    parser.add_argument("--device", default="cpu", help="where the model runs, e.g. cuda (default cpu)")
