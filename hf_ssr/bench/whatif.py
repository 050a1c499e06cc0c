"""`hf-ssr whatif`: the latency that recorded runs would have had where forwards take other times."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .arguments import PRESETS
from .methods import METHODS
from .results import Result, read_bench

BLOCK = 16  # tokens of a forward, for the limit of one forward a block


class Curve:
    """
    Seconds of forwards by rows and tokens, from a file or as measured in a bench. Sizes in between lie on the line
    between their neighbours; beyond the largest, on the line through the last two.

    Args:
        seconds (`dict[str, float]`): by rows x tokens, e.g. `{"1x1": 0.02, "1x16": 0.03, "2x1": 0.021}`.
    """

    def __init__(self, seconds: dict[str, float]):
        self._points: dict[int, list[tuple[int, float]]] = {}
        for shape, value in seconds.items():
            rows, tokens = map(int, shape.split("x"))
            self._points.setdefault(rows, []).append((tokens, value))
        for points in self._points.values():
            points.sort()
        if 1 not in self._points or self._points[1][0][0] != 1:
            raise ValueError("a curve of step costs must have `1x1`, the seconds of a plain step.")

    @classmethod
    def of_file(cls, path: Path) -> "Curve":
        """A JSON object of seconds by rows x tokens."""
        try:
            return cls({shape: float(value) for shape, value in json.loads(path.read_text()).items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f'--curve {path} must be an object such as {{"1x1": 0.02, "1x16": 0.03}}: {error}'
            ) from None

    @classmethod
    def measured(cls, results: list[Result]) -> "Curve":
        """What forwards took in a bench, whatever method they belonged to."""
        sums: dict[str, list[float]] = {}
        for result in results:
            for shape, (count, seconds) in result.shapes.items():
                total = sums.setdefault(shape, [0, 0.0])
                total[0], total[1] = total[0] + count, total[1] + seconds
        return cls({shape: seconds / count for shape, (count, seconds) in sums.items()})

    def __call__(self, rows: int, tokens: int) -> float:
        """Seconds of a forward."""
        if rows not in self._points:  # as many tokens in the nearest number of rows
            nearest = min(self._points, key=lambda known: abs(known - rows))
            rows, tokens = nearest, max(1, math.ceil(rows * tokens / nearest))
        points = self._points[rows]
        if len(points) == 1:
            return points[0][1]
        index = next((i for i, (size, _) in enumerate(points) if size >= tokens), len(points) - 1)
        (left, low), (right, high) = points[max(0, index - 1)], points[max(1, index)]
        value = low + (high - low) * (tokens - left) / (right - left)
        return max(high, value) if tokens > right else value


def latency(result: Result, cost: Callable[[int, int], float]) -> float:
    """Seconds of the forwards of a run after the prefill, at other costs."""
    return sum(count * cost(*map(int, shape.split("x"))) for shape, (count, _) in result.shapes.items())


def outside(result: Result) -> float:
    """Seconds of a run that are no matter of its steps: prefill, and what is outside the forwards."""
    return result.seconds - sum(seconds for _, seconds in result.shapes.values())


def what_if(results: list[Result], given: Callable[[int, int], float] | None = None) -> dict[str, dict[str, Any]]:
    """
    Of each task: seconds and ratio to plain by method, and the limits: an answer that costs nothing, and one forward
    for each block of 16 tokens of the answer.

    Args:
        results (`list[Result]`): of a bench.
        given (`Callable[[int, int], float]`, *optional*): seconds of a forward over rows and tokens. Without it those
            of each task's own forwards, all methods together, and what each run took outside of them is added: prefill
            and all else.
    """
    latencies: dict[str, dict[str, Any]] = {}
    for task in dict.fromkeys(result.task for result in results):
        found = [r for r in results if r.task == task and r.error is None and not r.loops]
        cost = given or Curve.measured(found)
        rows: dict[str, dict[str, float]] = {}
        for method in METHODS:
            runs = [r for r in found if r.method == method]
            if runs:
                seconds = sum(latency(r, cost) + (0.0 if given else outside(r)) for r in runs)
                rows[method] = {"seconds": seconds, "measured": sum(r.seconds for r in runs)}
        plain = [r for r in found if r.method == "plain"]
        if not plain:
            continue
        extra = 0.0 if given else sum(map(outside, plain))
        thought = sum(max(0, r.thinking_tokens - 1) * cost(1, 1) for r in plain) + extra
        blocks = sum(math.ceil((r.tokens - r.thinking_tokens) / BLOCK) * cost(1, BLOCK) for r in plain)
        rows["limit: one forward a block"] = {"seconds": thought + blocks}
        rows["limit: a free answer"] = {"seconds": thought}
        for row in rows.values():
            row["ratio"] = rows["plain"]["seconds"] / row["seconds"] if row["seconds"] else math.inf
        latencies[task] = rows
    return latencies


def whatif_command(arguments: argparse.Namespace) -> int:
    """
    Prints the table. Without preset or curve: this bench's own step costs, which must give what was measured.

    Raises:
        `ValueError`: if the folder holds no bench, or the curve is none.
    """
    settings, results = read_bench(arguments.folder)
    is_own = arguments.preset is None and arguments.curve is None
    if arguments.preset is not None:
        shape = PRESETS[arguments.preset][1]
        latencies = what_if(results, lambda rows, tokens: arguments.step * shape(rows, tokens))
    elif arguments.curve is not None:
        latencies = what_if(results, Curve.of_file(arguments.curve))
    else:
        latencies = what_if(results)
    if arguments.json:
        print(json.dumps(latencies))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(latencies, is_own))
    console.print(
        f"Runs of {settings['model']} ({settings['dtype']}) on {settings['machine']}. "
        + (
            "At this bench's own step costs. off by: how far a forward's size alone is from telling its time."
            if is_own
            else "Forwards after the prefill only, as they were recorded: with other costs SSR would draft otherwise."
        )
    )
    return 0


def _table(latencies: dict[str, dict[str, Any]], is_own: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("task", "method"):
        table.add_column(name, no_wrap=True)
    for name in ("seconds", "plain / here", *(["measured", "off by"] if is_own else [])):
        table.add_column(name, justify="right")
    for task, rows in latencies.items():
        for method, row in rows.items():
            cells = [f"{row['seconds']:.2f}", f"{row['ratio']:.2f}"]
            if is_own and "measured" in row:
                cells += [f"{row['measured']:.2f}", f"{row['seconds'] / row['measured'] - 1:+.1%}"]
            table.add_row(task, method, *cells)
        table.add_section()
    return table
