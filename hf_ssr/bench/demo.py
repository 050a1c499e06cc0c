"""
`hf-ssr demo`: thought and draft side by side, the answer coloured by where it came from, and what was saved.

What is shown does not depend on what forwards cost on this machine; beside it stands what SSR does here by default.
"""

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from ..config import DEFAULTS, SSRConfig
from ..markers import require_markers
from ..running.comparing import Run, prompt_ids, run_plain, timed_generate
from ..running.reasoner import load_reasoner
from ..running.terminal import moving
from ..thinking import split_thinking
from .methods import SSR_SETTINGS
from .sources import SOURCES, of_answer, sources_of
from .tasks import HELD_OUT, check, draw

MAX_NEW_TOKENS = 1500
REPEATS = 3
SECONDS = f"seconds (median of {REPEATS})"
BLOCK = 1 + DEFAULTS["num_draft_tokens"]  # tokens of a forward that verifies a whole draft
INTRODUCTION = (
    "A reasoning model writes a thought first, then its answer. While it still thinks, a fork of it ends the thought "
    "early and writes a draft: a guess of the answer. When the thought is really over, the model reads the draft, many "
    "tokens in one forward (a run of the network), and keeps what it would have written itself."
)
LINES = 12  # of thought and draft, while they are written
THINKS, DRAFTS = "the model thinks", "its fork drafts the answer"
WIDE = 80  # columns, for two of them side by side


class _Screen(BaseStreamer):
    """Shows thought and draft while they are written."""

    def __init__(self, tokenizer, end_ids: set[int], live: Live):
        self._tokenizer, self._end_ids, self._live = tokenizer, end_ids, live
        self._thought: list[int] = []
        self._draft: list[int] = []
        self._is_prompt = self._is_open = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        for token in value.flatten().tolist():
            self._is_open = self._is_open and token not in self._end_ids
            if self._is_open:
                self._thought.append(token)
        self._live.update(self._panels())

    def put_draft(self, value: torch.Tensor, **kwargs) -> None:
        self._draft = value.tolist()

    def end(self) -> None:
        self._live.update(self._panels(), refresh=True)

    def _panels(self):
        width = self._live.console.width
        columns = [(THINKS, self._thought, "dim")]
        if width >= WIDE:
            columns.append((DRAFTS, self._draft, "green"))
        grid = Table.grid(expand=True)
        for _ in columns:
            grid.add_column(ratio=1)
        grid.add_row(*(self._panel(*column, width=width // len(columns) - 4) for column in columns))
        return grid

    def _panel(self, title: str, tokens: list[int], style: str, width: int) -> Panel:
        text = Text(self._tokenizer.decode(tokens[-60 * LINES :], skip_special_tokens=True), style=style)
        lines = text.wrap(self._live.console, width)[-LINES:]
        return Panel(Group(*lines), title=title, height=LINES + 2, border_style="dim")


def demo_command(arguments: argparse.Namespace) -> int:
    """Runs the demo and prints it. Returns the exit status."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is too small for more, and where cores are busy they wait for each other
    try:
        return run_demo(arguments.task, arguments.seed, arguments.json)
    finally:
        torch.set_num_threads(threads)


def run_demo(task: str, seed: int, as_json: bool) -> int:
    """Runs and prints it. Returns the exit status."""
    file = sys.stderr if as_json else sys.stdout
    console = Console(highlight=False, file=file, quiet=as_json, force_interactive=moving(file))
    sample = draw(task, HELD_OUT + seed)
    model, tokenizer = load_reasoner()
    ids = prompt_ids(tokenizer, sample.prompt)
    console.print(Panel(sample.prompt, title=f"{task}, task {seed}: one that the model was not trained on"))
    console.print(INTRODUCTION)
    shown = shown_run(model, tokenizer, ids, console)
    runs = _runs(model, tokenizer, ids)
    plain = runs["plain"][0]
    parts = split_thinking(ids[0].tolist() + shown.tokens, _config(tokenizer, "ssr_off"), ids.shape[1])
    texts = {
        name: tokenizer.decode(ids, skip_special_tokens=True) for name, ids in zip(parts._fields, parts, strict=True)
    }
    drafts = [tokenizer.decode(stage.draft, skip_special_tokens=True) for stage in shown.metrics.stages]
    report = {
        "task": task,
        "seed": seed,
        "same_tokens": all(run.tokens == plain.tokens for found in runs.values() for run in [shown, *found]),
        "answer_right": check(sample, tokenizer.decode(parts.answer, skip_special_tokens=True)),
        **{method: _figures(found) for method, found in runs.items()},
        "block_cost": block_cost(runs["plain"], runs["ssr_off"]),
        "prompt": sample.prompt,
        **texts,
        "drafts": drafts,
    }
    if as_json:
        print(json.dumps(report))
        return 0
    best = max(range(len(drafts)), key=lambda number: shown.metrics.stages[number].accepted_tokens, default=None)
    console.print(_thought_and_draft(console, texts["thought"], "" if best is None else drafts[best]))
    console.print(_answer_panel(tokenizer, shown))
    console.print(_legend(shown))
    console.print(_of_stages(shown))
    console.print(_table(report))
    console.print(_why_they_differ(report["block_cost"]))
    return 0


def _config(tokenizer, method: str) -> SSRConfig:
    return SSRConfig.from_tokenizer(
        tokenizer,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        **SSR_SETTINGS[method],
    )


def shown_run(model, tokenizer, ids: torch.Tensor, console: Console) -> Run:
    """The run that is shown: all there is, whatever forwards cost here. It is the same on every machine."""
    config = _config(tokenizer, "ssr_off")
    with _screen(console, tokenizer, config) as streamer:
        return timed_generate(model, ids, 0, generation_config=config, streamer=streamer)


def _runs(model, tokenizer, ids: torch.Tensor) -> dict[str, list[Run]]:
    """Of each method, in turns, so that a machine that grows slower does so for all."""
    configs = {method: _config(tokenizer, method) for method in ("ssr_off", "ssr")}
    runs: dict[str, list[Run]] = {"plain": [], **{method: [] for method in configs}}
    for _ in range(REPEATS):
        runs["plain"].append(run_plain(model, ids, 0, configs["ssr"], tokenizer))
        for method, config in configs.items():
            runs[method].append(timed_generate(model, ids, 0, generation_config=config))
    return runs


def _figures(runs: list[Run]) -> dict:
    """Of the run of median time: what SSR drafts by default depends on the clock, so its runs differ."""
    run = sorted(runs, key=lambda each: each.seconds)[len(runs) // 2]
    metrics = {} if run.metrics is None else {"metrics": run.metrics.to_dict()}
    return {"forwards": run.forwards, "seconds": run.seconds, **metrics}


def block_cost(plain: list[Run], with_blocks: list[Run]) -> float | None:
    """What a forward over `BLOCK` tokens takes, in plain steps; `None` if there was none."""
    step = [seconds for run in plain for _, _, seconds in run.shapes[1:]]
    block = [s for run in with_blocks for rows, tokens, s in run.shapes[1:] if (rows, tokens) == (1, BLOCK)]
    return statistics.median(block) / statistics.median(step) if block else None


@contextlib.contextmanager
def _screen(console: Console, tokenizer, config: SSRConfig) -> Iterator[_Screen | None]:
    if not console.is_interactive:
        yield None
        return
    end_ids = {spelling[-1] for spelling in require_markers(config, tokenizer).end.spellings}
    with Live(console=console, refresh_per_second=15, transient=True) as live:  # both are shown whole afterwards
        yield _Screen(tokenizer, end_ids, live)


def _thought_and_draft(console: Console, thought: str, draft: str) -> Table:
    """Side by side where there is room."""
    panels = [Panel(Text(thought, "dim"), title=THINKS, border_style="dim")]
    if draft:
        panels.append(Panel(Text(draft, "green"), title=DRAFTS, border_style="dim"))
    grid = Table.grid(expand=True)
    if console.width < WIDE:
        for panel in panels:
            grid.add_row(panel)
    else:
        for _ in panels:
            grid.add_column(ratio=1)
        grid.add_row(*panels)
    return grid


def _sources_of_answer(run: Run) -> list[str]:
    return of_answer(sources_of(run.metrics.spans), run.metrics.thoughts)


def _answer_panel(tokenizer, run: Run) -> Panel:
    text = Text()
    for token, source in zip(of_answer(run.tokens, run.metrics.thoughts), _sources_of_answer(run), strict=True):
        text.append(tokenizer.decode([token], skip_special_tokens=True), style=SOURCES[source].style)
    text.rstrip()
    blank = len(text.plain) - len(text.plain.lstrip())
    return Panel(text[blank:], title="the answer, coloured by where each token came from")


def _legend(run: Run) -> Table:
    sources = _sources_of_answer(run)
    legend = Table.grid(padding=(0, 2))
    for source, (style, _, meaning) in SOURCES.items():
        count = sources.count(source)
        if count:
            legend.add_row(Text("■", style), f"{count}", f"{count / len(sources):.0%}", Text(meaning, style))
    return legend


def _of_stages(run: Run) -> str:
    metrics = run.metrics
    if not metrics.stages:
        return "The thought was too short for a fork."
    budgets = ", ".join(str(stage.draft_budget) for stage in metrics.stages)
    lengths = ", ".join(str(stage.draft_tokens) for stage in metrics.stages)
    from_draft = metrics.prefix_accepted + metrics.suffix_accepted["draft"]
    return (
        f"Forks after {budgets} of {metrics.thinking_tokens} tokens of thought drafted {lengths} tokens. "
        f"Drafts gave {from_draft} of the answer's {metrics.answer_tokens} tokens. "
        f"{metrics.thinking_accepted_tokens} tokens of the thought repeated earlier text, and were read in blocks too."
    )


def _table(report: dict) -> Table:
    table = Table(title="in brackets: times less than plain", title_justify="left")
    table.add_column("")
    for name in ("plain\ngenerate", "SSR if forwards\ncost the same", "SSR by default,\nhere"):
        table.add_column(name, justify="right")
    plain, *others = (report[method] for method in ("plain", "ssr_off", "ssr"))
    for name, key, form in (("forwards of the model", "forwards", "d"), (SECONDS, "seconds", ".2f")):
        ratios = [f"{other[key]:{form}} ({plain[key] / other[key]:.2f}x)" for other in others]
        table.add_row(name, f"{plain[key]:{form}}", *ratios)
    same = "yes" if report["same_tokens"] else "NO"
    table.add_row("same tokens", "", same, same)
    table.add_row("answer right", *["yes" if report["answer_right"] else "no"] * 3)
    return table


def _why_they_differ(cost: float | None) -> str:
    taken = "more than one plain step" if cost is None else f"{cost:.1f} plain steps"
    return (
        f"They differ because a forward over {BLOCK} tokens takes {taken} on this machine, measured in this run: the "
        'middle one, shown above, drafts whatever may save a forward (max_overhead="off"), the default only what pays.'
    )
