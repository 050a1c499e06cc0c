"""How exact is a model on this machine? Blocks, and two rows, against single steps."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..host import kernels_for_steps
from ..running.comparing import prompt_ids
from ..running.terminal import moving
from .arguments import LEAST_STEPS, WIDTHS
from .command import WIDTH, model_of
from .exactness import Comparison, Reader, Report, Steps, plain_steps
from .tasks import HELD_OUT, draw

CERTAINTY = 0.95  # of the limit that is given where nothing was seen
LAW = (
    "Law: what comes out is distributed as in plain generate, by construction of the rules; that is tested elsewhere "
    "and not measured here. What is left is how this machine rounds."
)


def probe(
    model,
    ids: torch.Tensor,
    steps: int = LEAST_STEPS,
    widths: Sequence[int] = WIDTHS,
    progress: Callable = lambda runs: runs,
) -> Report:
    """
    Reads a plain greedy continuation again: as it was written, in blocks, and as two rows. A text is known here, so a
    flip is a divergence: there a run would have left the text of plain `generate`.

    Args:
        model (`PreTrainedModel`): what is tried.
        ids (`torch.LongTensor` of shape `(1, prompt_length)`): the prompt.
        steps (`int`): tokens that are read after it, beyond the end of the text if need be.
        widths (`Sequence[int]`): tokens of a block. The last block of a text may be narrower.
        progress (`Callable`): wraps the list of runs.

    Raises:
        `ValueError`: if the text would not fit the model, its cache cannot be compared, or its logits are no numbers.
    """
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and ids.shape[1] + steps > most:
        raise ValueError(
            f"--steps {steps} and a prompt of {ids.shape[1]} tokens exceed the {most} positions of the model: set "
            "fewer steps or a shorter --prompt."
        )
    reference = plain_steps(model, ids, steps)
    report = Report(
        str(model.dtype).removeprefix("torch."),
        str(model.device),
        torch.get_num_threads(),
        ids.shape[1],
        steps,
        _end_of(model, reference.tokens[0].tolist()),
        reference.std,
    )
    runs = [Comparison("single steps, again", 1, 1)]
    runs += [Comparison(f"blocks of {width}", 1, width) for width in sorted(set(widths))]
    runs += [Comparison("two rows, steps", 2, 1)]
    for run in progress(runs):
        _compare(model, ids, reference, run)
        report.comparisons.append(run)
    return report


def _end_of(model, tokens: list[int]) -> int | None:
    eos = getattr(model.generation_config, "eos_token_id", None)
    ids = set() if eos is None else set(eos) if isinstance(eos, (list, tuple)) else {eos}
    return next((index + 1 for index, token in enumerate(tokens) if token in ids), None)


def _compare(model, ids: torch.Tensor, reference: Steps, run: Comparison) -> None:
    reader = Reader(model, ids, run.rows)
    # as in plain generate and in SSR: experts may have another kernel for steps than for blocks
    with kernels_for_steps(model) if run.width == 1 else nullcontext():
        for begin in range(0, reference.tokens.shape[1], run.width):
            found = reader.read(reference.tokens[:, begin : begin + run.width])
            for logits in found:
                run.add_logits(logits, reference, begin)
    run.add_cache(reader.cache, reference.cache)


def _listed(values: Sequence) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}" if first else last


def _bits(report: Report) -> str:
    equal = [block.width for block in report.blocks if block.is_bit_equal]
    others = [block for block in report.blocks if not block.is_bit_equal]
    begin = f"Bits: in {report.dtype} on {report.device}"
    if not others:
        return (
            f"{begin} blocks of {_listed(equal)} tokens give the same bits as single steps: all logits, all the cache."
        )
    worst = max(others, key=lambda block: block.relative_difference)
    how_far = (
        f"the largest difference of a logit is {worst.max_difference:.2g}, {worst.relative_difference:.2g} of the "
        f"logits' standard deviation (blocks of {worst.width})"
    )
    if not equal:
        return f"{begin} blocks of no width tried ({_listed([b.width for b in others])}) give the same bits: {how_far}."
    return (
        f"{begin} blocks of {_listed(equal)} tokens give the same bits as single steps, logits and cache; those of "
        f"{_listed([block.width for block in others])} do not: {how_far}."
    )


def _divergences(run: Comparison) -> str:
    return (
        f"{len(run.flips)} of {run.tokens} ({run.flips_per_1000:.3g} per 1,000 tokens; scores at most "
        f"{run.largest_margin:.2g} standard deviations apart)"
    )


def _tokens(report: Report) -> str:
    flipped = [block for block in report.blocks if block.flips]
    limit = 1000 * (1 - (1 - CERTAINTY) ** (1 / report.steps))
    none = f"none of {report.steps} tokens, which alone says: fewer than {limit:.2g} per 1,000"
    if not flipped:
        blocks = f"Tokens: with blocks the model picks another token than with single steps at {none}."
    else:
        blocks = "Tokens: the model picks another token than with single steps at " + "; ".join(
            f"{_divergences(block)} with blocks of {block.width}" for block in flipped
        )
        others = [block.width for block in report.blocks if not block.flips]
        blocks += f"; at none with blocks of {_listed(others)}." if others else "."
    rows = _divergences(report.two_rows) if report.two_rows.flips else none
    return f"{blocks} To compare: plain generate on a batch of two equal rows, at {rows}."


def sentences(report: Report) -> list[str]:
    """What the figures mean, for who uses the model."""
    told = [LAW, _tokens(report), _bits(report)]
    if report.two_rows.is_bit_equal:
        told.append("Two rows give the same bits as one.")
    else:
        two, other = report.two_rows, f"{report.two_rows.relative_difference:.2g} of the standard deviation"
        told.append(f"Two rows do not give the same bits as one: off by up to {two.max_difference:.2g}, {other}.")
    if not report.again.is_bit_equal:
        told.append(
            "This machine does not repeat itself: the very same single steps, run again, are off by up to "
            f"{report.again.max_difference:.2g}. Here plain generate does not repeat its own bits either."
        )
    if report.end is not None:
        told.append(f"The text ended after {report.end} tokens; what was read behind that is beyond its end.")
    told.append("All of this was seen on one text; another prompt, length or number of threads may round otherwise.")
    return told


def table_of(report: Report) -> Table:
    """
    The report to look at: of how many positions and cache layers all bits are the same, and how far others are off;
    flips, where another token is picked, and their largest margin, in standard deviations.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("against single steps", no_wrap=True)
    apart = "off by", "in std"
    for name in ("same logits", *apart, "same layers", *apart, "flips", "per 1,000", "margin"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in report.comparisons:
        table.add_row(
            run.name,
            f"{run.equal_share:.1%}",
            f"{run.max_difference:.2g}",
            f"{run.relative_difference:.2g}",
            f"{run.equal_layers} of {run.layers}",
            f"{run.cache_difference:.2g}",
            f"{run.cache_relative_difference:.2g}",
            f"{len(run.flips)}",
            f"{run.flips_per_1000:.3g}",
            f"{run.largest_margin:.2g}" if run.flips else "",
        )
    return table


def probe_command(arguments: argparse.Namespace) -> int:
    """
    Measures and prints. Returns the exit status.

    Raises:
        `ValueError`, `OSError`: before the first step, for what does not fit; later, if the model's cache or logits
            cannot be compared.
    """
    model, tokenizer = model_of(arguments)
    prompt = draw("class", HELD_OUT).prompt if arguments.prompt is None else arguments.prompt
    ids = prompt_ids(tokenizer, prompt).to(model.device)
    progress = Console(stderr=True, force_terminal=moving(sys.stderr))
    report = probe(
        model, ids, arguments.steps, arguments.widths, lambda runs: track(runs, "comparing", console=progress)
    )
    console = Console(highlight=False, stderr=arguments.json, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    console.print(table_of(report))
    for sentence in sentences(report):
        console.print(sentence, markup=False)
    console.print(
        f"{model.config.model_type}, {report.dtype}, {report.device}, {report.threads} threads, "
        f"{report.prompt_tokens} tokens of prompt, {report.steps} steps, greedy."
    )
    if arguments.json:
        print(json.dumps({"model": arguments.model or "tiny-reasoner", **report.to_dict()}))
    return 0
