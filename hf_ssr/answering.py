"""`hf-ssr PROMPT`: the thought to stderr, the answer to stdout; beside plain `generate` if asked for."""

import argparse
import json
import sys
from typing import Any

from transformers.utils import logging

from .comparing import Run, difference_between, print_comparison, prompt_ids, run_plain, run_ssr, warm_up
from .config import SSRConfig
from .loading import load_model, load_tokenizer, settle_markers
from .markers import resolve_markers
from .options import settings_of
from .thinking import split_thinking


def answer_command(arguments: argparse.Namespace) -> int:
    """
    `hf-ssr PROMPT`. Returns the exit status.

    Raises:
        `ValueError`, `OSError`: before the first token, for what does not fit.
    """
    config = SSRConfig(**settings_of(arguments), return_dict_in_generate=True)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # stderr is for the thought
    tokenizer = load_tokenizer(arguments)
    settle_markers(config, tokenizer)
    if arguments.prediction:
        text = arguments.prediction.read_text(encoding="utf-8")
        config.prediction_ids = tokenizer(text, add_special_tokens=False).input_ids
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
