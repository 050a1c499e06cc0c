"""Where a token came from: how it is shown, and what it is called."""

from collections.abc import Sequence
from typing import NamedTuple


class Source(NamedTuple):
    """
    How a source is shown.

    Args:
        style (`str`): on a terminal.
        colour (`str`): on a page.
        meaning (`str`): in words.
    """

    style: str
    colour: str
    meaning: str


SOURCES = {
    "prefix": Source("green", "#2a9d8f", "from the draft, as it stood"),
    "draft": Source("cyan", "#3b7dd8", "from the draft, past a mismatch"),
    "thought": Source("yellow", "#c9a227", "copied from the thought"),
    "prompt": Source("magenta", "#b5539c", "copied from the prompt"),
    "answer": Source("blue", "#6a5acd", "repeated from the answer"),
    "model": Source("bold red", "#d1495b", "by the model, a forward each"),
}


def sources_of(spans: list[list]) -> list[str]:
    """Of each token, from the spans of [`SSRMetrics`]."""
    return [source for source, count in spans for _ in range(count)]


def of_answer(items: Sequence, thoughts: list[list[int]]) -> list:
    """Of items that belong to the new tokens, those outside the thoughts of [`SSRMetrics`]."""
    thinking = {index for begin, end in thoughts for index in range(begin, end)}
    return [item for index, item in enumerate(items) if index not in thinking]
