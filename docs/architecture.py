"""
Draws `architecture.svg`: the lanes, what a round does with them and in which file, and the places of its forward in a
cache of slots.

    python docs/architecture.py
"""

from pathlib import Path
from typing import NamedTuple

from how_it_works import INK, LEFT, SOFT, WIDTH, Sheet, save
from matplotlib.figure import Figure

from hf_ssr.bench.plots import PHASE_COLOURS

FILE = Path(__file__).with_suffix(".svg")
HEIGHT = 484
THOUGHT, ANSWER, CHILD = PHASE_COLOURS["thinking"], PHASE_COLOURS["verify"], PHASE_COLOURS["drafting"]
SPARE, LINE, WORDS = "#eaeef2", "#d0d7de", "#b9561a"

LANES = {"parent, in its thought": THOUGHT, "parent, in its answer": ANSWER, "child, drafts": CHILD}
ROUND = {
    "propose": "drafter_*.py",
    "fit to cost": "scheduling.py",
    "one forward": "target.py",
    "follow": "following.py",
    "settle": "target.py",
}
SLOT, FIRST, REGION = 25.2, 76, 5  # how wide a slot is; where they begin; slots of a child


class Line(NamedTuple):
    """
    A row of the cache.

    Args:
        name, colour (`str`): of the text.
        child (`list[str]`): of each slot of the child's region, whether it holds a token, or is given one.
        text (`list[str]`): of each slot behind it.
    """

    name: str
    colour: str
    child: list[str]
    text: list[str]


LINES = [
    Line("row 1", THOUGHT, ["held"] * 2 + ["place", "draft"], ["held"] * 10 + ["place", "draft", "draft"]),
    Line("row 2", ANSWER, [], ["held"] * 7 + ["place"] + ["draft"] * 4),
]
FORK = 6  # slots of the text that the child of row 1 sees


def draw_lanes(sheet: Sheet, y: float) -> None:
    sheet.heading(y, "Lanes: texts that are being written", "lanes.py, child.py")
    width = (WIDTH - 2 * LEFT - 20) / 3
    for place, (name, colour) in enumerate(LANES.items()):
        x = LEFT + place * (width + 10)
        sheet.box(x, y + 16, width, 28, colour)
        sheet.text(x + width / 2, y + 30, name, "white", at="center", size=15)
        sheet.arrow((x + width / 2, y + 46), (x + width / 2, y + 66), colour)


def draw_round(sheet: Sheet, y: float) -> None:
    sheet.heading(y, "A round moves all of them on", "rounds.py")
    width = (WIDTH - 2 * LEFT - 4 * 14) / len(ROUND)
    for place, (name, file) in enumerate(ROUND.items()):
        x = LEFT + place * (width + 14)
        is_forward = name == "one forward"
        sheet.box(x, y + 16, width, 30, INK if is_forward else "white", edge=INK, linewidth=1.2)
        sheet.text(x + width / 2, y + 31, name, "white" if is_forward else INK, at="center", size=15)
        sheet.text(x + width / 2, y + 58, file, SOFT, at="center", size=13)
        if place:
            sheet.arrow((x - 14, y + 31), (x - 1, y + 31))
    first, last = LEFT + width / 2, WIDTH - LEFT - width / 2
    sheet.axes.plot([last, last, first], [y + 70, y + 80, y + 80], color=INK, linewidth=1.6)
    sheet.arrow((first, y + 80), (first, y + 67))
    sheet.text(WIDTH / 2, y + 93, "until every text is done", SOFT, at="center", size=14)


def draw_slots(sheet: Sheet, y: float) -> None:
    sheet.heading(y, "Its forward, in a cache of slots", "cache_slots.py")
    for number, line in enumerate(LINES):
        top = y + 60 + 62 * number
        sheet.text(LEFT, top + 13, line.name, SOFT)
        draw_row(sheet, top, line.child, CHILD, 0, REGION)
        draw_row(sheet, top, line.text, line.colour, REGION, 15)
    left, right = x_of(REGION) + 2, x_of(REGION + FORK) - 2
    sheet.axes.plot([left, left, right, right], [y + 56, y + 50, y + 50, y + 56], color=CHILD, linewidth=1.4)
    sheet.text((left + right) / 2, y + 37, "the child sees this", WORDS, at="center", size=14)
    sheet.text(x_of(REGION / 2), y + 37, "child's region", WORDS, at="center", size=14)
    sheet.text(x_of(REGION), y + 104, "the text, a draft behind it, room to grow", SOFT, size=14)
    for words, line in (
        ("Pale: held already. Full: the places of this step; with a dot: a draft.", 0),
        ("A place sees its own branch, and what that grew from: one mask says so.", 1),
        ("What is rejected is written again: nothing is rolled back.", 2),
    ):
        sheet.text(LEFT, y + 172 + 21 * line, words, size=15)


def draw_row(sheet: Sheet, y: float, slots: list[str], colour: str, first: int, count: int) -> None:
    for place in range(count):
        kind = slots[place] if place < len(slots) else "spare"
        x, shade = x_of(first + place) + 1, SPARE if kind == "spare" else colour
        edge, alpha = LINE if kind == "spare" else colour, 0.3 if kind == "held" else 1
        sheet.box(x, y, SLOT - 2, 26, shade, edge=edge, alpha=alpha)
        if kind == "draft":
            sheet.axes.plot([x + SLOT / 2 - 1], [y + 13], "o", color="white", markersize=5)


def x_of(slot: float) -> float:
    """Where a slot begins."""
    return FIRST + slot * SLOT


def draw() -> Figure:
    """The whole picture."""
    sheet = Sheet(HEIGHT)
    draw_lanes(sheet, 26)
    draw_round(sheet, 116)
    draw_slots(sheet, 246)
    return sheet.figure


def write(file) -> None:
    """The picture, to a file."""
    save(draw, file, FILE.stem)


if __name__ == "__main__":
    write(FILE)
