"""`hf-ssr probe`: what it measures is what is there, no more and no less."""

import json

import pytest
import torch
from tiny_models import RECURRENT, build, prompt_ids

from hf_ssr.bench import probe as probing
from hf_ssr.bench.exactness import plain_steps
from hf_ssr.bench.probe import probe, sentences, table_of
from hf_ssr.bench.tasks import HELD_OUT, draw
from hf_ssr.command.cli import main
from hf_ssr.running.comparing import prompt_ids as prompt_ids_of
from hf_ssr.running.reasoner import load_reasoner

STEPS = 48


@pytest.fixture
def reading(request):
    """`reading(name, change)`: a tiny model; `change(output, ids, cache_length)` may change what a forward says."""

    def make(name: str, change, dtype=torch.float64):
        model = build(name, dtype=dtype)
        forward = model.forward

        def changed(input_ids=None, cache=None, **kwargs):
            length = getattr(cache, "tokens_read", 0)
            cache.tokens_read = length + input_ids.shape[1]
            output = forward(input_ids=input_ids, cache=cache, **kwargs)
            change(output, input_ids, length)
            return output

        model.forward = changed
        return model

    return make


def by_name(report) -> dict:
    return {run.name: run for run in report.comparisons}


@pytest.mark.parametrize(
    "architecture", ["qwen3", "gemma3", "gemma4_shared", "qwen3_5", "mamba2", "nemotron_h", "lfm2"]
)
def test_every_kind_of_cache(architecture):
    """The text is plain generate's. In float64 rounding is all there is, in logits and in every layer."""
    model, ids = build(architecture), prompt_ids()
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, do_sample=False, eos_token_id=None
    )
    assert torch.equal(plain_steps(model, ids, STEPS).tokens, text[:, ids.shape[1] :])
    report = probe(model, ids, STEPS, (5, 16))
    assert [run.name for run in report.comparisons] == [
        "single steps, again",
        "blocks of 5",
        "blocks of 16",
        "two rows, steps",
    ]
    assert report.again.is_bit_equal and report.again.max_difference == report.again.cache_difference == 0
    for run in report.comparisons:
        assert run.tokens == STEPS * run.rows and not run.flips
        assert 0 < run.layers == report.again.layers
        most = 1e-4 if architecture in RECURRENT else 1e-9  # linear attention is computed in float32
        assert run.relative_difference < most
        assert run.cache_difference < most
        if architecture != "nemotron_h":  # its random states are as small as rounding
            assert run.cache_relative_difference < most
    if architecture in RECURRENT:  # a state that was not compared would pass as well
        assert any(run.cache_difference for run in report.blocks)


def test_noise_in_blocks_is_seen(reading):
    """1e-3 in one logit of each block's second place: half of the positions of blocks of 2, a quarter of 4."""

    def change(output, ids, length):
        if length and ids.shape[1] > 1:
            output.logits[:, 1, 7] += 1e-3

    exact = probe(build("qwen3"), prompt_ids(), STEPS, (2, 4))
    report = probe(reading("qwen3", change), prompt_ids(), STEPS, (2, 4))
    for width, run, other in zip((2, 4), report.blocks, exact.blocks, strict=True):
        assert run.max_difference == pytest.approx(1e-3, abs=1e-9) and other.max_difference < 1e-9
        assert run.relative_difference == pytest.approx(1e-3 / report.logits_std)
        assert not run.is_bit_equal and run.equal_share <= 1 - 1 / width
        assert not run.flips and run.cache_difference < 1e-9
    assert report.widest_equal_block == 1
    assert report.again.is_bit_equal and report.two_rows.max_difference == exact.two_rows.max_difference
    assert report.logits_std == pytest.approx(float(plain_steps(build("qwen3"), prompt_ids(), STEPS).logits.std()))


def from_table(output, ids, length):
    """Logits that depend on the token alone, so that blocks and rows of any shape give the same bits."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(output.logits.shape[-1], output.logits.shape[-1], generator=generator, dtype=torch.float64)
    output.logits = table[ids]


def same_cache(monkeypatch):
    monkeypatch.setattr(probing.Comparison, "add_cache", lambda *_: None)


def test_what_is_the_same_is_said_to_be(reading, monkeypatch):
    same_cache(monkeypatch)
    report = probe(reading("qwen3", from_table), prompt_ids(), STEPS, (8, 2))
    assert all(run.is_bit_equal and run.equal_share == 1 for run in report.comparisons)
    assert report.widest_equal_block == 8
    told = " ".join(sentences(report))
    assert "blocks of 2 and 8 tokens give the same bits" in told and "Two rows give the same bits as one." in told
    assert f"none of {STEPS} tokens, which alone says: fewer than 61 per 1,000" in told


def test_the_widest_block_has_no_gap_below(reading, monkeypatch):
    """Blocks of 4 differ: that those of 8 do not is luck."""
    same_cache(monkeypatch)

    def change(output, ids, length):
        from_table(output, ids, length)
        if length and ids.shape[1] == 4:
            output.logits[0, 0, 0] += 1e-12

    report = probe(reading("qwen3", change), prompt_ids(), STEPS, (2, 4, 8))
    assert [block.is_bit_equal for block in report.blocks] == [True, False, True] and report.widest_equal_block == 2
    assert (
        "blocks of 2 and 8 tokens give the same bits as single steps, logits and cache; those of 4 do not"
        in " ".join(sentences(report))
    )


def test_flips_and_their_margins(reading, monkeypatch):
    """In blocks of 4 the second best token gets 0.3 more than the best, once: at the 10th token."""
    same_cache(monkeypatch)
    margins = []

    def change(output, ids, length):
        from_table(output, ids, length)
        if length == 20 + 8 and ids.shape[1] == 4:
            best, second = output.logits[0, 1].topk(2).indices.tolist()
            margins.append((float(output.logits[0, 1, best] - output.logits[0, 1, second]), best, second))
            output.logits[0, 1, second] = output.logits[0, 1, best] + 0.3

    report = probe(reading("qwen3", change), prompt_ids(), STEPS, (2, 4))
    run = by_name(report)["blocks of 4"]
    (flip,), ((margin, best, second),) = run.flips, margins
    assert (flip.position, flip.token, flip.other) == (10, best, second)
    assert flip.margin == pytest.approx(margin) and flip.relative_margin == pytest.approx(margin / report.logits_std)
    assert run.flips_per_1000 == pytest.approx(1000 / STEPS) and run.largest_margin == flip.relative_margin
    assert run.max_difference == pytest.approx(margin + 0.3) and run.equal_tokens == STEPS - 1
    assert not by_name(report)["blocks of 2"].flips
    assert f"1 of {STEPS} (20.8 per 1,000 tokens" in " ".join(sentences(report))
    assert int(plain_steps(reading("qwen3", from_table), prompt_ids(), STEPS).tokens[0, 10]) == best


def test_a_second_row_that_differs_is_seen(reading, monkeypatch):
    """Only the second of two rows is off, and only from the 30th token on."""
    same_cache(monkeypatch)

    def change(output, ids, length):
        from_table(output, ids, length)
        if len(ids) == 2 and length >= 20 + 30:
            output.logits[1, 0, 3] -= 0.5

    report = probe(reading("qwen3", change), prompt_ids(), STEPS, (2,))
    two = report.two_rows
    assert two.tokens == 2 * STEPS and two.equal_tokens == 2 * STEPS - 18
    assert two.max_difference == pytest.approx(0.5) and report.blocks[0].is_bit_equal
    assert "Two rows do not give the same bits as one: off by up to 0.5" in " ".join(sentences(report))


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "mamba2"])
def test_a_cache_that_differs_is_seen(architecture, reading, monkeypatch):
    """Logits are the same: but one number of the last layer's cache is off after a block, and stays so."""

    def change(output, ids, length):
        from_table(output, ids, length)
        layer = output.cache.layers[-1]
        if length and ids.shape[1] == 4:
            tensor = layer.values if architecture != "mamba2" else layer.recurrent_states[0]
            tensor.view(-1)[0] += 2.0

    blocks = probe(reading(architecture, change), prompt_ids(), STEPS, (2, 4)).blocks
    assert all(block.equal_share == 1 for block in blocks)
    assert blocks[0].cache_difference < 1e-4 and blocks[1].cache_difference > 0.1
    assert blocks[1].equal_layers < blocks[1].layers and not blocks[1].is_bit_equal


def test_a_machine_that_does_not_repeat_itself(reading):
    calls = []

    def change(output, ids, length):
        calls.append(1)
        output.logits[0, -1, 0] += 1e-4 * len(calls)

    report = probe(reading("qwen3", change), prompt_ids(), STEPS, (2,))
    assert not report.again.is_bit_equal and any("does not repeat itself" in told for told in sentences(report))


def test_a_block_without_numbers(reading):
    """What is no number is as far off as can be, and `None` in JSON."""

    def change(output, ids, length):
        if length and ids.shape[1] > 1:
            output.logits[:, 0] = torch.nan

    report = probe(reading("qwen3", change), prompt_ids(), STEPS, (2,))
    assert report.blocks[0].max_difference == torch.inf and report.blocks[0].equal_share <= 0.5
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["comparisons"][1]["max_difference"] is None
    always = reading("qwen3", lambda output, ids, length: output.logits.fill_(torch.nan))
    with pytest.raises(ValueError, match=r"no numbers in torch\.float64: set another --dtype"):
        probe(always, prompt_ids(), STEPS, (2,))


def test_a_text_that_ends_early():
    model = build("qwen3")
    tokens = plain_steps(model, prompt_ids(), STEPS).tokens[0].tolist()
    model.generation_config.eos_token_id = [tokens[20], 1]
    report = probe(model, prompt_ids(), STEPS, (2,))
    assert report.end == tokens.index(tokens[20]) + 1
    assert any(f"ended after {report.end} tokens" in told for told in sentences(report))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reasoner(dtype, capsys):
    assert main(["probe", "--dtype", dtype, "--widths", "2,8", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    length = prompt_ids_of(load_reasoner()[1], draw("class", HELD_OUT).prompt).shape[1]
    assert (report["dtype"], report["steps"], report["prompt_tokens"]) == (dtype, 128, length)
    assert len(report["comparisons"]) == 4 and report["law"].startswith("by construction")
    for run in report["comparisons"]:
        assert run["layers"] == 4 and run["relative_difference"] < (1e-4 if dtype == "float32" else 0.2)
        assert run["flips_per_1000"] == 1000 * len(run["flips"]) / run["tokens"]
        assert dtype == "bfloat16" or not run["flips"]
    for text in ("Law:", "Tokens:", f"Bits: in {dtype} on cpu", "blocks of 8", "128 steps"):
        assert text in captured.err


def test_the_table_has_all_runs(capsys):
    assert main(["probe", "--widths", "32", "--prompt", "Keep the ledger of Paula from 26.\n1 lunch: +10"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and "blocks of 32" in out and "two rows, steps" in out and "single steps, again" in out
    report = probe(build("qwen3"), prompt_ids(), STEPS, (2, 4))
    assert table_of(report).row_count == len(report.comparisons) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "127"], "--steps: must be an integer of at least 128, but is 127"),
        (["--widths", "1,2"], "--widths: must be integers of at least 2 with commas between, but is '1,2'"),
        (["--widths", "200"], "but holds 200"),
        (["--widths", ""], "but is empty"),
        (["--widths", "2,x"], "integers of at least 2 with commas between"),
        (["--prompt", " "], "--prompt is empty"),
        (["--dtype", "float33"], "--dtype: must be one of auto, float64"),
        (["--device", "cuda:77"], "--device cuda:77"),
        (["/nowhere/at/all"], "/nowhere/at/all"),
        (["--steps", "5000"], "exceed the 2048 positions"),
    ],
)
def test_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(probing, "plain_steps", lambda *_: pytest.fail("work has begun"))
    with pytest.raises(SystemExit) as error:
        main(["probe", *arguments])
    assert error.value.code == 2 and message in " ".join(capsys.readouterr().err.split())


def test_a_cache_that_cannot_be_compared():
    with pytest.raises(
        ValueError, match="cache of qwen3 cannot be compared: the model keeps its state outside of the cache"
    ):
        model = build("qwen3")
        forward = model.forward

        def without(cache=None, **kwargs):
            return forward(**{**kwargs, "use_cache": False})

        model.forward = without
        probe(model, prompt_ids(), STEPS, (2,))
