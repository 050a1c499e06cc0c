"""The command line of `hf-ssr bench`."""

import argparse
import datetime
import json
import os
import platform
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from rich.console import Console

from ..comparing import prompt_ids
from ..config import SSRConfig
from ..loading import add_model_arguments, load_model, load_tokenizer
from ..markers import resolved_settings
from ..terminal import HelpAsWritten, existing_file
from ..version import __version__, commit
from .int8 import parameters_of, to_int8
from .methods import METHODS
from .records import RUNS, SAMPLES, SETTINGS, check_settings, read_lines, read_records, whole_groups, write_lines
from .runner import Bench, Prompt, gather
from .suite import SUITE, load
from .summary import summarize, table_of
from .tasks import TASKS

WIDTH = 120  # columns of the table
DEFAULT_METHODS = "plain,prompt_lookup,suffix_only,ssr"


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """How the model is loaded, and on what it runs."""
    add_model_arguments(parser)
    parser.add_argument("--int8", action="store_true", help="weights of linear layers rounded to 8 bits (on a CPU)")
    parser.add_argument("--threads", type=int, metavar="N", help="of PyTorch on a CPU")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr bench` takes."""
    parser.formatter_class = HelpAsWritten
    parser.epilog = "methods:\n" + "\n".join(f"  {name:<16} {text}" for name, text in METHODS.items())
    parser.epilog += (
        "\n\nSeveral GPUs share the prompts: accelerate launch -m hf_ssr bench ...\n"
        "(several processes on a CPU: torchrun --nproc-per-node N -m hf_ssr bench ...)"
    )
    parser.add_argument("--model", metavar="PATH_OR_ID", help="default: the small reasoner that comes with hf-ssr")
    add_machine_arguments(parser)
    tasks = f"of {', '.join(SUITE)}, with commas between (default: {','.join(TASKS)}; none beside --prompts)"
    parser.add_argument("--tasks", type=_names(SUITE), metavar="A,B", help=tasks)
    data = "folder with the data of public benchmarks: all tasks but class, ledger and path need it"
    parser.add_argument("--data", type=Path, metavar="DIR", help=data)
    prompts = "JSON lines with `prompt` and, if you like, `task`, `name`, `prefill` (how the model's turn begins)"
    parser.add_argument("--prompts", type=existing_file, metavar="FILE", help=prompts)
    parser.add_argument("--instruction", default="", metavar="TEXT", help="put before each prompt")
    parser.add_argument("--prefill", default="", metavar="TEXT", help="how the model's turn begins, e.g. '<think>'")
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
    sampling = parser.add_mutually_exclusive_group()
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 = greedy (default)")
    sampling.add_argument("--sample", action="store_true", help="as the model's generation_config.json recommends")
    parser.add_argument("--thinking-start", metavar="TEXT", help="opens a thought (default: detected; '' = at once)")
    parser.add_argument("--thinking-end", metavar="TEXT", help="closes a thought (default: detected)")
    parser.add_argument("--thinking-budget", type=int, metavar="N", help="most thinking tokens, in every method")
    parser.add_argument("--forced-close", metavar="TEXT", help="appended when a thought is cut (default: detected)")
    parser.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="results (default bench)")
    parser.add_argument("--resume", action="store_true", help="go on with the bench in --out where it stopped")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object, last on stdout")
    parser.add_argument("--replay", metavar="FILE", help="recorded texts, no model: has options of its own")


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
    state = PartialState(cpu=arguments.device == "cpu") if "WORLD_SIZE" in os.environ else None
    if state is not None and arguments.device != "cpu":
        arguments.device = str(state.device)
    model, tokenizer = model_of(arguments)
    prompts = _prompts(arguments, tokenizer, model.device)
    markers = {name: getattr(arguments, name) for name in ("thinking_start", "thinking_end", "forced_close")}
    if markers["thinking_start"] == "":
        markers["thinking_start"] = []
    ssr = resolved_settings(SSRConfig(**markers), tokenizer)
    if arguments.thinking_budget is not None:
        ssr["thinking_budget"] = SSRConfig(thinking_budget=arguments.thinking_budget).thinking_budget
    common = _sampling(arguments, model) | {"max_new_tokens": arguments.max_new_tokens}
    ranks = (0, 1) if state is None else (state.process_index, state.num_processes)
    bench = Bench(model, tokenizer, arguments.methods, arguments.repeats, common, ssr, *ranks)
    if bench.rank == 0:
        _prepare(arguments, _settings(arguments, bench, prompts), bench.methods)
    if state is not None:
        state.wait_for_everyone()
    is_whole = bench.run(prompts, arguments.out)
    if state is not None:
        state.wait_for_everyone()
        if bench.rank == 0:
            gather(arguments.out, bench.methods, bench.ranks, [(prompt.task, prompt.name) for prompt in prompts])
        state.destroy_process_group()
    if bench.rank == 0:
        _report(arguments, model, common)
    return 0 if is_whole else 130


def _report(arguments: argparse.Namespace, model, common: dict[str, Any]) -> None:
    records = read_records(arguments.out / RUNS)
    summary = summarize(records)
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console = Console(highlight=False, stderr=arguments.json, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    console.print(table_of(summary))
    console.print(
        f"{len(records)} runs in {arguments.out / RUNS}; forwards and seconds are sums over prompts and repeats. 'x': "
        "totals of plain / totals here,\nbut work (tokens read): here / plain. '95 %': of seconds x, by resampling "
        "prompts. worst: of one prompt, in seconds.\n"
        f"{model.config.model_type}, {str(model.dtype).removeprefix('torch.')}{' int8' * arguments.int8}, "
        f"{model.device}, {torch.get_num_threads()} threads, batch size 1, "
        f"{', '.join(f'{k} {v}' for k, v in common.items() if k != 'do_sample') if common['do_sample'] else 'greedy'}. "
        f"Plots: hf-ssr report {arguments.out}"
    )
    if arguments.json:
        print(json.dumps(summary))


def model_of(arguments: argparse.Namespace):
    """
    The model and the tokenizer that were asked for.

    Raises:
        `ValueError`, `OSError`: for what does not fit.
    """
    if arguments.int8 and torch.device(arguments.device).type != "cpu":
        raise ValueError(f"--int8 is for a CPU, but --device is {arguments.device}.")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    tokenizer, model = load_tokenizer(arguments), load_model(arguments)
    if arguments.int8:
        to_int8(model)
    return model, tokenizer


def _sampling(arguments: argparse.Namespace, model) -> dict[str, Any]:
    if arguments.sample:
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {name: getattr(model.generation_config, name, None) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        if not given:
            raise ValueError("--sample: this model's generation_config.json recommends nothing. Give --temperature.")
        return {"do_sample": True, **given}
    if arguments.temperature > 0:
        return {"do_sample": True, "temperature": arguments.temperature}
    return {"do_sample": False}


def _prompts(arguments: argparse.Namespace, tokenizer, device) -> list[Prompt]:
    prompts = []

    def add(task: str, name: str, text: str, prefill: str = "", item=None) -> None:
        ids = prompt_ids(tokenizer, arguments.instruction + text, prefill or arguments.prefill)
        prompts.append(Prompt(task, name, ids.to(device), item))

    for task in arguments.tasks if arguments.tasks is not None else [] if arguments.prompts else TASKS:
        for item in load(task, arguments.limit, arguments.data):
            add(task, item.name, item.prompt, item=item)
    if arguments.prompts is not None:
        counts: dict[str, int] = {}
        for number, line in enumerate(arguments.prompts.read_text().splitlines()):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"--prompts {arguments.prompts}: line {number + 1} is no JSON: {error}.") from None
            if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
                raise ValueError(f"--prompts {arguments.prompts}: line {number + 1} has no `prompt`.")
            task = entry.get("task", arguments.prompts.stem)
            counts[task] = counts.get(task, 0) + 1
            if counts[task] <= arguments.limit:
                add(task, str(entry.get("name", number)), entry["prompt"], entry.get("prefill", ""))
    if not prompts and arguments.prompts is not None:
        raise ValueError(f"--prompts {arguments.prompts} is empty: give a line of JSON with `prompt` for each.")
    if not prompts:
        raise ValueError("there is nothing to run: name some --tasks, or give --prompts.")
    return prompts


def _settings(arguments: argparse.Namespace, bench: Bench, prompts: list[Prompt]) -> dict[str, Any]:
    """What runs and on what: enough to tell whether a bench may be resumed, and to say what its figures are of."""
    device = torch.device(arguments.device)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    texts = json.dumps([[p.task, p.name, p.ids.tolist()] for p in prompts])
    return {
        "hf_ssr": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{machine}, threads: {torch.get_num_threads()}" if device.type == "cpu" else machine,
        "processes": bench.ranks,
        "model": arguments.model or "tiny-reasoner",
        "gguf_file": arguments.gguf_file,
        "dtype": str(bench.model.dtype).removeprefix("torch.") + " int8" * arguments.int8,
        "parameters": parameters_of(bench.model),
        "methods": bench.methods,
        "repeats": bench.repeats,
        "generation": bench.common,
        "thinking_end": bench.ssr.get("thinking_end"),
        "thinking_budget": bench.ssr.get("thinking_budget"),
        "forced_close": bench.ssr.get("forced_close"),
        "prompts": {task: sum(p.task == task for p in prompts) for task in dict.fromkeys(p.task for p in prompts)},
        "checksum": zlib.crc32(texts.encode()),
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    """As Linux tells it; elsewhere what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _prepare(arguments: argparse.Namespace, settings: dict[str, Any], methods: list[str]) -> None:
    """The folder, empty, or with the prompts that are done."""
    out = arguments.out
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder, but {out} is a file: name another.")
    old = len(read_records(out / RUNS)) if not arguments.resume and (out / RUNS).exists() else 0
    if old:
        Console(stderr=True).print(f"replacing {old} runs in {out}: add --resume to go on with a bench instead")
    if arguments.resume:
        check_settings(out, settings)
        parts = [out / RUNS, *sorted(out.glob(f"*-{RUNS}"))]  # of processes that were stopped before they were gathered
        records = whole_groups([record for path in parts for record in read_records(path)], methods)
        samples = [entry for path in [out / SAMPLES, *sorted(out.glob(f"*-{SAMPLES}"))] for entry in read_lines(path)]
    else:
        records, samples = [], []
    out.mkdir(parents=True, exist_ok=True)
    for pattern in (f"*-{RUNS}", f"*-{SAMPLES}"):
        for path in out.glob(pattern):
            path.unlink()
    write_lines(out / RUNS, records, "w")
    write_lines(out / SAMPLES, samples, "w")
    if not arguments.resume:
        (out / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
