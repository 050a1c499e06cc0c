"""`hf-ssr bench`: methods side by side on the same prompts, each run counted, timed and scored."""

import gc
import signal
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..config import SSRConfig
from ..running.comparing import Run, agreeing, difference_between, timed_generate
from ..running.terminal import handling, moving
from ..thinking import split_thinking
from .methods import ORACLE, arguments_of
from .records import RUNS, SAMPLES, Record, append_lines, parts_of, read_lines, read_records, write_lines
from .suite import MAY_PUBLISH, Item, score

WARM_UP_TOKENS = 128
LOOP_TOKENS = 128  # that a text repeats at its end, at least, to be called a loop
LONGEST_PERIOD = 32


@dataclass
class Prompt:
    """
    One prompt of a task.

    Args:
        task (`str`): that it belongs to.
        name (`str`): which of these.
        ids (`torch.LongTensor` of shape `(1, prompt_length)`): what the model is given.
        item ([`Item`], *optional*): to score the answer by.
    """

    task: str
    name: str
    ids: torch.Tensor
    item: Item | None = None


@dataclass
class _Group:
    """The runs of all methods on a prompt: those that are done, and which of these are written."""

    prompt: Prompt
    repeat: int
    is_sample: bool
    runs: dict[str, "Run | str"] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    scores: dict[tuple, float | None] = field(default_factory=dict)  # of texts, which are mostly the same


@dataclass
class Bench:
    """
    What runs, and how.

    Args:
        model (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): what runs.
        methods (`list[str]`): of `METHODS`; `"plain"` is run in any case.
        repeats (`int`): of everything.
        common, ssr (`dict`): settings of `generate`, and of SSR: the markers.
        rank, ranks (`int`): which process this is, and of how many: each takes its share of the prompts.
    """

    model: Any
    tokenizer: Any
    methods: list[str]
    repeats: int
    common: dict[str, Any]
    ssr: dict[str, Any]
    rank: int = 0
    ranks: int = 1

    def __post_init__(self):
        self.methods = ["plain", *(method for method in self.methods if method != "plain")]

    def run(self, prompts: list[Prompt], out: Path) -> bool:
        """
        Runs every method on every prompt, in turn, so that a machine that grows slower does so for all. Each run is
        written when it is done, those before plain with it, to which all are compared; an interrupt keeps what is done.

        Args:
            prompts (`list[Prompt]`): what to run on; those that `out` holds runs of are left out.
            out (`Path`): the folder.

        Returns:
            `bool`: whether all was run.

        Raises:
            `OSError`: if a run cannot be written; those before it are kept.
        """
        done = {record.key for record in read_records(out / RUNS)}
        todo = [(repeat, prompt) for repeat in range(self.repeats) for prompt in prompts]
        todo = [each for each in todo if (each[1].task, each[1].name, each[0]) not in done][self.rank :: self.ranks]
        first = {prompt.task: prompt.name for prompt in reversed(prompts)}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True, quiet=self.rank > 0, force_terminal=moving(sys.stderr))
        with Progress(*columns, console=console) as bar, handling(signal.default_int_handler):
            shown = bar.add_task("warm-up", total=len(todo) * len(self.methods))
            try:
                if todo:
                    self._warm_up(todo[0][1])
                for place, (repeat, prompt) in enumerate(todo):
                    group = _Group(prompt, repeat, is_sample=repeat == 0 and first[prompt.task] == prompt.name)
                    for method in self._turn(place + repeat):
                        bar.update(shown, description=f"{prompt.task} {prompt.name} {method}")
                        group.runs[method] = self._run(method, prompt, repeat, group.runs)
                        bar.advance(shown)
                        if "plain" in group.runs:
                            self._write(out, group)
            except KeyboardInterrupt:
                kept = len(read_records(out / self._mine(RUNS)))
                bar.console.print(f"interrupted: {kept} runs are kept, and `--resume` goes on")
                return False
        return True

    def _write(self, out: Path, group: "_Group") -> None:
        """What is new of the runs on a prompt; plain is among those that are done."""
        new = [method for method in self.methods if method in group.runs and method not in group.written]
        append_lines(out / self._mine(RUNS), self._records(group, new))
        if group.is_sample:
            append_lines(out / self._mine(SAMPLES), self._samples(group, new))
        group.written.update(new)

    def _mine(self, name: str) -> str:
        return name if self.ranks == 1 else f"{self.rank}-{name}"

    def _warm_up(self, prompt: Prompt) -> None:
        """Caches, kernels, and what SSR measures."""
        short = {**self.common, "max_new_tokens": min(WARM_UP_TOKENS, self.common["max_new_tokens"])}
        markers = {name: value for name, value in self.ssr.items() if name != "thinking_budget"}
        for method in self.methods:
            arguments = arguments_of(method, short, self.tokenizer, markers, prompt.ids.shape[1])
            timed_generate(self.model, prompt.ids, 0, **arguments)

    def _turn(self, place: int) -> list[str]:
        """Each method goes first as often as any other; who must know the answer, last."""
        turn = [self.methods[(place + i) % len(self.methods)] for i in range(len(self.methods))]
        return sorted(turn, key=lambda method: method == ORACLE)

    def _run(self, method: str, prompt: Prompt, repeat: int, runs: dict[str, Any]) -> "Run | str":
        answer = None
        if method == ORACLE and isinstance(runs["plain"], Run):
            answer = self._parts(prompt, runs["plain"]).answer
        arguments = arguments_of(method, self.common, self.tokenizer, self.ssr, prompt.ids.shape[1], answer)
        device = prompt.ids.device
        before = _held(device)
        try:
            run: Run | str = timed_generate(self.model, prompt.ids, repeat, **arguments)
        except torch.OutOfMemoryError as error:
            run = f"out of memory: {str(error).splitlines()[0]}"
            gc.collect()
        if before is not None and isinstance(run, Run):
            run.peak_memory = torch.cuda.max_memory_allocated(device) - before
        return run

    def _parts(self, prompt: Prompt, run: Run):
        config = SSRConfig(**self.ssr)
        return split_thinking(prompt.ids[0].tolist() + run.tokens, config, prompt.ids.shape[1], self.tokenizer)

    def _records(self, group: "_Group", methods: list[str]) -> Iterator[Record]:
        prompt, repeat, runs, scores = group.prompt, group.repeat, group.runs, group.scores
        plain = runs["plain"]
        step = statistics.fmean(s for _, _, s in plain.shapes[1:] or plain.shapes) if isinstance(plain, Run) else None
        for method in methods:
            run = runs[method]
            record = Record(prompt.task, prompt.name, method, repeat)
            if isinstance(run, str):
                record.error = run
                yield record
                continue
            parts = self._parts(prompt, run)
            record.tokens, record.thinking_tokens = len(run.tokens), len(run.tokens) - len(parts.answer)
            record.forwards, record.seconds = run.forwards, run.seconds
            record.fed_tokens = sum(rows * tokens for rows, tokens, _ in run.shapes[1:])
            record.prefill_seconds = run.shapes[0][2]
            for rows, tokens, seconds in run.shapes[1:]:
                shape = record.shapes.setdefault(f"{rows}x{tokens}", [0, 0.0])
                shape[0], shape[1] = shape[0] + 1, shape[1] + seconds
            record.cost = sum(seconds for _, _, seconds in run.shapes[1:]) / step if step else None
            record.loops = loops(run.tokens) and len(run.tokens) >= self.common["max_new_tokens"]
            record.peak_memory = run.peak_memory
            if run.metrics is not None:
                record.metrics = run.metrics.to_dict()
                record.overlaps = [
                    [stage.draft_budget, *overlap(stage.draft, parts.answer)] for stage in run.metrics.stages
                ]
            if isinstance(plain, Run):
                difference = difference_between(self.model, self.tokenizer, prompt.ids, run, plain)
                record.same_tokens = difference is None
                if difference is not None:
                    record.first_difference, record.margin = difference["position"], difference.get("margin")
            if prompt.item is not None:
                text = tuple(parts.answer)
                if text not in scores:
                    answer = self.tokenizer.decode(parts.answer, skip_special_tokens=True)
                    scores[text] = score(prompt.item, answer)
                record.score = scores[text]
            yield record

    def _samples(self, group: "_Group", methods: list[str]) -> Iterator[dict[str, Any]]:
        """One prompt of a task written out, to look at: its tokens, where each came from, and every forward."""
        prompt = group.prompt
        for method in methods:
            if isinstance(run := group.runs[method], Run):
                pieces = [self.tokenizer.decode([token], skip_special_tokens=True) for token in run.tokens]
                metrics = run.metrics
                yield {
                    "task": prompt.task,
                    "prompt": prompt.name,
                    "method": method,
                    "pieces": pieces if MAY_PUBLISH.get(prompt.task, True) else [],
                    "thinking_tokens": len(run.tokens) - len(self._parts(prompt, run).answer),
                    "spans": metrics.spans if metrics is not None else [["model", len(pieces)]],
                    "timeline": metrics.timeline if metrics is not None else _timeline(run),
                }


def _timeline(run: Run) -> list[tuple]:
    """Of a run without SSR: one forward behind the other."""
    entries, at = [], 0.0
    for index, (rows, tokens, seconds) in enumerate(run.shapes):
        entries.append(("prefill" if index == 0 else "plain", rows, tokens, at, seconds))
        at += seconds
    return entries


def _held(device: torch.device) -> int | None:
    """Bytes that a GPU holds; its peak is counted from here."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def loops(tokens: list[int]) -> bool:
    """Whether the last tokens say the same again and again."""
    tail = tokens[-LOOP_TOKENS:]
    if len(tail) < LOOP_TOKENS:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LONGEST_PERIOD + 1))


def overlap(draft: list[int], answer: list[int]) -> tuple[float, float]:
    """The share of the answer that a draft gets right up to the first difference, and by runs in common."""
    if not answer:
        return 0.0, 0.0
    blocks = SequenceMatcher(None, draft, answer, autojunk=False).get_matching_blocks()
    return agreeing(draft, answer) / len(answer), sum(block.size for block in blocks) / len(answer)


def gather(out: Path, methods: list[str], order: list[tuple[str, str]]) -> None:
    """The runs of several processes in one file, in the order of the prompts."""
    places = {key: place for place, key in enumerate(order)}
    for name in (RUNS, SAMPLES):
        entries = [entry for path in parts_of(out, name) for entry in read_lines(path)]
        entries.sort(
            key=lambda e: (
                e.get("repeat", 0),
                places.get((e["task"], e["prompt"]), len(places)),
                methods.index(e["method"]),
            )
        )
        write_lines(out / name, entries)
        for path in parts_of(out, name)[1:]:
            path.unlink()
