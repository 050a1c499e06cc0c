"""
What `hf-ssr PROMPT` and `hf-ssr chat` take, and what of it does not fit.

Neither torch nor transformers is imported here: help, and errors in what was typed, need not wait for them.
"""

import argparse
import sys
from types import SimpleNamespace
from typing import Any

from ..bench.tasks import EXAMPLE, task_of
from ..running.loading import check_model, reasoner_notice
from ..running.parsing import add_model_arguments, integer, integers, number, text_file
from ..validating import SETTINGS, validate_settings
from ..version import __version__

_OF_SSR = (
    "draft_budgets",
    "draft_interval",
    "max_draft_length",
    "num_draft_tokens",
    "thinking_budget",
    "thinking_start",
    "thinking_end",
    "forced_close",
)


def _budgets(text: str) -> list[int] | str:
    return text if text == "auto" else integers("'auto' or integers of at least 0 with commas between", 0)(text)


SEED = integer(0, 2**64 - 1)  # as `torch.manual_seed` takes it
SAMPLING = {"temperature": number(0, is_open=True), "top_p": number(0, 1), "top_k": integer(0)}


def _add_model_group(parser: argparse.ArgumentParser, prefill: str):
    model = parser.add_argument_group("model")
    shipped = "a folder, or an id on the Hub (default: the small reasoner of `hf-ssr demo`, which knows its tasks only)"
    model.add_argument("--model", metavar="PATH_OR_ID", help=shipped)
    add_model_arguments(model)
    model.add_argument("--prefill", default="", metavar="TEXT", help=prefill)
    return model


def _add_drafting_group(parser: argparse.ArgumentParser):
    """When and how much to draft."""
    ssr = parser.add_argument_group("drafting")
    budgets = "thinking tokens after which to fork, 'auto' (default: as the thought grows), or '' = never"
    ssr.add_argument("--draft-budgets", type=_budgets, metavar="N,N", help=budgets)
    interval = "fork after every N thinking tokens instead"
    ssr.add_argument("--draft-interval", type=integer(1), metavar="N", help=interval)
    length = "most tokens of a fork's draft (default: no limit)"
    ssr.add_argument("--max-draft-length", type=integer(1), metavar="N", help=length)
    most = "most draft tokens in a forward (default 16)"
    ssr.add_argument("--num-draft-tokens", type=integer(1), metavar="N", help=most)
    return ssr


def _add_text_groups(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """How a thought begins and ends, how long the text is, and whether it is sampled."""
    thought = parser.add_argument_group("thought")
    budget = "most thinking tokens; then the close is forced. The only option here that changes the tokens"
    thought.add_argument("--thinking-budget", type=integer(0), metavar="N", help=budget)
    opens = "opens a thought (default: detected; '' = open from the first new token)"
    thought.add_argument("--thinking-start", metavar="TEXT", help=opens)
    thought.add_argument("--thinking-end", metavar="TEXT", help="closes a thought (default: detected)")
    thought.add_argument(
        "--forced-close", metavar="TEXT", help="appended when a thought is cut (default: as the model does)"
    )
    text = parser.add_argument_group("text")
    length = f"thought and answer (default {max_new_tokens})"
    text.add_argument("--max-new-tokens", type=integer(1), default=max_new_tokens, metavar="N", help=length)
    text.add_argument("--sample", action="store_true", help="sample instead of greedy decoding")
    text.add_argument("--temperature", type=SAMPLING["temperature"], metavar="T", help="of sampling, above 0")
    text.add_argument("--top-p", type=SAMPLING["top_p"], metavar="P", help="of sampling, from 0 to 1")
    text.add_argument("--top-k", type=SAMPLING["top_k"], metavar="K", help="of sampling")
    text.add_argument("--seed", type=SEED, default=0, metavar="N", help="of sampling (default 0)")


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr PROMPT` takes."""
    parser.usage = (
        "hf-ssr PROMPT [--model PATH_OR_ID] [options]\n       hf-ssr chat [--model PATH_OR_ID] [options]\n       "
        "hf-ssr demo\n       hf-ssr bench | report DIR | whatif DIR | probe\n       hf-ssr export FOLDER"
    )
    parser.epilog = "A prompt that is one of these words goes last: hf-ssr --model M -- export"
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask; put into the model's chat template")
    parser.add_argument("--version", action="version", version=f"hf-ssr {__version__}")
    _add_model_group(parser, prefill="how the model's turn begins, e.g. '<think>'")
    prediction = "a draft of the answer that you have, e.g. the text to be edited"
    _add_drafting_group(parser).add_argument("--prediction", type=text_file, metavar="FILE", help=prediction)
    _add_text_groups(parser, max_new_tokens=1024)
    report = parser.add_argument_group("report")
    report.add_argument("--compare", action="store_true", help="also run plain generate, and compare tokens and time")
    report.add_argument("--stats", action="store_true", help="print what was counted (--json always has it)")
    report.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def check_prompt_arguments(arguments: argparse.Namespace) -> None:
    """
    Looks at what `hf-ssr PROMPT` was given as a whole. What the small reasoner cannot do ends here, with what it can.

    Raises:
        `ValueError`: for what does not fit.
    """
    settings_of(arguments)
    if not arguments.prompt.strip():
        raise ValueError("the prompt is empty: say what to ask.")
    check_model(arguments)
    if arguments.model is None:
        arguments.prompt = arguments.prompt.strip()
        if task_of(arguments.prompt) is None:
            print(reasoner_notice(f"hf-ssr '{EXAMPLE}'"), file=sys.stderr)
            raise SystemExit(2)
        print("hf-ssr: no --model, so the small reasoner answers", file=sys.stderr)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr chat` takes."""
    model = _add_model_group(parser, prefill="how each of its turns begins, e.g. '<think>'")
    model.add_argument("--system", metavar="TEXT", help="the system prompt")
    _add_drafting_group(parser)
    _add_text_groups(parser, max_new_tokens=4096)


def check_chat_arguments(arguments: argparse.Namespace) -> None:
    """
    Looks at what `hf-ssr chat` was given as a whole.

    Raises:
        `ValueError`: for what does not fit.
    """
    settings_of(arguments)
    check_model(arguments)
    if arguments.model is None and arguments.system is not None:
        raise ValueError("--system: the small reasoner was trained without a system prompt: name a --model.")


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Settings of an [`SSRConfig`], from the options.

    Raises:
        `ValueError`: for an option of sampling without `--sample`, and for options that contradict each other.
    """
    settings = {name: getattr(arguments, name) for name in _OF_SSR}
    if settings["thinking_start"] == "":
        settings["thinking_start"] = []
    sampling = {name: getattr(arguments, name) for name in SAMPLING}
    given = [name for name, value in sampling.items() if value is not None]
    if given and not arguments.sample:
        raise ValueError(f"--{given[0].replace('_', '-')} is for sampling: add --sample.")
    validate_settings(SimpleNamespace(**{**dict.fromkeys(SETTINGS), **settings}))
    return {**settings, "max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.sample, **sampling}
