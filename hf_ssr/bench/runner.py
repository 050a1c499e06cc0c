"""`hf-ssr bench`: methods side by side on the same prompts, in forwards, cost and seconds."""

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..comparing import Run, timed_generate
from .methods import METHODS, arguments_of


@dataclass
class Prompt:
    """
    One prompt of a task.

    Args:
        task (`str`): that it belongs to.
        name (`str`): which of these.
        ids (`torch.LongTensor` of shape `(1, prompt_length)`): what the model is given.
    """

    task: str
    name: str
    ids: torch.LongTensor


@dataclass
class Record:
    """
    One run, a line of `runs.jsonl`.

    Args:
        task, prompt, method (`str`), repeat (`int`): what was run.
        tokens (`int`): new ones. `same_tokens` (`bool`): whether they are those of plain `generate`.
        forwards (`int`): of the model, the prefill among them.
        cost (`float`): forwards after the prefill, each weighted by what its size took, in plain steps of this prompt.
        seconds (`float`): the whole call.
        metrics (`dict`, *optional*): of SSR.
        error (`str`, *optional*): why there is nothing else.
    """

    task: str
    prompt: str
    method: str
    repeat: int
    tokens: int = 0
    same_tokens: bool = True
    forwards: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    metrics: dict[str, Any] | None = field(default=None, repr=False)
    error: str | None = None


def run_bench(
    model,
    tokenizer,
    prompts: list[Prompt],
    methods: list[str],
    repeats: int,
    common: dict[str, Any],
    ssr: dict[str, Any],
    out: Path,
) -> list[Record]:
    """
    Runs every method on every prompt, in turn, so that a machine that grows slower does so for all. Each run is written
    to `out/runs.jsonl` when it is done, and an interrupt keeps what is done.

    Args:
        model (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): what runs.
        prompts (`list[Prompt]`): what to run it on.
        methods (`list[str]`): of `METHODS`; `"plain"` is run in any case.
        repeats (`int`): of everything.
        common, ssr (`dict`): settings of `generate`, and of SSR.
        out (`Path`): a folder; what it holds of an earlier bench is replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    methods = ["plain", *(method for method in methods if method != "plain")]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    records: list[Record] = []
    with open(out / "runs.jsonl", "w") as lines, Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("warm-up", total=repeats * len(prompts) * len(methods))
        for method in methods:  # caches, kernels, and what SSR measures
            timed_generate(model, prompts[0].ids, 0, **arguments_of(method, common, tokenizer, ssr))
        try:
            for repeat in range(repeats):
                for place, prompt in enumerate(prompts):
                    # each method goes first as often as any other
                    turn = [methods[(place + repeat + i) % len(methods)] for i in range(len(methods))]
                    runs: dict[str, Run | str] = {}
                    for method in turn:
                        bar.update(shown, description=f"{prompt.task} {prompt.name} {method}")
                        arguments = arguments_of(method, common, tokenizer, ssr)
                        try:
                            runs[method] = timed_generate(model, prompt.ids, repeat, **arguments)
                        except torch.OutOfMemoryError as error:
                            runs[method] = f"out of memory: {error}"
                        bar.advance(shown)
                    for record in _records(prompt, repeat, runs):
                        records.append(record)
                        lines.write(json.dumps(asdict(record)) + "\n")
                    lines.flush()
        except KeyboardInterrupt:
            bar.console.print(f"interrupted: {len(records)} runs are kept")
    return records


def _records(prompt: Prompt, repeat: int, runs: dict[str, Run | str]) -> Iterator[Record]:
    plain = runs["plain"]
    step = statistics.fmean(s for _, _, s in plain.shapes[1:]) if isinstance(plain, Run) else None
    for method, run in runs.items():
        record = Record(prompt.task, prompt.name, method, repeat)
        if isinstance(run, str):
            record.error = run
        else:
            record.tokens, record.forwards, record.seconds = len(run.tokens), run.forwards, run.seconds
            record.same_tokens = isinstance(plain, Run) and run.tokens == plain.tokens
            record.cost = sum(seconds for _, _, seconds in run.shapes[1:]) / step if step else float("nan")
            record.metrics = run.metrics.to_dict() if run.metrics is not None else None
        yield record


def summarize(records: Iterable[Record]) -> dict[str, dict[str, dict[str, float]]]:
    """
    Totals of each task and method: `forwards`, `cost`, `seconds`, `tokens`, the share of runs with the `same_tokens` as
    plain, and each `..._ratio`: the total of plain on the same prompts / the total here, above 1 = better than plain.
    """
    records = list(records)
    plain = {(r.task, r.prompt, r.repeat): r for r in records if r.method == "plain" and r.error is None}
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for task in dict.fromkeys(record.task for record in records):
        summary[task] = {}
        for method in METHODS:
            found = [r for r in records if (r.task, r.method) == (task, method) and r.error is None]
            pairs = [(r, plain[key]) for r in found if (key := (r.task, r.prompt, r.repeat)) in plain]
            if not pairs:
                continue
            row: dict[str, float] = {"runs": len(pairs), "tokens": sum(r.tokens for r, _ in pairs)}
            row["same_tokens"] = sum(r.same_tokens for r, _ in pairs) / len(pairs)
            for name in ("forwards", "cost", "seconds"):
                row[name] = sum(getattr(r, name) for r, _ in pairs)
                row[f"{name}_ratio"] = sum(getattr(p, name) for _, p in pairs) / row[name]
            # of single prompts: how bad does it get?
            row["worst_seconds_ratio"] = min(p.seconds / r.seconds for r, p in pairs)
            summary[task][method] = row
    return summary


def table_of(summary: dict[str, dict[str, dict[str, float]]]) -> Table:
    """The summary to look at."""
    table = Table(box=None, pad_edge=False)
    for name in ("task", "method"):
        table.add_column(name, no_wrap=True)
    for name in ("forwards", "cost", "seconds", "forwards x", "cost x", "seconds x", "worst x", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for task, methods in summary.items():
        for method, row in methods.items():
            table.add_row(
                task,
                method,
                f"{row['forwards']:.0f}",
                f"{row['cost']:.0f}",
                f"{row['seconds']:.2f}",
                *(f"{row[f'{name}_ratio']:.2f}" for name in ("forwards", "cost", "seconds")),
                f"{row['worst_seconds_ratio']:.2f}",
                f"{row['same_tokens']:.0%}",
            )
        table.add_section()
    return table
