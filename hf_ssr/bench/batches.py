"""`hf-ssr bench --batch-size 4,8`: plain `generate` and SSR on whole batches of prompts, which share their forwards."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..config import SSRConfig
from ..markers import resolved_settings
from ..running.comparing import Run, prompt_ids, timed_generate
from ..running.terminal import moving
from .command import WIDTH, model_of
from .methods import arguments_of

METHODS = ("plain", "ssr_off", "ssr")
WARM_UP_TOKENS = 128


@dataclass
class Total:
    """
    What a method took over some batches.

    Args:
        batches (`int`): how many.
        forwards, places (`int`): forwards, and what they read: rows x tokens; the prompts are not counted.
        seconds (`float`): of wall time.
        same (`int`): batches in which all texts are those of plain.
    """

    batches: int = 0
    forwards: int = 0
    places: int = 0
    seconds: float = 0.0
    same: int = 0

    def add(self, run: Run, is_same: bool) -> None:
        """One more batch."""
        self.batches += 1
        self.forwards += run.forwards
        self.places += sum(rows * tokens for rows, tokens, _ in run.shapes[1:])
        self.seconds += run.seconds
        self.same += is_same


def batches_of(prompts: Sequence[torch.Tensor], size: int, pad: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """
    Prompts by so many, padded on the left; what is left over is left out.

    Returns:
        Of each batch ids and mask, `torch.LongTensor` of shape `(size, prompt_length)`.
    """
    for begin in range(0, len(prompts) - size + 1, size):
        group = prompts[begin : begin + size]
        longest = max(ids.shape[1] for ids in group)
        padding = [(longest - ids.shape[1], 0) for ids in group]
        masks = [F.pad(torch.ones_like(ids), each) for ids, each in zip(group, padding, strict=True)]
        ids = [F.pad(ids, each, value=pad) for ids, each in zip(group, padding, strict=True)]
        yield torch.cat(ids), torch.cat(masks)


def batches_command(arguments: argparse.Namespace) -> int:
    """
    Runs and prints. Returns the exit status.

    Raises:
        `ValueError`, `OSError`: before the first run, for what does not fit.
    """
    model, tokenizer = model_of(arguments)
    tasks: dict[str, list[torch.Tensor]] = {}
    for task, _, text, prefill, _ in arguments.texts:
        tasks.setdefault(task, []).append(prompt_ids(tokenizer, text, prefill).to(model.device))
    ssr = resolved_settings(SSRConfig(), tokenizer)
    common = {"do_sample": False, "max_new_tokens": arguments.max_new_tokens}
    pad = next((id for id in (tokenizer.pad_token_id, tokenizer.eos_token_id) if id is not None), 0)
    work = [
        (task, size, *batch)
        for task, prompts in tasks.items()
        for size in arguments.batch_size
        for batch in batches_of(prompts, size, pad)
    ]

    def timed(method: str, ids: torch.Tensor, mask: torch.Tensor, **own: Any) -> Run:
        keywords = arguments_of(method, common | own, tokenizer, ssr, ids.shape[1])
        return timed_generate(model, ids, 0, attention_mask=mask, **keywords)

    totals: dict[str, dict[str, dict[str, Total]]] = {}
    warm: set[tuple[int, str]] = set()
    console = Console(stderr=True, force_terminal=moving(sys.stderr))
    for number, (task, size, ids, mask) in enumerate(track(work, "batches", console=console)):
        for method in METHODS:
            if (size, method) not in warm:
                warm.add((size, method))
                timed(method, ids, mask, max_new_tokens=min(WARM_UP_TOKENS, arguments.max_new_tokens))
        turn = [METHODS[(number + i) % len(METHODS)] for i in range(len(METHODS))]
        runs = {method: timed(method, ids, mask) for method in turn}
        of_size = totals.setdefault(task, {}).setdefault(str(size), {method: Total() for method in METHODS})
        for method, run in runs.items():
            of_size[method].add(run, run.tokens == runs["plain"].tokens)
    _print(arguments, model, totals)
    return 0


def table_of(totals: dict[str, dict[str, dict[str, Total]]]) -> Table:
    """A row for each task, size and method; against plain."""
    table = Table(title="batches, against plain generate")
    table.add_column("task")
    for name in ("size", "batches", "method", "same text", "forwards", "x", "rows x places", "seconds", "x"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for task, sizes in totals.items():
        for size, methods in sizes.items():
            plain = methods["plain"]
            for method, total in methods.items():
                table.add_row(
                    *(task, size, f"{total.batches}", method, f"{total.same} of {total.batches}"),
                    *(f"{total.forwards}", f"{plain.forwards / total.forwards:.2f}"),
                    *(f"{total.places / max(1, plain.places):.2f}", f"{total.seconds:.1f}"),
                    f"{plain.seconds / total.seconds:.2f}",
                )
        table.add_section()
    return table


def _print(arguments: argparse.Namespace, model, totals: dict[str, dict[str, dict[str, Total]]]) -> None:
    console = Console(highlight=False, stderr=arguments.json, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    console.print(table_of(totals))
    times = [run.seconds for sizes in totals.values() for methods in sizes.values() for run in methods.values()]
    console.print(
        "'x': totals of plain / totals here, but rows x places, what the forwards read: here / plain. A batch of plain "
        "takes as many forwards as its longest text.\n"
        f"{model.config.model_type}, {str(model.dtype).removeprefix('torch.')}{' int8' * arguments.int8}, "
        f"{model.device}, {torch.get_num_threads()} threads, greedy; {sum(times):.0f} s in all."
    )
    if arguments.json:
        tasks = {
            task: {size: {name: asdict(total) for name, total in methods.items()} for size, methods in sizes.items()}
            for task, sizes in totals.items()
        }
        print(json.dumps({"model": arguments.model or "tiny-reasoner", "tasks": tasks}))
