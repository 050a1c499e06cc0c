"""
What the commands that measure and show take, and what of it does not fit.

Neither torch nor transformers is imported here: help, and errors in what was typed, need not wait for them.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ..running.loading import check_model, source_of
from ..running.parsing import HelpAsWritten, add_model_arguments, integer, integers, names, number, text_file
from .methods import METHODS
from .results import check_folder, check_out
from .suite import MOST_GENERATED, SUITE, texts_of
from .tasks import TASKS

DEFAULT_METHODS = "plain,prompt_lookup,suffix_only,ssr"
LEAST_STEPS = 128  # of `probe`: fewer say too little
WIDTHS = (2, 4, 8, 16, 32)  # of `probe`: tokens of a block
STEP = 0.025  # of `whatif`: seconds of a plain step, under a preset
MOST_THREADS = 4096
# Of `whatif`: seconds of a forward over `rows` x `tokens` in plain steps; shapes to think with, not measurements.
PRESETS: dict[str, tuple[str, Callable[[int, int], float]]] = {
    "cpu": ("16 tokens take two plain steps", lambda rows, tokens: 1 + 0.065 * (rows * tokens - 1)),
    "gpu-launch-bound": ("small model on a GPU: 64 tokens take one", lambda r, t: max(1, r * t / 64)),
    "gpu-bandwidth-bound": (
        "large dense model on a GPU: each token adds 0.4 %",
        lambda rows, tokens: 1 + 0.004 * (rows * tokens - 1),
    ),
}


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """How the model is loaded, and on what it runs."""
    add_model_arguments(parser)
    parser.add_argument("--int8", action="store_true", help="weights of linear layers rounded to 8 bits (on a CPU)")
    parser.add_argument("--threads", type=integer(1, MOST_THREADS), metavar="N", help="of PyTorch on a CPU")


def _check_machine(arguments: argparse.Namespace) -> None:
    check_model(arguments)
    if arguments.int8 and arguments.device.split(":")[0] != "cpu":
        raise ValueError(f"--int8 is for a CPU, but --device is {arguments.device}.")


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr demo` takes."""
    tasks = "write a class with sorted fields, keep a ledger, or find a path (default class)"
    parser.add_argument("--task", choices=list(TASKS), default="class", help=tasks)
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help="which task of that kind (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--tasks", type=names(SUITE), metavar="A,B", help=tasks)
    data = "folder with the data of public benchmarks: all tasks but class, ledger and path need it"
    parser.add_argument("--data", type=Path, metavar="DIR", help=data)
    prompts = "JSON lines with `prompt` and, if you like, `task`, `name`, `prefill` (how the model's turn begins)"
    parser.add_argument("--prompts", type=text_file, metavar="FILE", help=prompts)
    parser.add_argument("--instruction", default="", metavar="TEXT", help="put before each prompt")
    parser.add_argument("--prefill", default="", metavar="TEXT", help="how the model's turn begins, e.g. '<think>'")
    methods = f"see below (default {DEFAULT_METHODS})"
    parser.add_argument(
        "--methods", type=names(METHODS), default=DEFAULT_METHODS.split(","), metavar="A,B", help=methods
    )
    limit = f"prompts of each task (default 10; at most {MOST_GENERATED} of class, ledger and path each)"
    parser.add_argument("--limit", type=integer(1, most=None), default=10, metavar="N", help=limit)
    parser.add_argument("--repeats", type=integer(1), default=1, metavar="N", help="of everything (default 1)")
    parser.add_argument("--max-new-tokens", type=integer(1), default=2048, metavar="N", help="(default 2048)")
    sampling = parser.add_mutually_exclusive_group()
    sampling.add_argument("--temperature", type=number(0), default=0.0, metavar="T", help="0 = greedy (default)")
    sampling.add_argument("--sample", action="store_true", help="as the model's generation_config.json recommends")
    parser.add_argument("--thinking-start", metavar="TEXT", help="opens a thought (default: detected; '' = at once)")
    parser.add_argument("--thinking-end", metavar="TEXT", help="closes a thought (default: detected)")
    parser.add_argument("--thinking-budget", type=integer(0), metavar="N", help="most thinking tokens, in every method")
    parser.add_argument("--forced-close", metavar="TEXT", help="appended when a thought is cut (default: detected)")
    parser.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="results (default bench)")
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--resume", action="store_true", help="go on with the bench in --out where it stopped")
    before.add_argument("--overwrite", action="store_true", help="replace the bench in --out")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object, last on stdout")
    parser.add_argument("--replay", metavar="FILE", help="recorded texts, no model: has options of its own")
    parser.add_argument("--batch-size", metavar="N,N", help="batches of prompts: has options of its own")


def check_bench_arguments(arguments: argparse.Namespace) -> None:
    """
    Looks at what `hf-ssr bench` was given as a whole, and draws or reads its prompts into `arguments.texts`.

    Raises:
        `ValueError`: for what does not fit.
    """
    _check_machine(arguments)
    check_out(arguments.out, arguments.resume, arguments.overwrite)
    tasks = arguments.tasks if arguments.tasks is not None else [] if arguments.prompts else list(TASKS)
    arguments.texts = texts_of(tasks, arguments.limit, arguments.data, arguments.prompts)


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr bench --replay` takes."""
    texts = "JSON lines with `prompt`, `thought`, `answer` and, if you like, `task`, `name`, `drafts`"
    parser.usage = "%(prog)s [options]"  # `prog` has the one option that is needed
    parser.add_argument("--replay", type=text_file, metavar="FILE", required=True, help=texts)
    default = "of the model that wrote them (default: of the small reasoner that comes with hf-ssr)"
    parser.add_argument("--tokenizer", metavar="PATH_OR_ID", help=default)
    parser.add_argument("--limit", type=integer(1, most=None), metavar="N", help="texts of each task (default: all)")
    most = "most draft tokens in a forward (default 16)"
    parser.add_argument("--num-draft-tokens", type=integer(1), default=16, metavar="N", help=most)
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object, last on stdout")


def check_replay_arguments(arguments: argparse.Namespace) -> None:
    """
    Whether the tokenizer that was asked for is there. Sets `arguments.source`, as `check_model` does.

    Raises:
        `ValueError`: if not.
    """
    name = arguments.tokenizer
    arguments.source = None if name is None else source_of("--tokenizer", name, "tokenizer_config.json")


def add_batches_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr bench --batch-size` takes."""
    parser.usage = "%(prog)s [options]"  # `prog` has the one option that is needed
    rule = "integers of at least 2 with commas between"
    parser.add_argument("--batch-size", type=integers(rule, 2), metavar="N,N", required=True, help="prompts at once")
    parser.add_argument("--model", metavar="PATH_OR_ID", help="default: the small reasoner that comes with hf-ssr")
    add_machine_arguments(parser)
    tasks = f"of {', '.join(SUITE)}, with commas between (default: class; none beside --prompts)"
    parser.add_argument("--tasks", type=names(SUITE), metavar="A,B", help=tasks)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the data of public benchmarks")
    prompts = "JSON lines with `prompt` and, if you like, `task`, `name`, `prefill`"
    parser.add_argument("--prompts", type=text_file, metavar="FILE", help=prompts)
    limit = "prompts of each task (default 24)"
    parser.add_argument("--limit", type=integer(1, most=None), default=24, metavar="N", help=limit)
    parser.add_argument("--max-new-tokens", type=integer(1), default=2048, metavar="N", help="(default 2048)")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object, last on stdout")


def check_batches_arguments(arguments: argparse.Namespace) -> None:
    """
    Looks at what `hf-ssr bench --batch-size` was given as a whole, and draws or reads its prompts into
    `arguments.texts`.

    Raises:
        `ValueError`: for what does not fit.
    """
    _check_machine(arguments)
    tasks = arguments.tasks if arguments.tasks is not None else [] if arguments.prompts else ["class"]
    arguments.texts = texts_of(tasks, arguments.limit, arguments.data, arguments.prompts)
    counts = Counter(task for task, *_ in arguments.texts)
    most, task = max(arguments.batch_size, default=0), min(counts, key=counts.__getitem__)
    if not most or counts[task] < most:
        value = f"is {most}, and {task} has {counts[task]}" if most else "is empty"
        raise ValueError(f"--batch-size must be at most the prompts of each task (--limit), but {value}.")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr report` takes."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="results of hf-ssr bench")
    trace = "write every forward of the first prompt of each task, for chrome://tracing or Perfetto"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=trace)


def check_report_arguments(arguments: argparse.Namespace) -> None:
    """
    Whether there is a bench, and a place for the trace.

    Raises:
        `ValueError`: if there is none.
    """
    check_folder(arguments.folder)
    if arguments.trace is not None and not arguments.trace.resolve().parent.is_dir():
        raise ValueError(f"--trace {arguments.trace}: there is no folder {arguments.trace.parent}.")


def add_whatif_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr whatif` takes."""
    parser.formatter_class = HelpAsWritten
    parser.epilog = "presets, in plain steps:\n" + "\n".join(f"  {n:<20} {text}" for n, (text, _) in PRESETS.items())
    parser.add_argument("folder", type=Path, metavar="DIR", help="results of hf-ssr bench")
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument("--preset", choices=list(PRESETS), metavar="NAME", help="see below")
    curve = 'JSON: seconds by rows x tokens, e.g. {"1x1": 0.02, "1x16": 0.03, "2x1": 0.021}'
    costs.add_argument("--curve", type=text_file, metavar="FILE", help=curve)
    step = f"seconds of a plain step ({STEP})"
    parser.add_argument("--step", type=number(0, is_open=True), default=STEP, metavar="S", help=step)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def check_whatif_arguments(arguments: argparse.Namespace) -> None:
    """
    Whether there is a bench.

    Raises:
        `ValueError`: if there is none.
    """
    check_folder(arguments.folder)


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr probe` takes."""
    default = "a folder, or an id on the Hub (default: the small reasoner that comes with hf-ssr)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=default)
    add_machine_arguments(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="what to ask (default: a task of the small reasoner)")
    steps = f"tokens to compare, at least {LEAST_STEPS} (default {LEAST_STEPS})"
    parser.add_argument("--steps", type=integer(LEAST_STEPS), default=LEAST_STEPS, metavar="N", help=steps)
    widths, rule = (
        f"tokens of a block (default {','.join(map(str, WIDTHS))})",
        "integers of at least 2 with commas between",
    )
    parser.add_argument("--widths", type=integers(rule, 2), default=list(WIDTHS), metavar="N,N", help=widths)
    parser.add_argument("--json", action="store_true", help="print one JSON object, last on stdout")


def check_probe_arguments(arguments: argparse.Namespace) -> None:
    """
    Looks at what `hf-ssr probe` was given as a whole.

    Raises:
        `ValueError`: for what does not fit.
    """
    _check_machine(arguments)
    wrong = [width for width in arguments.widths if width > arguments.steps]
    if wrong or not arguments.widths:
        value = f"holds {wrong[0]}" if wrong else "is empty"
        raise ValueError(f"--widths must be from 2 to --steps ({arguments.steps}), but {value}.")
    if arguments.prompt is not None and not arguments.prompt.strip():
        raise ValueError("--prompt is empty: say what to ask.")
