"""`hf-ssr demo`: thought and draft side by side, the answer coloured by where it came from, and what was saved."""

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

from ..comparing import Run, prompt_ids, run_plain, timed_generate
from ..config import SSRConfig
from ..terminal import moving
from ..thinking import split_thinking
from .reasoner import load_reasoner
from .sources import SOURCES, of_answer, sources_of
from .tasks import HELD_OUT, TASKS, check, draw

MAX_NEW_TOKENS = 1500
REPEATS = 3
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

    def put(self, value: torch.LongTensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        for token in value.flatten().tolist():
            self._is_open = self._is_open and token not in self._end_ids
            if self._is_open:
                self._thought.append(token)
        self._live.update(self._panels())

    def put_draft(self, value: torch.LongTensor, **kwargs) -> None:
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr demo` takes."""
    tasks = "write a class with sorted fields, keep a ledger, or find a path (default class)"
    parser.add_argument("--task", choices=list(TASKS), default="class", help=tasks)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which task of that kind (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def demo_command(arguments: argparse.Namespace) -> int:
    """
    Runs the demo and prints it. Returns the exit status.

    Raises:
        `ValueError`: before it runs, for what does not fit.
    """
    if arguments.seed < 0:
        raise ValueError(f"--seed must be at least 0, but is {arguments.seed}")
    return run_demo(arguments.task, arguments.seed, arguments.json)


def run_demo(task: str, seed: int, as_json: bool) -> int:
    """Runs and prints it. Returns the exit status."""
    file = sys.stderr if as_json else sys.stdout
    console = Console(highlight=False, file=file, quiet=as_json, force_interactive=moving(file))
    sample = draw(task, HELD_OUT + seed)
    model, tokenizer = load_reasoner()
    ids = prompt_ids(tokenizer, sample.prompt)
    config = SSRConfig.from_tokenizer(
        tokenizer, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, return_dict_in_generate=True
    )
    console.print(Panel(sample.prompt, title=f"{task}, task {seed}: one that the model was not trained on"))
    with _screen(console, tokenizer, config) as streamer:
        ssr = timed_generate(model, ids, 0, generation_config=config, streamer=streamer)
    plain_runs, ssr_runs = [], []
    for _ in range(REPEATS):
        plain_runs.append(run_plain(model, ids, 0, config, tokenizer))
        ssr_runs.append(timed_generate(model, ids, 0, generation_config=config))
    plain = plain_runs[0]
    parts = split_thinking(ids[0].tolist() + ssr.tokens, config, ids.shape[1])
    texts = {
        name: tokenizer.decode(ids, skip_special_tokens=True) for name, ids in zip(parts._fields, parts, strict=True)
    }
    draft = tokenizer.decode(max((s.draft for s in ssr.metrics.stages), key=len, default=[]), skip_special_tokens=True)
    report = {
        "task": task,
        "seed": seed,
        "same_tokens": ssr.tokens == plain.tokens,
        "answer_right": check(sample, tokenizer.decode(parts.answer, skip_special_tokens=True)),
        "plain_forwards": plain.forwards,
        "ssr_forwards": ssr.forwards,
        "plain_seconds": statistics.median(run.seconds for run in plain_runs),
        "ssr_seconds": statistics.median(run.seconds for run in ssr_runs),
        "prompt": sample.prompt,
        **texts,
        "drafts": [tokenizer.decode(s.draft, skip_special_tokens=True) for s in ssr.metrics.stages],
        "metrics": ssr.metrics.to_dict(),
    }
    if as_json:
        print(json.dumps(report))
        return 0
    console.print(_thought_and_draft(console, texts["thought"], draft))
    console.print(_answer_panel(tokenizer, ssr))
    console.print(_legend(ssr))
    console.print(_table(report))
    console.print(_summary(ssr))
    return 0


@contextlib.contextmanager
def _screen(console: Console, tokenizer, config: SSRConfig) -> Iterator[_Screen | None]:
    if not console.is_interactive:
        yield None
        return
    ends = config.thinking_end
    end_ids = {ids[-1] for ids in (ends if isinstance(ends[0], list) else [ends])}
    with Live(console=console, refresh_per_second=15, transient=True) as live:  # both are shown whole afterwards
        yield _Screen(tokenizer, end_ids, live)


def _thought_and_draft(console: Console, thought: str, draft: str) -> Table:
    """Side by side where there is room."""
    panels = [Panel(Text(thought, "dim"), title=THINKS, border_style="dim")]
    if draft:
        panels.append(Panel(Text(draft, "green"), title=f"{DRAFTS} (the longest draft)", border_style="dim"))
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


def _table(report: dict) -> Table:
    table = Table(title_justify="left")
    table.add_column("")
    for name in ("plain generate", "SSR", "ratio"):
        table.add_column(name, justify="right")
    plain, ssr = report["plain_forwards"], report["ssr_forwards"]
    table.add_row("forwards of the model", f"{plain}", f"{ssr}", f"{plain / ssr:.2f}x")
    plain, ssr = report["plain_seconds"], report["ssr_seconds"]
    table.add_row(f"seconds (median of {REPEATS})", f"{plain:.2f}", f"{ssr:.2f}", f"{plain / ssr:.2f}x")
    table.add_row("same tokens", "", "yes" if report["same_tokens"] else "NO", "")
    table.add_row("answer right", "", "yes" if report["answer_right"] else "no", "")
    return table


def _summary(run: Run) -> str:
    metrics = run.metrics
    from_draft = metrics.prefix_accepted + metrics.suffix_accepted["draft"]
    stages = [f"{stage.draft_tokens} tokens after {stage.draft_budget}" for stage in metrics.stages]
    if len(stages) > 3:
        stages = [stages[0], f"... {len(stages)} times in all ...", stages[-1]]
    drafted = (
        f"Meanwhile a fork of it closed the thought early and drafted the answer: {', '.join(stages)}."
        if stages
        else "No fork of it drafted the answer: the thought was too short, or it did not promise to pay here."
    )
    repeated = f" {metrics.thinking_accepted_tokens} of these repeated what stood there before." * (
        metrics.thinking_accepted_tokens > 0
    )
    return (
        f"The model thought for {metrics.thinking_tokens} tokens.{repeated} {drafted} "
        f"Then the model checked what was proposed, many tokens in a forward: "
        f"{metrics.accepted_tokens} of the answer's {metrics.answer_tokens} tokens it did not have to write one by "
        f"one, {from_draft} of them from drafts; the others repeated what stood there before. What it says is what it "
        "would have said alone. How much is proposed depends on what forwards are measured to cost here, so counts "
        "differ from run to run."
    )
