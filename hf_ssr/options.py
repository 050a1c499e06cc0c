"""The options that settings of SSR have on the command line, shared by `hf-ssr PROMPT` and `hf-ssr chat`."""

import argparse
import sys
from typing import Any

from .config import SSRConfig
from .markers import resolve_markers

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
    if text == "auto":
        return text
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be 'auto' or integers with commas between, but is {text!r}") from None


def add_drafting_arguments(parser: argparse.ArgumentParser):
    """When and how much to draft. Returns the group."""
    ssr = parser.add_argument_group("drafting")
    budgets = "thinking tokens after which to fork, 'auto' (default: as the thought grows), or '' = never"
    ssr.add_argument("--draft-budgets", type=_budgets, metavar="N,N", help=budgets)
    ssr.add_argument("--draft-interval", type=int, metavar="N", help="fork after every N thinking tokens instead")
    ssr.add_argument(
        "--max-draft-length", type=int, metavar="N", help="most tokens of a fork's draft (default: no limit)"
    )
    ssr.add_argument("--num-draft-tokens", type=int, metavar="N", help="most draft tokens in a forward (default 16)")
    return ssr


def add_text_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """How a thought begins and ends, how long the text is, and whether it is sampled."""
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
    length = f"thought and answer (default {max_new_tokens})"
    text.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=length)
    text.add_argument("--sample", action="store_true", help="sample instead of greedy decoding")
    text.add_argument("--temperature", type=float, metavar="T", help="of sampling")
    text.add_argument("--top-p", type=float, metavar="P", help="of sampling")
    text.add_argument("--top-k", type=int, metavar="K", help="of sampling")
    text.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (default 0)")


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Settings of an [`SSRConfig`], from the options.

    Raises:
        `ValueError`: for an option of sampling without `--sample`.
    """
    settings = {name: getattr(arguments, name) for name in _OF_SSR}
    if settings["thinking_start"] == "":
        settings["thinking_start"] = []
    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k")}
    given = [name for name, value in sampling.items() if value is not None]
    if given and not arguments.sample:
        raise ValueError(f"--{given[0].replace('_', '-')} is for sampling: add --sample.")
    return {**settings, "max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.sample, **sampling}


def settle_markers(config: SSRConfig, tokenizer) -> None:
    """
    Says in the command's own words that no thinking markers are known.

    Raises:
        `ValueError`: if a setting needs them.
    """
    if resolve_markers(config, tokenizer) is not None:
        return
    if config.thinking_budget is not None or config.forks_on_request:
        raise ValueError("the tokenizer does not tell how this model closes a thought: give --thinking-end.")
    if config.draft_budgets is None:
        print("hf-ssr: no thinking markers found, so nothing forks; --thinking-end sets them", file=sys.stderr)
        config.draft_budgets = []
