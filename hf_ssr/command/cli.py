"""The `hf-ssr` command: answer a prompt with SSR, show what it does, measure it, or export it for the Hub."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from ..bench import arguments as measuring
from ..running.parsing import Parser, fail
from ..version import check_transformers
from .exporting import add_export_arguments
from .options import add_chat_arguments, add_prompt_arguments, check_chat_arguments, check_prompt_arguments


class Command(NamedTuple):
    """
    A row of the table below.

    Args:
        description (`str`): what it does.
        add_arguments (`Callable`): gives a parser what it takes.
        run (`str`): module and function, imported when its arguments have been found right: torch takes seconds.
        check (`Callable`): looks at its arguments as a whole, before that.
    """

    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: str
    check: Callable[[argparse.Namespace], object] = lambda arguments: None


PROMPT = Command(
    "Answer a prompt with a reasoning model. While it thinks, a fork of it drafts the answer, which the model then "
    "verifies: the tokens are those of plain generate, in fewer forwards. The thought goes to stderr, the answer to "
    "stdout.",
    add_prompt_arguments,
    "command.answering:answer_command",
    check_prompt_arguments,
)
SUBCOMMANDS = {
    "chat": Command(
        "Talk with a reasoning model. What it has read stays in the cache from turn to turn. Ctrl-C while it thinks "
        "means: answer now; once more stops the answer and keeps the chat.",
        add_chat_arguments,
        "command.chat:chat_command",
        check_chat_arguments,
    ),
    "demo": Command(
        "Show SSR at work on a small reasoning model that comes with hf-ssr: while it thinks, a fork of it drafts the "
        "answer; then the model takes from the draft what it would have written itself.",
        measuring.add_demo_arguments,
        "bench.demo:demo_command",
    ),
    "bench": Command(
        "Plain generate, prompt lookup, suffix speculation and SSR on the same prompts:\nforwards, cost (forwards "
        "weighted by what they take), seconds, scores, and\nwhether the tokens are the same.",
        measuring.add_bench_arguments,
        "bench.command:bench_command",
        measuring.check_bench_arguments,
    ),
    "report": Command(
        "A bench as one page (report.html), as Markdown (report.md, plots/), and as a trace of its first prompts.",
        measuring.add_report_arguments,
        "bench.report:report_command",
        measuring.check_report_arguments,
    ),
    "whatif": Command(
        "The latency that the runs of a bench would have had where forwards take other\ntimes, beside the limits. "
        "Without preset or curve: at the bench's own step\ncosts, beside what was measured.",
        measuring.add_whatif_arguments,
        "bench.whatif:whatif_command",
        measuring.check_whatif_arguments,
    ),
    "probe": Command(
        "How exact is a model on this machine? Blocks, and two rows, against single steps, in bits, scores and tokens.",
        measuring.add_probe_arguments,
        "bench.probe:probe_command",
        measuring.check_probe_arguments,
    ),
    "export": Command(
        "Write SSR into a folder that transformers can load it from.",
        add_export_arguments,
        "command.exporting:export_command",
    ),
}
REPLAY = Command(
    "What texts that were recorded would have taken with SSR, without their model: tokens a forward, from each source.",
    measuring.add_replay_arguments,
    "bench.replay:replay_command",
    measuring.check_replay_arguments,
)
BATCHES = Command(
    "Plain generate and SSR on batches of prompts: forwards, what these read (rows x places), seconds, and whether the "
    "texts are the same.",
    measuring.add_batches_arguments,
    "bench.batches:batches_command",
    measuring.check_batches_arguments,
)
# options of `bench` that make another command of it
INSTEAD = {"--replay": ("--replay FILE", REPLAY), "--batch-size": ("--batch-size N,N", BATCHES)}


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    name, command = "hf-ssr", PROMPT
    if argv and argv[0] in SUBCOMMANDS:
        name, command = f"hf-ssr {argv[0]}", SUBCOMMANDS[argv[0]]
        options = [part.split("=")[0] for part in argv] if argv[0] == "bench" else []
        if found := next((option for option in INSTEAD if option in options), None):
            shown, command = INSTEAD[found]
            name = f"{name} {shown}"
        argv = argv[1:]
    parser = Parser(prog=name, description=command.description)
    command.add_arguments(parser)
    try:
        arguments = parser.parse_args(argv)
        command.check(arguments)
        return _function(command)(arguments)
    except KeyboardInterrupt:
        print("\nhf-ssr: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has what it wanted (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        fail(str(error))


def _function(command: Command) -> Callable[[argparse.Namespace], int]:
    """What the command runs."""
    check_transformers()
    module, _, function = command.run.partition(":")
    found = getattr(importlib.import_module(f"..{module}", __package__), function)
    if "transformers" in sys.modules and command is not PROMPT:  # that one decides for itself
        importlib.import_module("transformers.utils.logging").disable_progress_bar()
    return found


if __name__ == "__main__":
    raise SystemExit(main())
