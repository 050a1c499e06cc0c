"""How many tokens of the answer each rule takes in a forward: `python -m hf_ssr.bench.rules`."""

import argparse
import json
import sys

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .. import generate as _registered  # noqa: F401  registers the generation mode
from ..config import SSRConfig
from ..running.comparing import prompt_ids
from ..running.reasoner import load_reasoner
from ..validating import VERIFY_RULES
from .tasks import HELD_OUT, TASKS, draw


def main(argv: list[str] | None = None) -> int:
    """Prints the table, and the counts behind it as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m hf_ssr.bench.rules", description=__doc__)
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="held-out tasks of each family (default 10)")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0], metavar="T", help="top-p 0.95"
    )
    arguments = parser.parse_args(argv)
    model, tokenizer = load_reasoner()
    counts: dict[tuple[float, str, str], tuple[int, int, int, int]] = {}
    runs = [
        (temperature, rule, task, seed)
        for temperature in arguments.temperatures
        for rule in (VERIFY_RULES if temperature else VERIFY_RULES[:1])  # without sampling they are all one
        for task in TASKS
        for seed in range(arguments.limit)
    ]
    for temperature, rule, task, seed in track(runs, console=Console(stderr=True)):
        config = SSRConfig.from_tokenizer(
            tokenizer,
            verify=rule,
            max_new_tokens=1500,
            max_overhead="off",  # measured costs, which "exact" and "coupled" would follow, are no part of a rule
            return_dict_in_generate=True,
            **({"temperature": temperature, "top_p": 0.95, "top_k": 0} if temperature else {}),
            do_sample=temperature > 0,
        )
        ids = prompt_ids(tokenizer, draw(task, HELD_OUT + seed).prompt)
        torch.manual_seed(seed)
        metrics = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config).metrics
        for key in ((temperature, rule, task), (temperature, rule, "all")):
            tokens, forwards, accepted, prefix = counts.get(key, (0, 0, 0, 0))
            counts[key] = (
                tokens + metrics.answer_tokens,
                forwards + metrics.answer_forwards,
                accepted + metrics.accepted_tokens,
                prefix + metrics.prefix_accepted,
            )
    Console(highlight=False).print(_table(counts))
    names = ("answer_tokens", "answer_forwards", "accepted_tokens", "prefix_accepted")
    print(json.dumps({"/".join(map(str, key)): dict(zip(names, n, strict=True)) for key, n in counts.items()}))
    return 0


def _table(counts: dict) -> Table:
    table = Table(title="answer tokens per answer forward")
    table.add_column("temperature")
    table.add_column("verify")
    columns = [*TASKS, "all"]
    for name in [*columns, "from the draft's prefix"]:
        table.add_column(name, justify="right")
    for temperature, rule, task in counts:
        if task != "all":
            continue
        rates = [counts[temperature, rule, column][0] / counts[temperature, rule, column][1] for column in columns]
        tokens, *_, prefix = counts[temperature, rule, "all"]
        name = rule if temperature else "any"
        table.add_row(f"{temperature}", name, *(f"{rate:.2f}" for rate in rates), f"{prefix / tokens:.0%}")
    return table


if __name__ == "__main__":
    sys.exit(main())
