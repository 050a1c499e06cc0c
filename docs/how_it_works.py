"""
Draws `how_it_works.svg`, the picture of the README: forwards of plain `generate` and of SSR, to scale, for one small
made-up text, and what becomes of the draft in it.

    python docs/how_it_works.py
"""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from hf_ssr.bench.plots import PHASE_COLOURS, STYLE

FILE = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 600, 450  # of the picture; on a phone it is shrunk to 0.6 of that
LEFT, BOX, TOKEN = 20, 25.4, 70  # where the rows begin; how wide a forward is, and a token
INK, SOFT, WRONG = "#24292f", "#6e7781", "#d1495b"
CLOSE = "#8f4a1d"  # forced on the child, not drafted
VERIFY, GO_ON, DRAFTS = "#1d7a6f", "#7d630c", "#b9561a"  # words: darker than the boxes, to be read on white

DRAFT = ["The", "total", "is", "79", "after", "5", "days", "end"]
ANSWER = ["The", "total", "is", "97", "after", "5", "days", "end"]
WRONG_AT = next(place for place, pair in enumerate(zip(DRAFT, ANSWER, strict=True)) if pair[0] != pair[1])

# Each entry is a forward.
PLAIN = ["prefill"] + ["thinking"] * 13 + ["plain"] * len(ANSWER)
PARENT = ["prefill"] + ["thinking"] * 13 + ["verify", "speculate"]
FORK = 4
CHILD = ["close"] + ["drafting"] * len(DRAFT)


class Sheet:
    """A white sheet to draw on: x to the right and y downwards, in units of the picture."""

    def __init__(self, height: float = HEIGHT):
        self.figure = Figure(figsize=(WIDTH / 72, height / 72))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.set_axis_off()
        self.box(1, 1, WIDTH - 2, height - 2, "white", edge="#d0d7de", corner=8)  # on dark pages too

    def box(self, x, y, width, height, colour, edge="none", corner=3.0, **style) -> None:
        shape = f"round,pad=0,rounding_size={corner}"
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, shape, facecolor=colour, edgecolor=edge, **style))

    def text(self, x, y, words, colour=INK, at="left", size=16, **style) -> None:
        self.axes.text(x, y, words, color=colour, ha=at, va="center", fontsize=size, **style)

    def arrow(self, start, end, colour=INK, bend=0.0) -> None:
        shape = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", end, start, arrowprops={**shape, "connectionstyle": f"arc3,rad={bend}"})

    def forwards(self, y, phases, first=0) -> None:
        """A row of boxes, one a forward, from the `first` place on."""
        for place, phase in enumerate(phases, first):
            colour = CLOSE if phase == "close" else SOFT if phase == "plain" else PHASE_COLOURS[phase]
            self.box(x_of(place) + 1, y, BOX - 2, 24, colour)

    def heading(self, y, words, count=None) -> None:
        self.text(LEFT, y, words, weight="bold", size=17)
        if count is not None:
            self.text(WIDTH - LEFT, y, count, at="right", weight="bold", size=17)


def x_of(place: float) -> float:
    """Where a forward begins."""
    return LEFT + place * BOX


def draw_plain(sheet: Sheet, y: float) -> None:
    sheet.heading(y, "Plain generate", f"{len(PLAIN)} forwards")
    sheet.forwards(y + 16, PLAIN)
    sheet.text(LEFT, y + 55, "prompt", SOFT)
    sheet.text(x_of(7.5), y + 55, "thinks", PHASE_COLOURS["thinking"], at="center")
    sheet.text(x_of(18), y + 55, "answers", SOFT, at="center")


def draw_ssr(sheet: Sheet, y: float) -> None:
    thought = PARENT.count("prefill") + PARENT.count("thinking")
    sheet.heading(y, "SSR: the same tokens", f"{len(PARENT)} forwards")
    sheet.text(x_of(thought), y + 30, "verifies", VERIFY)
    sheet.text(x_of(thought) + 72, y + 30, "and goes on", GO_ON)
    sheet.text(x_of(7.5), y + 30, "thinks on", PHASE_COLOURS["thinking"], at="center")
    # forwards that parent and child share
    sheet.box(x_of(FORK) - 2, y + 41, len(CHILD) * BOX + 4, 60, "#fdf1e7", edge="#f2c9a5", linewidth=1)
    sheet.forwards(y + 45, PARENT)
    sheet.forwards(y + 73, CHILD, FORK)
    sheet.arrow((x_of(FORK - 0.5), y + 71), (x_of(FORK) - 1, y + 85), CLOSE, bend=0.35)
    sheet.text(x_of(FORK - 0.9), y + 88, "fork", CLOSE, at="right")
    sheet.text(x_of(FORK), y + 114, "closes early, drafts the answer in the same forwards", DRAFTS)
    saved = len(PLAIN) - len(PARENT)
    for place in (len(PARENT), len(PLAIN)):
        sheet.axes.plot([x_of(place)] * 2, [y + 45, y + 69], color=SOFT, linewidth=1.2)
    sheet.text(x_of(len(PARENT) + saved / 2), y + 57, f"{saved} saved", at="center")
    sheet.arrow((x_of(len(PLAIN) - 1.1), y + 57), (x_of(len(PLAIN)) - 1, y + 57))
    sheet.arrow((x_of(len(PARENT) + 1.1), y + 57), (x_of(len(PARENT)) + 1, y + 57))


def draw_tokens(sheet: Sheet, y: float) -> None:
    sheet.heading(y, "What becomes of the draft")
    kept, past = PHASE_COLOURS["verify"], PHASE_COLOURS["speculate"]
    for place, (draft, answer) in enumerate(zip(DRAFT, ANSWER, strict=True)):
        x, is_wrong = LEFT + place * TOKEN, place == WRONG_AT
        colour = kept if place < WRONG_AT else past
        sheet.box(x + 2, y + 18, TOKEN - 4, 28, "white", edge=WRONG if is_wrong else "#e07b39", linewidth=1.6)
        sheet.text(x + TOKEN / 2, y + 32, draft, WRONG if is_wrong else INK, at="center")
        if is_wrong:
            sheet.axes.plot([x + 20, x + TOKEN - 20], [y + 38, y + 26], color=WRONG, linewidth=1.6)
        else:
            sheet.arrow((x + TOKEN / 2, y + 48), (x + TOKEN / 2, y + 71), colour)
        sheet.box(x + 2, y + 74, TOKEN - 4, 28, "white" if is_wrong else colour, edge=INK if is_wrong else colour)
        sheet.text(x + TOKEN / 2, y + 88, answer, at="center")
    for first, last, title, words, colour in (
        (0, WRONG_AT + 1, "one forward verifies:", f"{WRONG_AT} fit, {ANSWER[WRONG_AT]} is its own", VERIFY),
        (WRONG_AT + 1, len(DRAFT), "one forward goes on", "just past the mismatch", GO_ON),
    ):
        left, right = LEFT + first * TOKEN + 3, LEFT + last * TOKEN - 3
        sheet.axes.plot([left, left, right, right], [y + 107, y + 113, y + 113, y + 107], color=colour, linewidth=1.4)
        sheet.text((left + right) / 2, y + 126, title, colour, at="center")
        sheet.text((left + right) / 2, y + 146, words, colour, at="center")


def draw() -> Figure:
    """The whole picture."""
    sheet = Sheet()
    draw_plain(sheet, 26)
    draw_ssr(sheet, 122)
    draw_tokens(sheet, 284)
    return sheet.figure


def write(file) -> None:
    """The picture, to a file."""
    save(draw, file, FILE.stem)


def save(drawing, file, name: str) -> None:
    """What `drawing` draws, as SVG with letters that are letters."""
    with rc_context({**STYLE, "svg.hashsalt": name}):
        drawing().savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    write(FILE)
