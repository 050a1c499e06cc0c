"""`hf-ssr bench`: what is loaded and prepared, and what is printed at its end."""

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

from ..config import SSRConfig
from ..markers import resolved_settings
from ..running.comparing import prompt_ids
from ..running.loading import load_model, load_tokenizer
from ..version import __version__, commit
from .int8 import parameters_of, to_int8
from .records import (
    RUNS,
    SAMPLES,
    SETTINGS,
    check_settings,
    parts_of,
    read_records,
    samples_of,
    whole_groups,
    write_lines,
    write_text,
)
from .runner import Bench, Prompt, gather
from .summary import summarize, table_of

WIDTH = 120  # columns of the table


def bench_command(arguments: argparse.Namespace) -> int:
    """
    Runs the bench and prints its table. Returns the exit status.

    Raises:
        `ValueError`, `OSError`: before the first run, for what does not fit; later, if a file cannot be written.
    """
    state = PartialState(cpu=arguments.device == "cpu") if "WORLD_SIZE" in os.environ else None
    if state is not None and arguments.device != "cpu":
        arguments.device = str(state.device)
    model, tokenizer = model_of(arguments)
    prompts = _prompts(arguments, tokenizer, model.device)
    markers = {name: getattr(arguments, name) for name in ("thinking_start", "thinking_end", "forced_close")}
    if markers["thinking_start"] == "":
        markers["thinking_start"] = []
    ssr: dict[str, Any] = resolved_settings(SSRConfig(**markers), tokenizer)
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
            gather(arguments.out, bench.methods, [(prompt.task, prompt.name) for prompt in prompts])
        state.destroy_process_group()
    if bench.rank == 0:
        _report(arguments, model, common)
    return 0 if is_whole else 130


def _report(arguments: argparse.Namespace, model, common: dict[str, Any]) -> None:
    records = read_records(arguments.out / RUNS)
    summary = summarize(records)
    write_text(arguments.out / "summary.json", json.dumps(summary, indent=2) + "\n")
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
    for task, name, text, prefill, item in arguments.texts:
        ids = prompt_ids(tokenizer, arguments.instruction + text, prefill or arguments.prefill)
        prompts.append(Prompt(task, name, ids.to(device), item))
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
    """The folder, empty, or with the prompts that are done; a prompt that is not is run again by every method."""
    out, records, samples = arguments.out, [], []
    if arguments.resume:
        check_settings(out, settings)
        records = whole_groups([record for path in parts_of(out, RUNS) for record in read_records(path)], methods)
        done = {(record.task, record.prompt) for record in records}
        samples = [entry for entry in samples_of(out) if (entry["task"], entry["prompt"]) in done]
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / RUNS, records)
    write_lines(out / SAMPLES, samples)
    if not arguments.resume:
        write_text(out / SETTINGS, json.dumps(settings, indent=2) + "\n")
    for name in (RUNS, SAMPLES):
        for path in parts_of(out, name)[1:]:
            path.unlink()
