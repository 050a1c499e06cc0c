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
from .terminal import Parser, existing_file, fail
from .thinking import split_thinking
from .version import __version__


def _budgets(text: str) -> list[int] | str:
    if text == "auto":
        return text
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be 'auto' or integers with commas between, but is {text!r}") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hf-ssr",
        usage="hf-ssr PROMPT [--model PATH_OR_ID] [options]\n       hf-ssr demo\n       hf-ssr bench | report DIR | "
        "whatif DIR | probe\n       hf-ssr export FOLDER",
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
    ssr = parser.add_argument_group("drafting")
    budgets = "thinking tokens after which to fork, 'auto' (default: as the thought grows), or '' = never"
    ssr.add_argument("--draft-budgets", type=_budgets, metavar="N,N", help=budgets)
    ssr.add_argument("--draft-interval", type=int, metavar="N", help="fork after every N thinking tokens instead")
    ssr.add_argument(
        "--max-draft-length", type=int, metavar="N", help="most tokens of a fork's draft (default: no limit)"
    )
    ssr.add_argument("--num-draft-tokens", type=int, metavar="N", help="most draft tokens in a forward (default 16)")
    ssr.add_argument(
        "--prediction",
        type=existing_file,
        metavar="FILE",
        help="a draft of the answer that you have, e.g. the text to be edited",
    )
    thought = parser.add_argument_group("thought")
    budget = "most thinking tokens; then the close is forced. The only option here that changes the tokens"
    thought.add_argument("--thinking-budget", type=int, metavar="N", help=budget)
    opens = "opens a thought (default: detected; '' = open from the first new token)"
    thought.add_argument("--thinking-start", metavar="TEXT", help=opens)
    thought.add_argument("--thinking-end", metavar="TEXT", help="closes a thought (default: detected)")
    thought.add_argument(
        "--forced-close", metavar="TEXT", help="appended when a thought is cut (default: as the model does)"
    )
    text = parser.add_argument_group("text")
    text.add_argument("--max-new-tokens", type=int, default=1024, metavar="N", help="thought and answer (default 1024)")
    text.add_argument("--sample", action="store_true", help="sample instead of greedy decoding")
    text.add_argument("--temperature", type=float, metavar="T", help="of sampling")
    text.add_argument("--top-p", type=float, metavar="P", help="of sampling")
    text.add_argument("--top-k", type=int, metavar="K", help="of sampling")
    text.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (default 0)")
    report = parser.add_argument_group("report")
    report.add_argument("--compare", action="store_true", help="also run plain generate, and compare tokens and time")
    report.add_argument("--stats", action="store_true", help="print what was counted (--json always has it)")
    report.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


_SSR_OPTIONS = (
    "draft_budgets",
    "draft_interval",
    "max_draft_length",
    "num_draft_tokens",
    "thinking_budget",
    "thinking_start",
    "thinking_end",
    "forced_close",
)


def answer_command(argv: list[str]) -> int:
    """`hf-ssr PROMPT --model M`."""
    arguments = _parser().parse_args(argv)
    try:
        settings = {name: getattr(arguments, name) for name in _SSR_OPTIONS}
        if settings["thinking_start"] == "":
            settings["thinking_start"] = []
        config = SSRConfig(**settings, **_text_settings(arguments), return_dict_in_generate=True)
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
        _settle_markers(config, tokenizer)
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


def _text_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k")}
    given = [name for name, value in sampling.items() if value is not None]
    if given and not arguments.sample:
        raise ValueError(f"--{given[0].replace('_', '-')} is for sampling: add --sample.")
    return {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.sample, **sampling}


def _settle_markers(config: SSRConfig, tokenizer) -> None:
    """Says in the command's own words that no thinking markers are known."""
    if resolve_markers(config, tokenizer) is not None:
        return
    if config.thinking_budget is not None or config.forks_on_request:
        raise ValueError("the tokenizer does not tell how this model closes a thought: give --thinking-end.")
    if config.draft_budgets is None:
        print("hf-ssr: no thinking markers found, so nothing forks; --thinking-end sets them", file=sys.stderr)
        config.draft_budgets = []


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
