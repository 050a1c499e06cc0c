"""`hf-ssr PROMPT`: the thought to stderr, the answer to stdout; beside plain `generate` if asked for."""

import argparse
import json
import sys
from typing import Any

from transformers.utils import logging

from .comparing import Run, difference_between, print_comparison, prompt_ids, run_plain, run_ssr, warm_up
from .config import SSRConfig
from .loading import add_model_arguments, load_model, load_tokenizer
from .markers import resolve_markers
from .options import add_drafting_arguments, add_text_arguments, settings_of, settle_markers
from .terminal import Parser, existing_file, fail
from .thinking import split_thinking
from .version import __version__


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hf-ssr",
        usage="hf-ssr PROMPT [--model PATH_OR_ID] [options]\n       hf-ssr chat [--model PATH_OR_ID] [options]\n       "
        "hf-ssr demo\n       hf-ssr bench | report DIR | whatif DIR | probe\n       hf-ssr export FOLDER",
        description="Answer a prompt with a reasoning model. While it thinks, a fork of it drafts the answer, which "
        "the model then verifies: the tokens are those of plain generate, in fewer forwards. The thought goes to "
        "stderr, the answer to stdout.",
        epilog="A prompt that is one of these words goes last: hf-ssr --model M -- export",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask; put into the model's chat template")
    parser.add_argument("--version", action="version", version=f"hf-ssr {__version__}")
    model = parser.add_argument_group("model")
    shipped = "a folder, or an id on the Hub (default: the small reasoner of `hf-ssr demo`, which knows its tasks only)"
    model.add_argument("--model", metavar="PATH_OR_ID", help=shipped)
    add_model_arguments(model)
    model.add_argument("--prefill", default="", metavar="TEXT", help="how the model's turn begins, e.g. '<think>'")
    ssr = add_drafting_arguments(parser)
    ssr.add_argument(
        "--prediction",
        type=existing_file,
        metavar="FILE",
        help="a draft of the answer that you have, e.g. the text to be edited",
    )
    add_text_arguments(parser, max_new_tokens=1024)
    report = parser.add_argument_group("report")
    report.add_argument("--compare", action="store_true", help="also run plain generate, and compare tokens and time")
    report.add_argument("--stats", action="store_true", help="print what was counted (--json always has it)")
    report.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def answer_command(argv: list[str]) -> int:
    """`hf-ssr PROMPT --model M`."""
    arguments = _parser().parse_args(argv)
    try:
        config = SSRConfig(**settings_of(arguments), return_dict_in_generate=True)
        if not arguments.prompt.strip():
            raise ValueError("the prompt is empty: say what to ask.")
        if arguments.model is None:
            print(
                "hf-ssr: no --model, so the small reasoner answers, which knows its three tasks only: see hf-ssr demo",
                file=sys.stderr,
            )
        if not sys.stderr.isatty():
            logging.disable_progress_bar()  # stderr is for the thought
        tokenizer = load_tokenizer(arguments)
        settle_markers(config, tokenizer)
        if arguments.prediction:
            config.prediction_ids = tokenizer(arguments.prediction.read_text(), add_special_tokens=False).input_ids
        model = load_model(arguments)
        ids = prompt_ids(tokenizer, arguments.prompt, arguments.prefill).to(model.device)
        if arguments.compare:
            warm_up(model, ids)
        run = run_ssr(model, ids, arguments.seed, config, tokenizer, stream=not arguments.json)
        plain = None
        if arguments.compare:
            if not arguments.json:
                print("plain generate, to compare ...", file=sys.stderr)
            plain = run_plain(model, ids, arguments.seed, config, tokenizer)
    except (ValueError, OSError) as error:
        fail(str(error))
    _report(arguments, model, tokenizer, ids, config, run, plain)
    return 0


def _report(arguments, model, tokenizer, ids, config: SSRConfig, run: Run, plain: Run | None) -> None:
    difference = None if plain is None else difference_between(model, tokenizer, ids, run, plain)
    if not arguments.json:
        if plain is not None:
            print_comparison(run, plain, difference)
        if arguments.stats:
            print(run.metrics, file=sys.stderr)
        return
    thought, answer = [], run.tokens
    if resolve_markers(config, tokenizer) is not None:
        thought, answer = split_thinking(ids[0].tolist() + run.tokens, config, ids.shape[1], tokenizer)
    report: dict[str, Any] = {
        "thought": tokenizer.decode(thought, skip_special_tokens=True),
        "answer": tokenizer.decode(answer, skip_special_tokens=True),
        "ssr": {"forwards": run.forwards, "seconds": run.seconds},
        "metrics": run.metrics.to_dict(),
    }
    if plain is not None:
        report["plain"] = {"forwards": plain.forwards, "seconds": plain.seconds}
        report |= {"same_tokens": difference is None, "difference": difference}
    print(json.dumps(report))
