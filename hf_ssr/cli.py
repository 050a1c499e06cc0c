"""The `hf-ssr` command: answer a prompt with SSR, show what it does, measure it, or export it for the Hub."""

import argparse
import os
import sys
from collections.abc import Callable

from transformers.utils import logging

from .answering import answer_command
from .bench import command, demo, probe, replay, report, whatif
from .chat import add_arguments as chat_arguments
from .chat import chat_command
from .generate import generate as _registered  # noqa: F401  registers the generation mode
from .hub import card_names, export
from .terminal import Parser, fail


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv and argv[0] in SUBCOMMANDS:
            is_replay = argv[0] == "bench" and any(part.split("=")[0] == "--replay" for part in argv)
            name = "bench --replay FILE" if is_replay else argv[0]
            return _run(name, argv[1:], *(REPLAY if is_replay else SUBCOMMANDS[argv[0]]))
        return answer_command(argv)
    except KeyboardInterrupt:
        print("\nhf-ssr: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has what it wanted (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(
    name: str,
    argv: list[str],
    description: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> int:
    parser = Parser(prog=f"hf-ssr {name}", description=description)
    add_arguments(parser)
    logging.disable_progress_bar()
    try:
        return run(parser.parse_args(argv))
    except (ValueError, OSError) as error:
        fail(str(error))


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="new, or with a model in it: custom_generate/ is written or replaced, README.md added if there is none",
    )
    parser.add_argument("--card", metavar="NAME", help=f"its README.md: one of {', '.join(card_names())}")


def _export(arguments: argparse.Namespace) -> int:
    written = export(arguments.folder, arguments.card)
    print(f"{len(written)} files written to {arguments.folder}")
    print(
        f"use: model.generate(**inputs, custom_generate={arguments.folder!r}, trust_remote_code=True, "
        "tokenizer=tokenizer)"
    )
    return 0


SUBCOMMANDS = {
    "chat": (
        "Talk with a reasoning model. What it has read stays in the cache from turn to turn. Ctrl-C while it thinks "
        "means: answer now; once more stops the answer and keeps the chat.",
        chat_arguments,
        chat_command,
    ),
    "demo": (
        "Show SSR at work on a small reasoning model that comes with hf-ssr: while it thinks, a fork of it drafts the "
        "answer; then the model takes from the draft what it would have written itself.",
        demo.add_arguments,
        demo.demo_command,
    ),
    "bench": (
        "Plain generate, prompt lookup, suffix speculation and SSR on the same prompts:\nforwards, cost (forwards "
        "weighted by what they take), seconds, scores, and\nwhether the tokens are the same.",
        command.add_arguments,
        command.bench_command,
    ),
    "report": (
        "A bench as one page (report.html), as Markdown (report.md, plots/), and as a trace of its first prompts.",
        report.add_arguments,
        report.report_command,
    ),
    "whatif": (
        "The latency that the runs of a bench would have had where forwards take other\ntimes, beside the limits. "
        "Without preset or curve: at the bench's own step\ncosts, beside what was measured.",
        whatif.add_arguments,
        whatif.whatif_command,
    ),
    "probe": (
        "How exact is a model on this machine? Blocks, and two rows, against single steps, in bits, scores and tokens.",
        probe.add_arguments,
        probe.probe_command,
    ),
    "export": ("Write SSR into a folder that transformers can load it from.", _export_arguments, _export),
}
REPLAY = (
    "What texts that were recorded would have taken with SSR, without their model: tokens a forward, from each source.",
    replay.add_arguments,
    replay.replay_command,
)


if __name__ == "__main__":
    raise SystemExit(main())
