"""Pictures of a bench, as SVG whose lines and letters take the colour of the page."""

import io
import math
import re
from collections.abc import Sequence
from functools import wraps
from typing import Any

from .records import Record
from .sources import SOURCES

INK = "#010203"  # stands for the page's own colour
GREY = "#888888"
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
COLOURS = ("#3b7dd8", "#e07b39", "#2a9d8f", "#b5539c", "#8a8d91", "#c9a227", "#6a5acd", "#d1495b", "#4f772d")
PHASE_COLOURS = {
    "prefill": "#8a8d91",
    "plain": "#b8bcc2",
    "thinking": "#3b7dd8",
    "drafting": "#e07b39",
    "verify": "#2a9d8f",
    "speculate": "#c9a227",
    "outside": "#b5539c",
}


def _styled(draw):
    """
    Draws in the page's style.

    Raises:
        `ValueError`: where matplotlib is missing.
    """

    @wraps(draw)
    def styled(*args) -> str:
        try:
            from matplotlib import rc_context
        except ImportError:
            raise ValueError("the report needs matplotlib, which is not installed: pip install matplotlib") from None
        with rc_context(STYLE):
            return draw(*args)

    return styled


def _figure(columns: int = 1, rows: int = 1, height: float = 2.6, width: float = 7.0):
    """Axes to draw on, a grid of `rows` x `columns`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _svg(figure, name: str, description: str) -> str:
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    head, body = text.split(">", 1)
    text = re.sub(r' (width|height)="[^"]*"', "", head) + ">" + body  # as wide as there is room
    # ids are of the page, and there are several pictures in it
    text = re.sub(r'(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)


@_styled
def speedups(records: list[Record], methods: Sequence[str]) -> str:
    """Seconds of plain / seconds here, of each prompt, sorted."""
    tasks = list(dict.fromkeys(record.task for record in records))
    figure, axes = _figure(columns=min(3, len(tasks)), rows=math.ceil(len(tasks) / 3))
    for axis, task in zip(axes, tasks, strict=False):
        totals: dict[tuple[str, str], float] = {}
        for record in records:
            if record.task == task and record.error is None and not record.loops:
                key = record.method, record.prompt
                totals[key] = totals.get(key, 0.0) + record.seconds
        for colour, method in zip(COLOURS, methods, strict=False):
            ratios = [
                totals["plain", prompt] / seconds
                for (name, prompt), seconds in totals.items()
                if name == method and ("plain", prompt) in totals
            ]
            axis.plot(range(1, len(ratios) + 1), sorted(ratios), color=colour, marker="o", markersize=2.5, label=method)
        axis.axhline(1, color=GREY, linewidth=0.8)
        axis.set_title(task, loc="left")
        axis.set_xlabel("prompts, sorted")
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes[len(tasks) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("times as fast as plain")
    axes[0].legend(fontsize=7)
    return _svg(figure, "speedups", "speed-up of each prompt, sorted, by task and method")


def _bars(names: Sequence[str], parts: dict[str, list[float]], colours: dict[str, str], label: str, name: str) -> str:
    """Bars of stacked parts, a line each."""
    figure, (axis,) = _figure(height=0.9 + 0.28 * len(names))
    left = [0.0] * len(names)
    for part, values in parts.items():
        if any(values):
            axis.barh(range(len(names)), values, left=left, color=colours[part], label=part, height=0.7)
            left = [a + b for a, b in zip(left, values, strict=True)]
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.legend(fontsize=7, ncols=len(parts), loc="lower center", bbox_to_anchor=(0.5, 1))
    return _svg(figure, name, label)


@_styled
def stage_times(summary: dict[str, dict[str, Any]]) -> str:
    """Where the seconds go, by phase; of plain, all in one."""
    names: list[str] = []
    parts: dict[str, list[float]] = {phase: [] for phase in PHASE_COLOURS}
    for task, methods in summary.items():
        for method in ("plain", *(m for m in methods if methods[m]["ssr"] is not None)):
            if method not in methods:
                continue
            names.append(f"{task}, {method}")
            row = methods[method]
            ssr = row["ssr"]
            seconds = {"plain": row["seconds"]} if ssr is None else dict(ssr["seconds"])
            seconds.pop("drafting_exposed", None)
            if ssr is not None:
                seconds["outside"] = max(0.0, row["seconds"] - sum(seconds.values()))
            for phase, values in parts.items():
                values.append(seconds.get(phase, 0.0) / row["runs"])
    return _bars(names, parts, PHASE_COLOURS, "seconds a prompt, by phase", "stages")


@_styled
def source_shares(summary: dict[str, dict[str, Any]]) -> str:
    """Where the answer's tokens come from."""
    names: list[str] = []
    parts: dict[str, list[float]] = {source: [] for source in SOURCES}
    for task, methods in summary.items():
        for method, row in methods.items():
            ssr = row["ssr"]
            if ssr is None or not ssr["answer_tokens"]:
                continue
            names.append(f"{task}, {method}")
            counts = {"prefix": ssr["prefix_accepted"], **ssr["suffix_accepted"]}
            counts["model"] = ssr["answer_tokens"] - ssr["accepted_tokens"]
            for source, values in parts.items():
                values.append(counts.get(source, 0) / ssr["answer_tokens"])
    return _bars(
        names,
        parts,
        {name: source.colour for name, source in SOURCES.items()},
        "share of the answer's tokens, by source",
        "sources",
    )


@_styled
def acceptance(summary: dict[str, dict[str, Any]], method: str) -> str:
    """How often a draft token is kept, by its position in a round's draft."""
    figure, (axis,) = _figure()
    for colour, (task, methods) in zip(COLOURS, summary.items(), strict=False):
        counts = methods.get(method, {}).get("ssr", None)
        if counts:
            shares = [kept / verified for verified, kept in counts["accepted_by_position"] if verified]
            axis.plot(range(1, len(shares) + 1), shares, color=colour, marker="o", markersize=3, label=task)
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("position in the draft of a round")
    axis.set_ylabel("share kept")
    axis.legend(fontsize=7)
    return _svg(figure, "acceptance", "share of draft tokens kept by their position in the draft")


@_styled
def overlaps(records: list[Record], method: str) -> str:
    """How much of the answer a draft has right, by how much of the thought it was made from."""
    figure, axes = _figure(columns=2)
    for axis, place, title in zip(axes, (1, 2), ("up to the first difference", "in runs in common"), strict=True):
        for colour, task in zip(COLOURS, dict.fromkeys(r.task for r in records), strict=False):
            found = [r for r in records if (r.task, r.method, r.repeat) == (task, method, 0) and r.thinking_tokens]
            points = [(o[0] / r.thinking_tokens, o[place]) for r in found for o in r.overlaps]
            if points:
                axis.scatter(*zip(*points, strict=True), s=9, alpha=0.55, color=colour, label=task, linewidths=0)
        axis.set_xlim(0, 1.02)
        axis.set_ylim(0, 1.02)
        axis.set_xlabel("share of the thought before the fork")
        axis.set_title(title, loc="left")
    axes[0].set_ylabel("share of the answer in the draft")
    axes[0].legend(fontsize=7)
    return _svg(figure, "overlaps", "overlap of draft and answer by the share of the thought before the fork")


@_styled
def break_even(summary: dict[str, dict[str, Any]]) -> str:
    """Tokens a forward against what a forward costs: above the line, speculation in the answer pays."""
    figure, (axis,) = _figure(height=3.4)
    most = 1.0
    for colour, (task, methods) in zip(COLOURS, summary.items(), strict=False):
        for marker, (method, row) in zip("osD^vPX*<>", methods.items(), strict=False):
            found = row["ssr"] and row["ssr"]["break_even"]
            if found:
                axis.plot(
                    found["cost_per_forward"],
                    found["tokens_per_forward"],
                    marker,
                    color=colour,
                    label=f"{task}, {method}",
                )
                most = max(most, found["cost_per_forward"], found["tokens_per_forward"])
    axis.plot([1, most], [1, most], color=GREY, linewidth=0.8)
    axis.set_xlabel("cost of the answer's forwards, in plain steps")
    axis.set_ylabel("tokens a forward")
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    return _svg(figure, "breakeven", "tokens a forward against the cost of a forward; above the line it pays")


@_styled
def timeline(samples: list[dict[str, Any]], task: str) -> str:
    """One prompt, forward by forward: the parent's thought with the child in it, and the blocks that verify."""
    figure, (axis,) = _figure(height=1.0 + 0.4 * len(samples))
    seen: dict[str, Any] = {}
    for line, sample in enumerate(samples):
        for phase in dict.fromkeys(entry[0] for entry in sample["timeline"]):
            spans = [(begin, seconds) for name, _, _, begin, seconds in sample["timeline"] if name == phase]
            bar = axis.broken_barh(spans, (line - 0.35, 0.7), color=PHASE_COLOURS[phase], linewidth=0)
            seen.setdefault(phase, bar)
    axis.set_yticks(range(len(samples)), [sample["method"] for sample in samples])
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.legend(seen.values(), seen, fontsize=7, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1))
    return _svg(figure, f"timeline-{task}", f"forwards of one prompt of {task} along time")
