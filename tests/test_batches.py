"""Batches: each row's tokens are those of plain `generate` on the same batch, whatever each row's draft is worth."""

import collections
import copy
import json
import math
import random

import pytest
import torch
import transformers
from conftest import build_once, chi_square_limit
from test_stream import Recorder, StopAt
from tiny_models import ARCHITECTURES, VOCAB_SIZE, build, prompt_ids
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3ForCausalLM,
    StoppingCriteriaList,
)

from hf_ssr import SSRConfig, ThinkingBudgetLogitsProcessor
from hf_ssr.cache_slots import SlotLayer
from hf_ssr.seeding import row_seeds
from hf_ssr.self_check import tells_texts_apart, why_not_in_blocks

LENGTHS = (20, 13, 20, 7)
NEW = 60
RULED = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear", "olmo_hybrid")  # by the gated delta rule
BATCHED = (*ARCHITECTURES, "lfm2", "lfm2_moe", *RULED)


def prompts(lengths=LENGTHS) -> dict[str, torch.LongTensor]:
    """Random prompts, padded on the left."""
    width = max(lengths)
    rows = [prompt_ids(length, seed) for seed, length in enumerate(lengths, 3)]
    padded = [torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows]
    masks = [(torch.arange(width) >= width - row.shape[1]).long()[None] for row in rows]
    return {"inputs": torch.cat(padded), "attention_mask": torch.cat(masks)}


def generate(model, batch, settings, **kwargs):
    torch.manual_seed(7)
    return model.generate(**batch, **{"pad_token_id": 0, "eos_token_id": None, **settings, **kwargs})


class Batch:
    """A batch, its plain output, and a closing marker for each row, new to it at a place of its own."""

    def __init__(self, model, settings, lengths=LENGTHS, **kwargs):
        self.inputs, self.settings = prompts(lengths), {"max_new_tokens": NEW, **settings}
        self.width = max(lengths)
        self.sequences = generate(model, self.inputs, self.settings, **kwargs)
        self.new = self.sequences[:, self.width :].tolist()
        early = {token for row in self.new for token in row[:8]}
        candidates = [[t for t in row[8 + n : -12] if t not in early] or row[-1:] for n, row in enumerate(self.new)]
        self.markers = [tokens[0] for tokens in candidates]
        places = [[place for place, token in enumerate(row) if token in self.markers] for row in self.new]
        self.closes = [found[0] if found else len(row) - 1 for found, row in zip(places, self.new, strict=True)]
        self.answers = [row[close + 1 :] for row, close in zip(self.new, self.closes, strict=True)]

    def config(self, **kwargs) -> SSRConfig:
        markers = {"thinking_start": [], "thinking_end": [[m] for m in self.markers], "num_draft_tokens": 6}
        return SSRConfig(**{**markers, "return_dict_in_generate": True, **self.settings, **kwargs})


def edited(answer, place):
    return [(t + 1) % VOCAB_SIZE if i == place else t for i, t in enumerate(answer)]


QUICK = ("llama", "qwen3", "deepseek_v3", "phi3", "mistral", "gemma3", "gemma4_shared", "lfm2", "qwen3_5")


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "architecture", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BATCHED]
)
def test_same_tokens(architecture, attention, count_forwards):
    # in float64, plain eager attention of transformers yields nan in padded rows
    attention = "eager" if architecture == "gpt_oss" else attention  # it has no other on a CPU
    model = build_once(architecture, dtype=torch.float32 if attention == "eager" else torch.float64)
    if architecture.startswith("lfm2") or architecture in RULED:
        assert why_not_in_blocks(model) is None  # once a model; not to be counted
    implementation = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        batch = Batch(model, {"do_sample": False})
        drafts = {
            "children": {"draft_budgets": [2, 5]},
            "truth": {"prediction_ids": batch.answers},
            "each worth something else": {
                "prediction_ids": [edited(a, 3 * row) for row, a in enumerate(batch.answers)],
                "draft_budgets": [3],
            },
            "none": {"draft_budgets": [], "sources": []},
        }
        for name, settings in drafts.items():
            counter = count_forwards(model)
            output = generate(model, batch.inputs, {}, generation_config=batch.config(**settings))
            metrics = output.metrics
            assert metrics.plain_reason is None
            assert torch.equal(output.sequences, batch.sequences), name
            assert counter.count == metrics.target_forwards
            if name == "children":
                assert sum(len(row.stages) for row in metrics.per_row) >= len(LENGTHS)
            elif name != "none":
                assert metrics.accepted_tokens > 0.5 * sum(map(len, batch.answers))
            if name == "truth":
                for row, answer in zip(metrics.per_row, batch.answers, strict=True):
                    assert row.prefix_accepted >= len(answer) * 6 // 7 - 1
    finally:
        model.set_attn_implementation(implementation)


@pytest.fixture
def batch(model):
    return Batch(model, {"do_sample": False})


def test_metrics_of_the_rows(model, batch):
    config = batch.config(draft_budgets=[3], prediction_ids=batch.answers)
    metrics = generate(model, batch.inputs, {}, generation_config=config).metrics
    rows = metrics.per_row
    assert [row.prompt_tokens for row in rows] == list(LENGTHS)
    assert [row.thinking_tokens for row in rows] == [close + 1 for close in batch.closes]
    for row in rows:
        own = row.recovered_tokens + row.bonus_tokens + row.plain_tokens
        assert row.new_tokens == NEW and row.accepted_tokens + own == row.answer_tokens
        assert row.answer_forwards == row.rounds + row.plain_tokens
        assert [stage.draft_budget for stage in row.stages] == [3]
    for name in ("new_tokens", "thinking_tokens", "accepted_tokens", "drafted_tokens", "draft_tokens", "rounds"):
        assert getattr(metrics, name) == sum(getattr(row, name) for row in rows)
    assert max(row.target_forwards for row in rows) <= metrics.target_forwards
    assert all(row.forwards["prefill"] == 1 and math.isnan(row.total_seconds) for row in rows)
    assert math.isnan(metrics.thinking_slowdown) and math.isnan(metrics.cost) and metrics.total_seconds > 0
    assert metrics.to_dict()["per_row"][0]["total_seconds"] is None
    assert metrics.to_dict()["per_row"][1]["new_tokens"] == NEW and "4, each in `per_row`" in str(metrics)
    json.dumps(metrics.to_dict())


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_rows_that_end_at_different_times(architecture):
    """Every token as end of text: a row that is done is padded, and leaves the forwards of the others."""
    model = build_once(architecture)
    batch = Batch(model, {"do_sample": False})
    lengths = set()
    for token in sorted({token for row in batch.new for token in row})[::5]:
        expected = generate(model, batch.inputs, batch.settings, eos_token_id=token, pad_token_id=1)
        config = batch.config(draft_budgets=[3], prediction_ids=batch.answers)
        call = {"eos_token_id": token, "pad_token_id": 1}
        output = generate(model, batch.inputs, call, generation_config=config)
        assert torch.equal(output.sequences, expected), token
        ends = [row.index(token) + 1 if token in row else NEW for row in batch.new]
        assert [row.new_tokens for row in output.metrics.per_row] == ends
        lengths.add(tuple(ends))
    assert len({len(set(ends)) for ends in lengths}) > 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "lfm2"])
def test_cuts_and_drafts_at_random(architecture, seed):
    """Lengths, ends, budgets, processors and drafts of any worth, over padding of any width."""
    rng = random.Random(seed)
    model = build_once(architecture)
    lengths = [rng.randint(1, 24) for _ in range(rng.randint(2, 6))]
    settings = {"do_sample": False, "max_new_tokens": rng.randint(20, 50)}
    if rng.random() < 0.5:
        settings["repetition_penalty"] = 1.2
    batch = Batch(model, settings, lengths)
    call = {"pad_token_id": 0}
    call["eos_token_id"] = rng.choice(batch.new[rng.randrange(len(lengths))]) if rng.random() < 0.7 else None
    markers = {"thinking_start": [], "thinking_end": [[m] for m in batch.markers]}
    markers["forced_close"] = [7, batch.markers[0], 8]
    processors = None
    if rng.random() < 0.5:
        markers["thinking_budget"] = rng.randint(0, 12)
        processors = ThinkingBudgetLogitsProcessor(
            SSRConfig(**markers), prompt_length=batch.width, max_new_tokens=settings["max_new_tokens"]
        )
    expected = generate(model, batch.inputs, {**settings, **call}, logits_processor=[processors] if processors else [])
    for _ in range(3):
        answers = [row[rng.randrange(1, 16) :] for row in expected[:, batch.width :].tolist()]
        predictions = [edited(a, rng.randrange(len(a) + 1)) if rng.random() < 0.8 else [] for a in answers]
        config = SSRConfig(
            **markers,
            **settings,
            draft_budgets=sorted(rng.sample(range(16), rng.randint(0, 4))),
            prediction_ids=predictions,
            num_draft_tokens=rng.randint(1, 9),
            max_draft_length=rng.choice([None, 3]),
        )
        assert torch.equal(generate(model, batch.inputs, call, generation_config=config), expected)


def test_a_repetition_penalty_leaves_padding_out(model):
    """Padded with a token that the text is full of: a penalty on the padding would change the text."""
    plain = Batch(model, {"do_sample": False, "repetition_penalty": 1.3})
    common = collections.Counter(token for row in plain.new for token in row).most_common(1)[0][0]
    plain.inputs["inputs"] = plain.inputs["inputs"].masked_fill(plain.inputs["attention_mask"] == 0, common)
    expected = generate(model, plain.inputs, plain.settings)
    for row, length in enumerate(LENGTHS):
        alone = {name: value[row : row + 1, -length:] for name, value in plain.inputs.items()}
        assert torch.equal(generate(model, alone, plain.settings)[:, length:], expected[row : row + 1, plain.width :])
    config = plain.config(draft_budgets=[2], prediction_ids=plain.answers)
    assert torch.equal(generate(model, plain.inputs, {}, generation_config=config).sequences, expected)


def test_stop_strings(model, tokenizer):
    batch = Batch(model, {"do_sample": False})
    text = tokenizer.decode(batch.new[1][40:42])
    settings = {"stop_strings": [text], "eos_token_id": batch.new[2][45], "pad_token_id": 1}
    expected = generate(model, batch.inputs, {**batch.settings, **settings}, tokenizer=tokenizer)
    call = {"eos_token_id": batch.new[2][45], "pad_token_id": 1, "tokenizer": tokenizer}
    config = batch.config(prediction_ids=batch.answers, stop_strings=[text])
    output = generate(model, batch.inputs, call, generation_config=config)
    assert torch.equal(output.sequences, expected) and output.metrics.plain_reason is None
    assert len({row.new_tokens for row in output.metrics.per_row}) > 1


def test_samples_follow_the_targets_law(model):
    """2,000 samples of 3 tokens in one batch, whatever was drafted: chi-square against the law worked out by hand."""
    samples, top_k = 2000, 3
    ids = prompt_ids()

    def law(text):
        with torch.no_grad():
            values, tokens = model(text).logits[0, -1].float().topk(top_k)
        return list(zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True))

    outcomes = {}
    for first, p in law(ids):
        for second, q in law(torch.cat([ids, torch.tensor([[first]])], dim=1)):
            for third, r in law(torch.cat([ids, torch.tensor([[first, second]])], dim=1)):
                outcomes[first, second, third] = samples * p * q * r
    likeliest = max(outcomes, key=outcomes.get)
    settings = {"do_sample": True, "top_k": top_k, "max_new_tokens": 3, "num_return_sequences": samples}
    config = SSRConfig(
        prediction_ids=list(likeliest),
        draft_budgets=[],
        return_dict_in_generate=True,
        **settings,
    )
    torch.manual_seed(11)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, eos_token_id=None)
    assert output.metrics.plain_reason is None and output.metrics.accepted_tokens > 0
    counts = collections.Counter(map(tuple, output.sequences[:, ids.shape[1] :].tolist()))
    assert set(counts) <= set(outcomes)
    rare = {key for key, expected in outcomes.items() if expected < 5}
    cells = [(counts[key], expected) for key, expected in outcomes.items() if key not in rare]
    cells.append((sum(counts[key] for key in rare), sum(outcomes[key] for key in rare) or 1e-9))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    degrees = len(cells) - 1
    assert degrees >= 5 and statistic < chi_square_limit(degrees)


def test_sampling_with_one_candidate_is_greedy(model, batch):
    config = batch.config(do_sample=True, top_k=1, temperature=0.7, draft_budgets=[3], prediction_ids=batch.answers)
    output = generate(model, batch.inputs, {}, generation_config=config)
    assert torch.equal(output.sequences, batch.sequences) and output.metrics.plain_reason is None


def test_a_prediction_for_each_prompt(model, batch):
    """Also where each prompt has several rows; a wrong number is refused before the first token."""
    ids = batch.inputs["inputs"][:2], batch.inputs["attention_mask"][:2]
    inputs = dict(zip(("inputs", "attention_mask"), ids, strict=True))
    settings = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "draft_budgets": []}
    config = batch.config(prediction_ids=batch.answers[:2], **settings)
    output = generate(model, inputs, {}, generation_config=config)
    assert torch.equal(output.sequences, batch.sequences[[0, 0, 1, 1]])
    assert all(
        row.prefix_accepted > len(answer) // 2
        for row, answer in zip(output.metrics.per_row, [a for a in batch.answers[:2] for _ in range(2)], strict=True)
    )
    for wrong in ([[5]] * 3, [[5], [6], [7], [8], [9]]):
        with pytest.raises(ValueError, match=r"`prediction_ids` holds . lists, but the batch has 2 prompts"):
            generate(model, inputs, {}, generation_config=batch.config(**{**settings, "prediction_ids": wrong}))
    with pytest.raises(ValueError, match=f"`prediction_ids` holds the token id {VOCAB_SIZE}"):
        generate(model, inputs, {}, generation_config=batch.config(prediction_ids=[[], [VOCAB_SIZE]]))


class Ban(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.tensor([5]), -torch.inf)


PLAIN = {
    "a streamer is given a token of every row": {"streamer": Recorder},
    "Ban may look at all rows": {"logits_processor": lambda: LogitsProcessorList([Ban()])},
    "StopAt may look at all rows": {"stopping_criteria": lambda: StoppingCriteriaList([StopAt(60)])},
    "a batch .* needs a DynamicCache of its own": {"cache": DynamicCache},
    "`output_scores` is set": {"output_scores": lambda: True},
}


@pytest.mark.parametrize("reason", PLAIN)
def test_runs_plain_where_rows_cannot_go_their_own_way(model, batch, reason):
    ((name, make),) = PLAIN[reason].items()
    expected = generate(model, batch.inputs, batch.settings, **({name: make()} if name != "streamer" else {}))
    in_config = {name: make()} if name == "output_scores" else {}
    call = {} if in_config else {name: make()}
    with pytest.warns(UserWarning, match=rf"SSR does not apply: {reason}"):
        output = generate(model, batch.inputs, {}, generation_config=batch.config(**in_config), **call)
    assert torch.equal(output.sequences, expected if isinstance(expected, torch.Tensor) else expected.sequences)


class OwnPositions(Qwen3ForCausalLM):
    """Takes no `position_ids`, and another argument of each row."""

    def forward(self, *args, row_bias=None, **kwargs):
        return super().forward(*args, **kwargs)


class Biased(Qwen3ForCausalLM):
    def forward(self, *args, position_ids=None, row_bias=None, **kwargs):
        output = super().forward(*args, position_ids=position_ids, **kwargs)
        output.logits = output.logits + row_bias[:, None]
        return output


def test_positions_from_the_place_in_the_cache(batch):
    model = build("qwen3")
    model.__class__ = OwnPositions
    expected = generate(model, batch.inputs, batch.settings)
    config = batch.config(prediction_ids=[edited(answer, 2) for answer in batch.answers])
    with pytest.warns(UserWarning, match="OwnPositions takes positions from the place in the cache"):
        assert torch.equal(generate(model, batch.inputs, {}, generation_config=config).sequences, expected)


@pytest.mark.parametrize("width", [1, len(LENGTHS)])
def test_positions_given_by_the_user(model, batch, width):
    """Also one for all rows: after the first draft each row has its own."""
    inputs = {**batch.inputs, "position_ids": torch.arange(5, 5 + batch.width)[None].repeat(width, 1)}
    expected = generate(model, inputs, batch.settings)
    for settings in ({"draft_budgets": [2]}, {"prediction_ids": [edited(row, 2) for row in batch.new]}):
        config = batch.config(**settings)
        assert torch.equal(generate(model, inputs, {}, generation_config=config).sequences, expected)


def test_other_arguments_of_each_row(batch):
    model = build("qwen3")
    model.__class__ = Biased
    bias = torch.randn(len(LENGTHS), VOCAB_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = {**batch.inputs, "row_bias": bias}
    for end in (None, *sorted({token for row in batch.new for token in row})[::4]):
        call = {"eos_token_id": end, "pad_token_id": 0}
        expected = generate(model, inputs, {**batch.settings, **call})
        config = batch.config(
            draft_budgets=[2], prediction_ids=[edited(row[9:], 2) for row in expected[:, 20:].tolist()]
        )
        assert torch.equal(generate(model, inputs, call, generation_config=config).sequences, expected)


@pytest.mark.parametrize("kind", ["one a row", "one a token"])
def test_token_types(kind):
    """GPT-2 embeds them; new tokens have the last one of the prompt. Its positions are limited: no filler beyond."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 20 + NEW}
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, **sizes
    )
    model = transformers.GPT2LMHeadModel(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    types = torch.randint(3, VOCAB_SIZE, (len(LENGTHS), 20), generator=torch.Generator().manual_seed(1))
    inputs = prompts() | {"token_type_ids": types if kind == "one a token" else types[:, :1].repeat(1, 20)}
    expected = generate(model, inputs, {"max_new_tokens": NEW})
    assert all(len(set(row)) > 4 for row in expected[:, 20:].tolist())
    predictions = [edited(row, 5 * place) for place, row in enumerate(expected[:, 20:].tolist())]
    for rows in (slice(0, 1), slice(0, 4)):
        some = {name: value[rows] for name, value in inputs.items()}
        config = SSRConfig(prediction_ids=predictions[rows], max_new_tokens=NEW, do_sample=False)
        assert torch.equal(generate(model, some, {}, generation_config=config), expected[rows])


@pytest.mark.parametrize("architecture", ["mamba2", "falcon_h1"])
def test_recurrent_models_run_plain(architecture):
    model = build_once(architecture)
    batch = Batch(model, {"do_sample": False})
    with pytest.warns(UserWarning, match="SSR does not apply: in a batch, the recurrent state"):
        output = generate(model, batch.inputs, {}, generation_config=batch.config(draft_budgets=[2]))
    assert torch.equal(output.sequences, batch.sequences)


def test_out_of_memory_while_forking(model, batch, monkeypatch):
    assert why_not_in_blocks(model) is None and tells_texts_apart(model)  # before the layers count
    arrange, calls = SlotLayer.arrange, []

    def fail_once(self, region, *args):
        if region and not self.region:
            calls.append(1)
            if len(calls) == 2:  # the second layer: the first has a region by then
                raise torch.OutOfMemoryError("no room")
        return arrange(self, region, *args)

    monkeypatch.setattr(SlotLayer, "arrange", fail_once)
    output = generate(model, batch.inputs, {}, generation_config=batch.config(draft_budgets=[2, 4]))
    assert torch.equal(output.sequences, batch.sequences)
    for row in output.metrics.per_row:
        assert [stage.ended_by for stage in row.stages] == ["out_of_memory", "close"]


@pytest.mark.parametrize("where", range(1, 30, 4))
def test_interrupted(model, batch, where):
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == where:
            raise KeyboardInterrupt

    config = batch.config(draft_budgets=[2], prediction_ids=batch.answers, num_draft_tokens=2)
    handle = model.register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(model, batch.inputs, {}, generation_config=config)
    finally:
        handle.remove()
    assert torch.equal(generate(model, batch.inputs, {}, generation_config=config).sequences, batch.sequences)


def test_a_rows_seed_is_its_prompts():
    """Not its place's, its padding's or its neighbours'; copies of a prompt have seeds of their own."""
    inputs = prompts()
    ids, mask = inputs["inputs"], inputs["attention_mask"]

    def seeds(ids, mask, seed=1):
        torch.manual_seed(seed)
        found = row_seeds(ids, mask)
        drawn = torch.rand(1)
        torch.manual_seed(seed)
        torch.randint(2**62, ())
        assert torch.equal(torch.rand(1), drawn)  # one draw, of however many rows
        return found

    expected = seeds(ids, mask)
    assert len(set(expected)) == len(LENGTHS)
    order = [2, 0, 3, 1]
    assert seeds(ids[order], mask[order]) == [expected[row] for row in order]
    wider = [torch.nn.functional.pad(t, (3, 0), value=v) for t, v in ((ids, 9), (mask, 0))]
    assert seeds(*wider) == expected
    assert [seeds(ids[row : row + 1, -n:], None)[0] for row, n in enumerate(LENGTHS)] == expected
    copies = seeds(ids[[0, 1, 0, 0]], mask[[0, 1, 0, 0]])
    assert copies[:2] == expected[:2] and len(set(copies)) == 4
    assert not set(seeds(ids, mask, seed=2)) & set(expected)
    torch.manual_seed(0)
    assert row_seeds(torch.tensor([[5, 6]]), None) == [4145939116283071802]  # on any machine
    torch.manual_seed(1)
    alone = row_seeds(torch.tensor([[5, 6]]), None)
    torch.manual_seed(1)
    assert row_seeds(torch.tensor([[5, 6]]), torch.tensor([[0, 1, 1, 1]])) == alone  # behind what a cache holds


def test_coupled_texts_are_those_of_the_prompts_alone(model):
    """However they are batched; the copies of `num_return_sequences` differ, and the first is as it is alone."""
    batch = prompts()
    config = SSRConfig(thinking_start=[], thinking_end=[142], forced_close=[142], draft_budgets=[4], verify="coupled")
    config.update(do_sample=True, temperature=0.9, max_new_tokens=30)

    def texts(rows, order, seed=7):
        torch.manual_seed(seed)
        inputs = {name: value[order] for name, value in rows.items()}
        settings = {"pad_token_id": 0, "eos_token_id": None, "generation_config": copy.deepcopy(config)}
        return model.generate(**inputs, **settings)[:, inputs["inputs"].shape[1] :].tolist()

    together = texts(batch, [0, 1, 2, 3])
    alone = [texts({n: v[:, -length:] for n, v in batch.items()}, [row])[0] for row, length in enumerate(LENGTHS)]
    assert together == alone == [texts(batch, [row])[0] for row in range(4)]
    assert texts(batch, [3, 1, 0, 2]) == [alone[row] for row in (3, 1, 0, 2)]
    assert texts(batch, [0, 1, 2, 3], seed=8)[0] != together[0]
    config.num_return_sequences = 3
    copies = texts(batch, [1, 2])
    assert [copies[0], copies[3]] == [alone[1], alone[2]] and len(set(map(tuple, copies))) == 6
