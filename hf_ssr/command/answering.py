"""`hf-ssr PROMPT`: the thought to stderr, the answer to stdout; beside plain `generate` if asked for."""

import argparse
import json
import sys
import warnings
from typing import Any

import torch
from transformers.utils import logging

from ..config import SSRConfig
from ..markers import resolve_markers
from ..running.comparing import Run, difference_between, prompt_ids, run_plain, timed_generate
from ..running.loading import load_model, load_tokenizer, settle_markers
from ..thinking import split_thinking
from .options import settings_of
from .streaming import ThoughtAndAnswer


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
    thought: list[int] = []
    answer = run.tokens
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


def warm_up(model, ids) -> None:
    """What the first forwards of a process take belongs to none of the runs that are compared."""
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)


def run_ssr(model, ids, seed: int, config: SSRConfig, tokenizer, stream: bool) -> Run:
    """With SSR; streamed to the terminal if asked for. Warnings go to stderr as lines of the command."""
    streamer = ThoughtAndAnswer(tokenizer, config, ids[0].tolist()) if stream else None
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"hf-ssr: {message}", file=sys.stderr)
        return timed_generate(model, ids, seed, generation_config=config, tokenizer=tokenizer, streamer=streamer)


def print_comparison(run: Run, plain: Run, difference: dict[str, Any] | None) -> None:
    """To stderr: the same tokens, or where they part, and what each run took."""
    if difference is None:
        print(f"same tokens: yes, all {len(run.tokens)}", file=sys.stderr)
    elif "margin" in difference:
        print(
            f"same tokens: no, from token {difference['position']} on: {difference['ssr']!r} here, "
            f"{difference['plain']!r} in plain generate, whose scores lie {difference['margin']:.3g} apart",
            file=sys.stderr,
        )
    else:
        print(f"same tokens: no, one text ends at token {difference['position']}", file=sys.stderr)
    print(f"{'':10}{'forwards':>10}{'seconds':>10}", file=sys.stderr)
    for name, one in (("SSR", run), ("plain", plain)):
        print(f"{name:10}{one.forwards:10}{one.seconds:10.2f}", file=sys.stderr)
    ratio = plain.forwards / run.forwards, plain.seconds / run.seconds
    print(f"{'ratio':10}{ratio[0]:10.2f}{ratio[1]:10.2f}", file=sys.stderr)
