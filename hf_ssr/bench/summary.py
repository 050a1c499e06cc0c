"""The runs of a bench summed up: ratios to plain with their spread, and where the gain comes from."""

import math
import random
from collections.abc import Iterable
from typing import Any

from rich.table import Table

from ..metrics import SSRMetrics, Stage
from .methods import METHODS
from .records import Record

MEASURES = ("forwards", "cost", "fed_tokens", "seconds")
RESAMPLES = 1000
INTERVAL = 0.95
# of SSR's own metrics, summed over runs
RATES = (
    "acceptance_rate",
    "mean_draft_length",
    "mean_acceptance_length",
    "suffix_hit_rate",
    "verify_overhead",
    "thinking_slowdown",
    "tokens_per_forward",
    "answer_tokens_per_forward",
)


def summarize(records: Iterable[Record]) -> dict[str, dict[str, dict[str, Any]]]:
    """
    Of each task and method:

    - `runs`, and totals: `tokens`, `thinking_tokens`, `forwards`, `cost`, `fed_tokens`, `seconds`;
    - `..._ratio`: the total of plain on the same prompts / the total here, above 1 = better than plain, except for
      `fed_tokens_ratio`, the work: here / plain. `seconds_ratio_interval`: where 95 % of 1,000 resamples of the prompts
      lie. `mean_seconds_ratio`: the mean of the ratios of single prompts, and its interval; `worst_seconds_ratio`: the
      least of them;
    - `same_tokens`: the share of runs with the tokens of plain; `differences_per_1000`: first differences for 1,000
      tokens;
    - `score`: the mean by the task's rule; `loops`, `errors`: runs that are not in the other figures;
    - `peak_memory`: bytes, the most of any run;
    - `ssr`: what SSR counted, in all runs together.
    """
    records = list(records)
    plain = {r.key: r for r in records if r.method == "plain" and r.error is None}
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for task in dict.fromkeys(record.task for record in records):
        summary[task] = {}
        for method in METHODS:
            found = [r for r in records if (r.task, r.method) == (task, method)]
            pairs = [(r, plain[r.key]) for r in found if r.error is None and r.key in plain]
            counted = [(r, p) for r, p in pairs if not (r.loops or p.loops)]
            if counted:
                summary[task][method] = _row(counted) | {
                    "loops": len(pairs) - len(counted),
                    "errors": sum(r.error is not None for r in found),
                }
    return summary


def _row(pairs: list[tuple[Record, Record]]) -> dict[str, Any]:
    """Of runs, each beside plain on the same prompt."""
    row: dict[str, Any] = {"runs": len(pairs)}
    for name in ("tokens", "thinking_tokens"):
        row[name] = sum(getattr(r, name) for r, _ in pairs)
    row["same_tokens"] = sum(r.same_tokens for r, _ in pairs) / len(pairs)
    row["differences_per_1000"] = 1000 * sum(not r.same_tokens for r, _ in pairs) / max(1, row["tokens"])
    scores = [r.score for r, _ in pairs if r.score is not None]
    row["score"] = sum(scores) / len(scores) if scores else None
    for name in MEASURES:
        row[name] = sum(getattr(r, name) for r, _ in pairs)
        there = sum(getattr(p, name) for _, p in pairs)
        ratio = (row[name], there) if name == "fed_tokens" else (there, row[name])
        row[f"{name}_ratio"] = ratio[0] / ratio[1] if ratio[1] else math.nan
    prompts: dict[str, list[float]] = {}  # seconds here and in plain, of all repeats
    for record, other in pairs:
        total = prompts.setdefault(record.prompt, [0.0, 0.0])
        total[0], total[1] = total[0] + record.seconds, total[1] + other.seconds
    here_and_there = list(prompts.values())
    row["seconds_ratio_interval"] = _interval(here_and_there, _ratio_of_totals)
    row["mean_seconds_ratio"] = _mean_of_ratios(here_and_there)
    row["mean_seconds_ratio_interval"] = _interval(here_and_there, _mean_of_ratios)
    row["worst_seconds_ratio"] = min(there / here for here, there in here_and_there)
    peaks = [r.peak_memory for r, _ in pairs if r.peak_memory is not None]
    row["peak_memory"] = max(peaks, default=None)
    found = [r.metrics for r, _ in pairs if r.metrics is not None and r.metrics["plain_reason"] is None]
    row["ssr"] = _of_ssr(found) if found else None
    return row


def _ratio_of_totals(seconds: list[list[float]]) -> float:
    return sum(there for _, there in seconds) / sum(here for here, _ in seconds)


def _mean_of_ratios(seconds: list[list[float]]) -> float:
    return sum(there / here for here, there in seconds) / len(seconds)


def _interval(values: list, statistic) -> list[float]:
    """Where `INTERVAL` of the statistic lies when prompts are drawn again and again (bootstrap, Efron 1979)."""
    rng = random.Random(0)
    found = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    outside = round((1 - INTERVAL) / 2 * RESAMPLES)
    return [found[outside], found[-1 - outside]]


def pooled(metrics: Iterable[dict[str, Any]]) -> SSRMetrics:
    """The metrics of several runs, from `to_dict`, as of one: counts and times are summed, rates follow from them."""
    total = SSRMetrics()
    for each in metrics:
        for name, value in vars(total).items():
            if isinstance(value, (int, float)) and not name.startswith("_") and each.get(name) is not None:
                setattr(total, name, value + each[name])
        for name in ("suffix_accepted", "forwards", "seconds"):
            for key, value in each[name].items():
                getattr(total, name)[key] = getattr(total, name).get(key, 0) + value
        for phase, shapes in each["shapes"].items():
            for shape, (count, seconds) in shapes.items():
                entry = total.shapes.setdefault(phase, {}).setdefault(shape, [0, 0.0])
                entry[0], entry[1] = entry[0] + count, entry[1] + seconds
        total.add_positions(each["accepted_by_position"])
        total.stages += [Stage(**stage) for stage in each["stages"]]
    return total


def _of_ssr(found: list[dict[str, Any]]) -> dict[str, Any]:
    total = pooled(found)
    rates = {name: getattr(total, name) for name in RATES}
    rates = {name: None if math.isnan(value) else value for name, value in rates.items()}
    of_drafts = ("drafted_tokens", "accepted_tokens", "wasted_draft_tokens", "prefix_accepted", "suffix_accepted")
    of_texts = ("draft_tokens", "answer_tokens", "rounds", "thinking_drafted_tokens", "thinking_accepted_tokens")
    hits = {source: count / total.lookups if total.lookups else None for source, count in total.suffix_accepted.items()}
    return {
        **rates,
        **{name: getattr(total, name) for name in (*of_drafts, *of_texts)},
        "suffix_accepted_per_lookup": hits,
        "forwards": total.forwards,
        "seconds": total.seconds,
        "overhead_seconds": total.overhead_seconds,
        "accepted_by_position": total.accepted_by_position,
        "extra_places": max(each["extra_places"] for each in found),
        "stages": stages_of(found, total.plain_step_seconds),
        "break_even": break_even(total),
    }


def stages_of(found: list[dict[str, Any]], step: float) -> list[dict[str, Any]]:
    """
    Is each stage worth it? Of the first, second, ... fork of the runs that had it: how many, tokens drafted, tokens of
    the answer taken from it, and `cost`: what its forwards took beyond plain steps, in plain steps (the parent's own
    speculation in them is counted in).
    """
    rows = []
    for number in range(max((len(each["stages"]) for each in found), default=0)):
        stages = [Stage(**each["stages"][number]) for each in found if number < len(each["stages"])]
        rows.append(
            {
                "stage": number + 1,
                "runs": len(stages),
                "draft_budget": sum(s.draft_budget for s in stages) / len(stages),
                "draft_tokens": sum(s.draft_tokens for s in stages),
                "accepted_tokens": sum(s.accepted_tokens for s in stages),
                "cost": None if math.isnan(step) else sum(s.seconds / step - s.forwards for s in stages),
            }
        )
    return rows


def break_even(total: SSRMetrics) -> dict[str, float] | None:
    """
    A round pays where it yields more tokens than it costs plain steps. `predicted`: the answer's speed-up from tokens
    a round and what its forwards cost; `measured`: from its wall time, in plain steps of the same run.
    """
    rounds = {p: s for p, s in total.shapes.items() if p in ("verify", "speculate")}
    step = total.plain_step_seconds
    seconds = sum(each for shapes in rounds.values() for _, each in shapes.values())
    if not seconds or math.isnan(step):
        return None
    forwards = sum(count for shapes in rounds.values() for count, _ in shapes.values())
    return {
        "tokens_per_forward": total.answer_tokens / forwards,
        "cost_per_forward": seconds / forwards / step,
        "predicted": total.answer_tokens * step / seconds,
        "measured": total.answer_speedup,
    }


def table_of(summary: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """The summary to look at."""
    table = Table(box=None, pad_edge=False)
    for name in ("task", "method"):
        table.add_column(name, no_wrap=True)
    columns = ("forwards", "seconds", "forwards x", "cost x", "work x", "seconds x", "95 %", "worst x", "same", "score")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for task, methods in summary.items():
        for method, row in methods.items():
            low, high = row["seconds_ratio_interval"]
            table.add_row(
                task,
                method,
                f"{row['forwards']:.0f}",
                f"{row['seconds']:.2f}",
                *(f"{row[f'{name}_ratio']:.2f}" for name in MEASURES),
                f"{low:.2f}-{high:.2f}",
                f"{row['worst_seconds_ratio']:.2f}",
                f"{row['same_tokens']:.0%}",
                "" if row["score"] is None else f"{row['score']:.0%}",
            )
        table.add_section()
    return table
