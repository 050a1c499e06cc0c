"""The command line of `hf-ssr bench`."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..comparing import prompt_ids
from ..config import SSRConfig
from ..markers import resolved_settings
from .methods import METHODS
from .reasoner import load_reasoner
from .runner import Prompt, run_bench, summarize, table_of
from .tasks import HELD_OUT, TASKS, draw

WIDTH = 110  # columns of the table
DEFAULT_METHODS = "plain,prompt_lookup,suffix_only,ssr"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr bench` takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "methods:\n" + "\n".join(f"  {name:<16} {text}" for name, text in METHODS.items())
    parser.add_argument("--model", metavar="PATH_OR_ID", help="default: the small reasoner that comes with hf-ssr")
    parser.add_argument("--gguf-file", metavar="F", help="GGUF file in the model's folder or repository")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16; auto = as stored (default)")
    parser.add_argument("--device", default="cpu", help="where the model runs, e.g. cuda (default cpu)")
    tasks = f"of {', '.join(TASKS)}, with commas between (default: all; none beside --prompts)"
    parser.add_argument("--tasks", type=_names(TASKS), metavar="A,B", help=tasks)
    prompts = "JSON lines with `prompt` and, if you like, `task`, `name`, `prefill` (how the model's turn begins)"
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=prompts)
    parser.add_argument(
        "--methods",
        type=_names(METHODS),
        default=_names(METHODS)(DEFAULT_METHODS),
        metavar="A,B",
        help=f"see below (default {DEFAULT_METHODS})",
    )
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="prompts of each task (default 10)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of everything (default 1)")
    parser.add_argument("--max-new-tokens", type=int, default=2048, metavar="N", help="(default 2048)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 = greedy (default)")
    parser.add_argument("--thinking-start", metavar="TEXT", help="opens a thought (default: detected; '' = at once)")
    parser.add_argument("--thinking-end", metavar="TEXT", help="closes a thought (default: detected)")
    parser.add_argument("--threads", type=int, metavar="N", help="of PyTorch on a CPU")
    parser.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="results (default bench)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object, last on stdout")


def _names(known):
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def bench_command(arguments: argparse.Namespace) -> int:
    """
    Runs the bench and prints its table. Returns the exit status.

    Raises:
        `ValueError`, `OSError`: before the first run, for what does not fit.
    """
    for name in ("limit", "repeats", "max_new_tokens"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, but is {getattr(arguments, name)}.")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    model, tokenizer = _load(arguments)
    prompts = _prompts(arguments, tokenizer, model.device)
    markers = {"thinking_start": arguments.thinking_start, "thinking_end": arguments.thinking_end}
    if markers["thinking_start"] == "":
        markers["thinking_start"] = []
    ssr = resolved_settings(SSRConfig(**markers), tokenizer)
    common: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    if arguments.temperature > 0:
        common["temperature"] = arguments.temperature
    records = run_bench(model, tokenizer, prompts, arguments.methods, arguments.repeats, common, ssr, arguments.out)
    summary = summarize(records)
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console = Console(highlight=False, stderr=arguments.json, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    console.print(table_of(summary))
    console.print(
        f"{len(records)} runs in {arguments.out / 'runs.jsonl'}. 'x': totals of plain / totals here; worst: of one "
        "prompt, in seconds.\n"
        f"{model.config.model_type}, {str(model.dtype).removeprefix('torch.')}, {model.device}, "
        f"{torch.get_num_threads()} threads, batch size 1, "
        f"{'greedy' if not common['do_sample'] else f'temperature {arguments.temperature}'}."
    )
    if arguments.json:
        print(json.dumps(summary))
    return 0


def _load(arguments: argparse.Namespace):
    if arguments.model is None:
        model, tokenizer = load_reasoner()
    else:
        gguf = {"gguf_file": arguments.gguf_file} if arguments.gguf_file else {}
        dtype = "float32" if arguments.gguf_file and arguments.dtype == "auto" else arguments.dtype
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, **gguf)
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, **gguf).eval()
    return model.to(arguments.device), tokenizer


def _prompts(arguments: argparse.Namespace, tokenizer, device) -> list[Prompt]:
    prompts = []
    for task in arguments.tasks if arguments.tasks is not None else [] if arguments.prompts else TASKS:
        for seed in range(arguments.limit):
            ids = prompt_ids(tokenizer, draw(task, HELD_OUT + seed).prompt)
            prompts.append(Prompt(task, str(seed), ids.to(device)))
    if arguments.prompts is not None:
        counts: dict[str, int] = {}
        for number, line in enumerate(arguments.prompts.read_text().splitlines()):
            entry = json.loads(line)
            if "prompt" not in entry:
                raise ValueError(f"--prompts {arguments.prompts}: line {number + 1} has no `prompt`.")
            task = entry.get("task", arguments.prompts.stem)
            counts[task] = counts.get(task, 0) + 1
            if counts[task] <= arguments.limit:
                ids = prompt_ids(tokenizer, entry["prompt"], entry.get("prefill", ""))
                prompts.append(Prompt(task, str(entry.get("name", number)), ids.to(device)))
    if not prompts:
        raise ValueError("there is nothing to run: name some --tasks, or give --prompts.")
    return prompts
