"""
What SSR does outside the model's forwards, by length of the context: `python -m hf_ssr.bench.overhead`. With
`--random-text`, what it takes where there is nothing to gain, by the time that a step of the model takes.
"""

import argparse
import json
import random
import sys
import time
from statistics import median
from threading import Semaphore, Thread
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicLayer

from .. import generate as _registered  # noqa: F401  registers the generation mode
from ..cache_slots import SlotLayer
from ..config import SSRConfig
from ..drafter_suffix import SuffixDrafter
from ..running.comparing import Run, timed_generate
from ..suffix_automaton import SuffixAutomaton
from .methods import arguments_of

VOCABULARY = 5000
NEW_TOKENS = 200
HEADS, HEAD_SIZE = 8, 128  # of the layer
STEPS = 50
SIZES = [(64, 4), (192, 5), (320, 7), (512, 9)]  # hidden size and layers: steps of about 1.5, 3, 5 and 10 ms


def main(argv: list[str] | None = None) -> int:
    """Prints the table, and the figures behind it as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m hf_ssr.bench.overhead", description=__doc__)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1000, 3000, 10000, 30000, 100000], metavar="N", help="tokens"
    )
    parser.add_argument("--random-text", action="store_true", help="by the time of a step, with nothing to repeat")
    parser.add_argument("--new-tokens", type=int, default=400, metavar="N", help="of random text (default: 400)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of random text (default: 5)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.random_text:
        sizes = track(SIZES, console=Console(stderr=True))
        rows = [random_text(*size, arguments.new_tokens, arguments.repeats) for size in sizes]
        heads = "plain, ms a token", "SSR / plain", "least", "most"
        _print("random text, processor time", heads, [[f"{value:.3f}" for value in row.values()] for row in rows])
    else:
        rows = _by_length(arguments.lengths)
        of_tokens = "index, µs a token", "of a prompt, once, ms", "outside forwards, plain, ms a token", "SSR"
        columns = ("tokens", *of_tokens, "append, DynamicLayer, ms", "SlotLayer")
        lines = [[f"{length:,}", *(f"{value:.3f}" for value in rest)] for length, *rest in map(dict.values, rows)]
        _print("by tokens of context", columns, lines)
    print(json.dumps(rows))
    return 0


def _print(title: str, heads: tuple[str, ...], lines: list[list[str]]) -> None:
    table = Table(title=title, box=None)
    for head in heads:
        table.add_column(head, justify="right")
    for line in lines:
        table.add_row(*line)
    Console(highlight=False).print(table)


def _by_length(lengths: list[int]) -> list[dict[str, float]]:
    rows = []
    for length in track(sorted(lengths), console=Console(stderr=True)):
        plain, ssr, index = outside_forwards(length)
        rows.append(
            {
                "tokens": length,
                "index_us": index_microseconds(length),
                "prompt_index_ms": index,
                "plain_ms": plain,
                "ssr_ms": ssr,
                "dynamic_layer_ms": append_milliseconds(DynamicLayer, length),
                "slot_layer_ms": append_milliseconds(SlotLayer, length),
            }
        )
    return rows


def random_text(hidden_size: int, layers: int, new_tokens: int, repeats: int) -> dict[str, float]:
    """
    SSR by default beside plain `generate`, on sampled text that repeats nothing, in a thought that does not end:
    milliseconds a token of plain `generate`, and what SSR takes, in plain runs.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    ids = torch.randint(VOCABULARY, (1, 40))
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": True, "top_k": 200, "pad_token_id": 0}
    close = [VOCABULARY - 1]
    ssr = SSRConfig(**settings, thinking_start=[], thinking_end=close, forced_close=close)
    configs = GenerationConfig(**settings), ssr

    pairs = []
    for seed in range(-1, repeats):
        torch.manual_seed(seed)
        pairs.append(_token_by_token(model, ids, configs))
    pairs = pairs[1:]  # what the first of a process takes belongs to neither
    ratios = [ours / theirs for theirs, ours in pairs]
    step = median(theirs for theirs, _ in pairs) / new_tokens * 1e3
    return {"plain_ms": step, "ratio": median(ratios), "least": min(ratios), "most": max(ratios)}


def text_of(length: int) -> list[int]:
    """Random tokens, of which runs of 20 come again."""
    rng = random.Random(length)
    text: list[int] = []
    while len(text) < length:
        begin = rng.randrange(len(text)) if text and rng.random() < 0.5 else None
        text += [rng.randrange(VOCABULARY) for _ in range(20)] if begin is None else text[begin : begin + 20]
    return text[:length]


class _Turns:
    """A streamer of one of two runs that wait for each other at every token: whatever disturbs one disturbs both."""

    def __init__(self, own: Semaphore, other: Semaphore):
        self._own, self._other = own, other
        self.waits = True

    def put(self, tokens) -> None:
        if self.waits:
            self._other.release()
            self._own.acquire()

    def end(self) -> None:
        pass


def _token_by_token(model, ids: torch.Tensor, configs: tuple[GenerationConfig, GenerationConfig]) -> list[float]:
    """Processor seconds of two runs, a token of one and a token of the other in turn."""
    gates = Semaphore(1), Semaphore(0)
    turns = [_Turns(*gates), _Turns(*reversed(gates))]
    seconds = [0.0, 0.0]

    def work(turn: int) -> None:
        torch.set_num_threads(1)  # of this thread
        gates[turn].acquire()
        begin = time.thread_time()
        try:
            settings = {"generation_config": configs[turn], "streamer": turns[turn]}
            model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            seconds[turn] = time.thread_time() - begin
        finally:
            turns[1 - turn].waits = False  # it goes on alone
            gates[1 - turn].release()

    threads = [Thread(target=work, args=(turn,)) for turn in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds


def index_microseconds(length: int) -> float:
    """To observe a token and propose a draft, behind `length` tokens."""
    drafter = SuffixDrafter(["answer"], 1, 16, 2 * length)
    text = text_of(length + 1000)
    for token in text[:length]:
        drafter.observe(token)
    begin = time.perf_counter()
    for token in text[length:]:
        drafter.propose(16)
        drafter.observe(token)
    return (time.perf_counter() - begin) / 1000 * 1e6


def outside_forwards(length: int) -> tuple[float, float, float]:
    """
    Milliseconds a token, of plain `generate` and of SSR, behind a prompt of `length` tokens; and milliseconds, once,
    in which SSR indexes that prompt, which the other figure leaves out.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=length + NEW_TOKENS,
    )
    model = Qwen3ForCausalLM(config).eval()
    ids = torch.tensor([text_of(length)])
    # every other part of SSR at work: a fork at 32 tokens, its draft, and speculation in a thought that goes on
    common = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    markers = {"thinking_start": [], "thinking_end": [1], "forced_close": [1]}

    def outside(method: str) -> float:
        runs = [timed_generate(model, ids, 0, **arguments_of(method, common, None, markers)) for _ in range(3)]
        return min(map(_outside, runs)) / NEW_TOKENS * 1e3

    prompt, begin = ids[0].tolist(), time.perf_counter()
    SuffixAutomaton(prompt)
    index = (time.perf_counter() - begin) * 1e3
    return outside("plain"), outside("ssr_off") - index / NEW_TOKENS, index


def _outside(run: Run) -> float:
    return run.seconds - sum(seconds for _, _, seconds in run.shapes)


def append_milliseconds(kind: type[DynamicLayer], length: int) -> float:
    """To append a token to a layer that holds `length`."""
    layer, token = kind(), torch.zeros(1, HEADS, 1, HEAD_SIZE)
    layer.update(*[torch.zeros(1, HEADS, length, HEAD_SIZE)] * 2)
    layer.update(token, token)
    begin = time.perf_counter()
    for _ in range(STEPS):
        layer.update(token, token)
    return (time.perf_counter() - begin) / STEPS * 1e3


if __name__ == "__main__":
    sys.exit(main())
