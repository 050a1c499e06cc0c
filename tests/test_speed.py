"""What makes it fast: a cache that grows in place, a shared prefix, costs, and the governor that bounds them."""

import inspect
import itertools
import json
import random
import sys
import threading
import time

import pytest
import torch
from conftest import build_once, plain_run, run
from tiny_models import VOCAB_SIZE, build, prompt_ids
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicLayer

import hf_ssr.cache_states
import hf_ssr.forking
import hf_ssr.rounds
import hf_ssr.scheduling
import hf_ssr.self_check
import hf_ssr.target_rows
from hf_ssr import SSRConfig
from hf_ssr.bench import overhead
from hf_ssr.cache_slots import SlotLayer
from hf_ssr.costs import GuessedCosts, StepCosts, costs_of, rising
from hf_ssr.draft_records import AcceptanceRecord
from hf_ssr.draft_sources import DRAFTERS
from hf_ssr.drafter_suffix import SuffixDrafter
from hf_ssr.drafting import Draft
from hf_ssr.metrics import SSRMetrics
from hf_ssr.scheduling import ForkSchedule, Governor
from hf_ssr.self_check import tells_texts_apart
from hf_ssr.stages import Stages
from hf_ssr.suffix_automaton import SuffixAutomaton, SuffixMatch
from hf_ssr.target import Target
from hf_ssr.target_slots import RowsInSlots

CPU = torch.device("cpu")


def states(tokens: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, 2, tokens, 4)


@pytest.mark.parametrize("grows", [True, False])
def test_the_switch(model, grows, monkeypatch):
    plain = plain_run(model, {"max_new_tokens": 40, "do_sample": False})
    spares, ends = set(), [0]
    keep = Target.keep

    def keep_and_look(self, rows):
        ends.append(max(layer.end for layer in self.cache.layers))
        spares.update(layer._keys.shape[-2] > max(ends) for layer in self.cache.layers)
        keep(self, rows)

    monkeypatch.setattr(Target, "keep", keep_and_look)
    config = SSRConfig(draft_budgets=[], grow_in_place=grows, return_dict_in_generate=True, **plain.settings)
    output = run(model, plain.ids, {}, generation_config=config)
    assert torch.equal(output.sequences, plain.sequences)
    assert (True in spares) is grows
    assert set(map(type, output.cache.layers)) == {DynamicLayer}


def target_of(model, ids, padding: int = 0) -> Target:
    config = SSRConfig(max_length=1000)  # as `generate` prepares it
    cache = DynamicCache(config=model.config)
    positions = (torch.arange(ids.shape[1]) - padding).clamp(min=0)[None]
    mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
    kwargs = {"cache": cache, "use_cache": True, "position_ids": positions, "attention_mask": mask}
    return Target(model, ids, config, SSRMetrics(), kwargs)


def logits_of(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits[0, -1]


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_parent_and_child_in_one_row(model, seed, padding):
    """Blocks of any length, kept as far as chance has it: each row's logits are those of its text alone."""
    rng = random.Random(seed)
    target = target_of(model, prompt_ids(), padding)
    target.prefill()
    parent, child = target.rows[0], None
    target.forward("thinking", {})  # yields what the prefill said
    parent.append(7)
    cache_rows = set()
    for step in range(30):
        if child is None:
            child = parent.fork()
            child.length -= 1  # a fork is made before the parent's token
            for _ in range(rng.randrange(1, 4)):
                child.append(rng.randrange(VOCAB_SIZE))
            target.fork([child])
        drafts = {row: [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(5))] for row in target.rows}
        evidence = target.forward("drafting", {row: Draft(ids) for row, ids in drafts.items()})
        for row, draft in drafts.items():
            for i in range(len(draft) + 1):
                text = torch.cat([row.ids, torch.tensor([draft[:i]], dtype=torch.long)], dim=1)
                assert torch.allclose(evidence[row].logits[0, i], logits_of(model, text[:, padding:]), atol=1e-9), (
                    step,
                    i,
                )
            for token in draft[: rng.randrange(len(draft) + 1)]:
                row.append(token)
            row.append(rng.randrange(VOCAB_SIZE))
        ends = rng.random() < 0.2
        target.keep([parent] if ends and child in target.rows else target.rows)
        cache_rows |= {layer.keys.shape[0] for layer in target.cache.layers}
        if child not in target.rows:
            child = None
            assert parent.cached == parent.length - 1
    assert cache_rows == {1}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "smollm3"])
def test_models_that_tell_texts_apart(architecture, attention):
    model = build_once(architecture)
    model.set_attn_implementation(attention)
    try:
        assert tells_texts_apart(model)
    finally:
        model.set_attn_implementation("sdpa")


def test_a_model_that_does_not(model, monkeypatch):
    """One that drops the mask is given a second row instead, and its tokens are right."""
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    forward = type(model.model).forward

    def forgetful(self, *args, attention_mask=None, **kwargs):
        mask = None if attention_mask is not None and attention_mask.ndim == 4 else attention_mask
        return forward(self, *args, attention_mask=mask, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", forgetful)
    monkeypatch.setattr(hf_ssr.self_check, "_results", {})
    assert not tells_texts_apart(model)
    config = SSRConfig(
        thinking_start=[],
        thinking_end=[plain.marker],
        draft_budgets=[4],
        return_dict_in_generate=True,
        **plain.settings,
    )
    output = run(model, plain.ids, {}, generation_config=config)
    assert torch.equal(output.sequences, plain.sequences)
    assert all(shape.startswith("2x") for shape in output.metrics.shapes["drafting"])


def test_the_match_follows_a_sequence_that_grows():
    """As long as a match that is made anew over all of it would be, or shorter; never longer, and it does occur."""
    rng = random.Random(0)
    exact = 0
    for _ in range(300):
        grown, text = SuffixAutomaton(), []
        match = SuffixMatch(grown)
        for _ in range(60):
            for _ in range(rng.randrange(3)):
                grown.extend(rng.randrange(3))
            token = rng.randrange(3)
            text.append(token)
            match.advance(token)
            fresh = SuffixMatch(SuffixAutomaton(grown.tokens))
            for earlier in text:
                fresh.advance(earlier)
            suffix, whole = text[len(text) - match.length :], grown.tokens
            assert match.length <= fresh.length
            assert not suffix or any(whole[i : i + len(suffix)] == suffix for i in range(len(whole)))
            exact += match.length == fresh.length
    assert exact > 0.8 * 300 * 60


def test_a_renamed_token_is_renamed_from_then_on():
    drafter = SuffixDrafter(["draft"], 1, 8, 1000)
    drafter.add_draft([1, 2, 3, 2, 4, 5, 2, 6])
    for token in (1, 9):  # 9 stands for 2
        drafter.observe(token)
    assert drafter.propose(8).ids == [3, 9, 4, 5, 9, 6]
    for token in (3, 2):  # and then it does not
        drafter.observe(token)
    assert drafter.propose(8).ids == [4, 5, 2, 6]


def test_costs_are_what_was_measured():
    costs = StepCosts(CPU)
    assert costs(1, 1) == 1 and costs(1, 9) == costs.guess(1, 9) > 1
    for tokens, seconds in ((1, 0.010), (1, 0.011), (1, 0.200), (16, 0.022), (4, 0.015)):
        costs.add(1, tokens, seconds)
    assert costs(1, 16) == pytest.approx(2.0) and costs(1, 4) == pytest.approx(0.015 / 0.011)  # the median
    assert costs(1, 4) < costs(1, 10) < costs(1, 16) < costs(1, 40)
    costs.add(1, 16, 0.001)  # noise: a longer forward is not cheaper than a shorter one
    costs.add(1, 16, 0.001)
    assert costs(1, 16) >= costs(1, 4)
    assert costs(2, 1) == costs.guess(2, 1)
    costs.add(2, 1, 0.0165)
    assert costs(2, 1) == pytest.approx(1.5)


def test_one_disturbed_size_makes_no_other_dear():
    assert rising([3.0, 1.2, 1.3, 1.5, 2.0]) == pytest.approx([1.75] * 4 + [2.0])
    assert rising([3.0, 2.0, 1.0]) == [2.0] * 3 and rising([1.0, 1.2]) == [1.0, 1.2]
    costs = StepCosts(CPU)
    for tokens, cost in ((1, 1.0), (2, 3.0), (4, 1.2), (8, 1.3), (16, 1.5), (32, 2.0)):
        costs.add(1, tokens, 0.010 * cost)
    assert costs(1, 2) == costs(1, 16) < 1.8 and costs(1, 32) == pytest.approx(2.0)


def test_a_machine_that_slows_down_makes_no_block_dear():
    """Another program runs for a while: blocks and steps take three times as long, then only steps follow."""
    costs = StepCosts(CPU)
    for slower in (1.0, 3.0):
        for _ in range(20):
            costs.add(1, 1, 0.010 * slower)
            costs.add(1, 16, 0.014 * slower)
    for _ in range(20):
        costs.add(1, 1, 0.010)
    assert costs(1, 16) == pytest.approx(1.4)


def test_what_is_dear_is_tried_again(model, monkeypatch):
    """Blocks took ten plain steps once (a kernel was compiled, the machine slept): drafting does not stop for ever."""
    costs = StepCosts(CPU)
    governor = governor_with(model, monkeypatch, costs, draft_budgets=[4])

    def drafted() -> int:
        return len(fitted(governor, Draft(list(range(16)), chance=0.8)).ids)

    costs.add(1, 1, 0.010)
    for tokens in (2, 3, 5, 9, 17):
        for _ in range(9):
            costs.add(1, tokens, 0.100)
    assert costs(1, 17) == pytest.approx(10) and drafted() == 0
    steps = 0
    while not drafted():
        costs.add(1, 1, 0.010)
        steps += 1
    assert 100 < steps < 1000  # seldom enough, where they are as dear as that
    for tokens in (2, 3, 5, 9, 17):  # what is cheap stays cheap
        for _ in range(9):
            costs.add(1, tokens, 0.011)
    for _ in range(2000):
        costs.add(1, 1, 0.010)
    assert costs(1, 17) == pytest.approx(1.1)


def governor_with(model, monkeypatch, costs=None, **settings) -> Governor:
    monkeypatch.setattr(hf_ssr.scheduling, "costs_of", lambda model: costs or GuessedCosts(CPU))
    return Governor(SSRConfig(**settings), model)


def fitted(governor: Governor, draft: Draft) -> Draft:
    """Of one row."""
    governor.fit([draft], lambda length: (1, 1 + length))
    return draft


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9, 0.99])
def test_a_draft_is_as_long_as_pays(model, monkeypatch, chance):
    """No other length promises more tokens for its cost."""
    governor = governor_with(model, monkeypatch, draft_budgets=[4])
    costs = governor.costs

    def worth(length: int) -> float:
        return sum(chance**i for i in range(length + 1)) / costs(1, 1 + length)

    draft = fitted(governor, Draft(list(range(16)), chance=chance))
    assert max(map(worth, range(17))) <= worth(len(draft.ids)) * 1.011
    assert (len(draft.ids) == 0) == (chance < 0.5)


def test_what_is_drafted_in_vain_is_bounded(model, monkeypatch):
    governor = governor_with(model, monkeypatch)
    record = AcceptanceRecord()
    steps = cost = 0.0
    governor.begin(1, 20)
    for _ in range(400):
        draft = Draft(list(range(16)), kind="prefix", chance=0.99)  # promised, and never kept
        fed = fitted(governor, draft)
        record.note(fed, 0)
        governor.pay([1], 1, 1 + len(fed.ids))
        steps, cost = steps + 1, cost + governor.costs(1, 1 + len(fed.ids))
        assert cost <= steps + 0.05 * (steps + governor.costs(1, 20)) + 1e-6
    assert cost > 1.03 * steps  # it does try


def test_what_opens_a_thought_is_noted_where_it_was_proposed(model, monkeypatch):
    """A thought that opens inside a verified draft has another record: what led to it is none of its business."""
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False, "repetition_penalty": 1.02}, earliest_close=30)
    opens = next(i for i, token in enumerate(plain.new) if i > 6 and token not in plain.new[:i])
    proposed, noted = [], []
    follow, note = hf_ssr.rounds.follow, AcceptanceRecord.note

    def following(lane, *args):
        before = lane.drafter.record
        follow(lane, *args)
        proposed.append((before, lane.drafter.record))

    monkeypatch.setattr(hf_ssr.rounds, "follow", following)
    monkeypatch.setattr(AcceptanceRecord, "note", lambda self, *args: noted.append(self) or note(self, *args))
    config = SSRConfig(
        thinking_start=[plain.new[opens]],
        thinking_end=[plain.marker],
        prediction_ids=plain.new,
        draft_budgets=[],
        max_overhead="off",
        **plain.settings,
    )
    output = run(model, plain.ids, {}, generation_config=config)
    assert torch.equal(output, plain.sequences) and any(before is not after for before, after in proposed)
    records = [record for record in noted if any(record is before for before, _ in proposed)]
    assert [before for before, _ in proposed] == records


class Adversary(SuffixDrafter):
    """Proposes what does not come, and is sure of it."""

    def propose(self, limit: int) -> Draft:
        return Draft([3] * max(0, limit), "prompt", kind="match 8", chance=0.99)


@pytest.mark.parametrize("close", [None, 10, 40])
@pytest.mark.parametrize("new", [11, 41, 60, 150])
def test_never_slower_than_plain(model, monkeypatch, new, close):
    """By the costs of a CPU, as guessed: drafts that never match, a thought of ten tokens, an answer of one."""
    costs = GuessedCosts(CPU)
    monkeypatch.setattr(hf_ssr.scheduling, "costs_of", lambda model: costs)
    monkeypatch.setitem(DRAFTERS, "suffix", Adversary.from_config)
    settings = {"do_sample": True, "suppress_tokens": [3]}
    plain = plain_run(model, {"max_new_tokens": 150, **settings}, earliest_close=0)
    marker = [2] if close is None or close >= new else [plain.new[close]]
    config = SSRConfig(
        thinking_start=[], thinking_end=marker, max_new_tokens=new, return_dict_in_generate=True, **settings
    )
    output = run(model, plain.ids, {}, generation_config=config)
    assert torch.equal(output.sequences, plain.sequences[:, : plain.ids.shape[1] + new])
    shapes = [s for phase in output.metrics.shapes.values() for s in phase.items()]
    cost = sum(count * costs(*map(int, shape.split("x"))) for shape, (count, _) in shapes)
    assert cost <= (new - 1) + 0.05 * (new + costs(1, plain.ids.shape[1]))
    drafted = output.metrics.drafted_tokens + output.metrics.thinking_drafted_tokens + output.metrics.draft_tokens
    assert drafted > 0 or new < 41


def set_costs(monkeypatch, power: float) -> None:
    """As if a block of n tokens had been measured to take n ** power plain steps."""
    costs = StepCosts(CPU)
    for tokens in (1, 2, 4, 8, 16, 17):
        costs.add(1, tokens, 0.001 * tokens**power)
    monkeypatch.setattr(costs, "add", lambda *_: None)
    monkeypatch.setattr(hf_ssr.scheduling, "costs_of", lambda model: costs)


def test_the_clock_changes_no_sample(model, monkeypatch):
    """Under rules by which drafts change what is drawn, a seed fixes the output, however fast the machine is."""
    settings = {"max_new_tokens": 90, "do_sample": True, "temperature": 0.5}
    outputs, drafted = {"exact": set(), "speculative": set()}, {"exact": set(), "speculative": set()}
    for rule, power in itertools.product(outputs, (0.01, 3.0)):
        set_costs(monkeypatch, power)
        config = SSRConfig(verify=rule, draft_budgets=[4], return_dict_in_generate=True, thinking_start=[], **settings)
        config.thinking_end = [plain_run(model, settings).marker]
        output = run(model, prompt_ids(), {}, generation_config=config)
        outputs[rule].add(tuple(output.sequences[0].tolist()))
        metrics = output.metrics
        drafted[rule].add((metrics.drafted_tokens, metrics.thinking_drafted_tokens, metrics.draft_tokens))
    assert all(len(texts) == 1 for texts in outputs.values())
    assert len(drafted["exact"]) == 2  # where it may, a dear forward makes drafts shorter
    assert len(drafted["speculative"]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_clock_changes_no_forward_in_half_precision(dtype, monkeypatch):
    """What a block rounds depends on its length, and decides near-ties: there the machine's speed must not."""
    model, computed = build_once("qwen3", dtype), set()
    settings = {"max_new_tokens": 90, "do_sample": False}
    for power in (0.01, 3.0):
        set_costs(monkeypatch, power)
        marker = plain_run(model, settings).marker
        config = SSRConfig(thinking_start=[], thinking_end=[marker], return_dict_in_generate=True, **settings)
        output = run(model, prompt_ids(), {}, generation_config=config)
        shapes = output.metrics.shapes.values()
        computed.add(str([{shape: count for shape, (count, _) in phase.items()} for phase in shapes]))
    assert (len(computed) == 1) == (dtype != torch.float32)


def test_automatic_budgets_grow_with_the_thought():
    schedule = ForkSchedule(SSRConfig())
    assert schedule.next_budget(0, [], None) == 32
    assert schedule.next_budget(33, [], 32) == 48
    assert schedule.next_budget(400, [[1], [2]], 400) == 520
    assert schedule.next_budget(400, [[1, 2], [1, 2]], 400) == 800  # they agree: nothing new is expected soon
    assert schedule.next_budget(900, [[1, 2], [1, 2]], 400) == 900  # late is better than never


@pytest.mark.parametrize("shares", [True, False])
def test_extra_places(model, shares, monkeypatch):
    """A child that shares its parent's row takes places for its own tokens only."""
    if not shares:
        monkeypatch.setattr(RowsInSlots, "takes_masks", False)
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    config = SSRConfig(
        thinking_start=[],
        thinking_end=[plain.marker],
        draft_budgets=[4],
        speculate_thinking=False,
        num_draft_tokens=4,
        return_dict_in_generate=True,
        **plain.settings,
    )
    metrics = run(model, plain.ids, {}, generation_config=config).metrics
    own = metrics.draft_tokens + 2 + 6  # its close, and a block of its own and of its parent
    assert 0 < metrics.extra_places <= (own if shares else own + metrics.prompt_tokens + metrics.thinking_tokens)
    assert shares or metrics.extra_places > metrics.prompt_tokens


@pytest.mark.parametrize("window", [None, 1024])
def test_slots_behind_a_long_prompt(window, request):
    """What a layer holds at most: plain's, room to grow, and the child's; the figures of `docs/measured`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 20000}
    if window is None:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).eval()
    else:
        layers = {"sliding_window": window, "layer_types": ["sliding_attention"] * 2}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, **layers)).eval()
    held: list[int] = []
    hook = model.register_forward_hook(lambda *_: held.extend(layer.room + layer.region for layer in slots()))

    def slots() -> list[SlotLayer]:
        return [layer for layer in cache.layers if type(layer) is SlotLayer and layer.is_initialized]

    request.addfinalizer(hook.remove)
    cache = DynamicCache(config=model.config)
    markers = {"thinking_start": [], "thinking_end": [1], "forced_close": [1], "draft_budgets": [32]}
    config = SSRConfig(**markers, max_new_tokens=300, do_sample=False, max_overhead="off", return_dict_in_generate=True)
    output = run(model, torch.randint(5, 1000, (1, 8000)), {}, generation_config=config, cache=cache)
    (stage,) = output.metrics.stages
    child = 1 + 2 * max(32, stage.draft_tokens)  # doubled as it grows
    own = (8000 + 300) * 5 // 4 + child if window is None else 2 * (window * 5 // 4) + child
    assert stage.draft_tokens > 0 and max(held) <= own


def test_the_overhead_curve(capsys):
    assert overhead.main(["--lengths", "300", "600"]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    rows = json.loads(line)
    assert [row["tokens"] for row in rows] == [300, 600] and "600" in table[-1]
    assert all(value > 0 for row in rows for value in row.values())


def test_the_overhead_on_random_text(capsys, monkeypatch):
    monkeypatch.setattr(overhead, "SIZES", [(64, 1), (64, 2)])
    assert overhead.main(["--random-text", "--new-tokens", "10", "--repeats", "3"]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    rows = json.loads(line)
    assert len(rows) == 2 and f"{rows[1]['ratio']:.3f}" in table[-1]
    assert all(row["plain_ms"] > 0 and row["least"] <= row["ratio"] <= row["most"] for row in rows)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "lfm2", "qwen3_5"])
@pytest.mark.parametrize("settings", [{"draft_interval": 5}, {"draft_interval": 11}, {"draft_budgets": "auto"}])
def test_a_child_drafts_what_the_model_would_write(architecture, settings, monkeypatch):
    """From the text at its budget and the forced close, greedily; also where the fork falls into a rejected block."""
    monkeypatch.setattr(hf_ssr.scheduling, "FIRST_AUTO_BUDGET", 5)
    end = Stages.end

    def noted_in(drafts):
        def noted(stages, reason):
            if stages.child is not None and stages.child.tokens:
                drafts.append((stages.child.draft_budget, list(stages.child.tokens)))
            end(stages, reason)

        return noted

    model = build_once(architecture)
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.5}, {"do_sample": True}):
        sampling = {"max_new_tokens": 90, **sampling}
        plain = plain_run(model, sampling)
        close = [plain.marker, 5, 9]
        config = SSRConfig(
            thinking_start=[],
            thinking_end=[VOCAB_SIZE - 1],
            forced_close=[VOCAB_SIZE - 1, *close],
            max_overhead="off",
            return_dict_in_generate=True,
            **settings,
            **plain.settings,
        )
        drafts = []
        monkeypatch.setattr(Stages, "end", noted_in(drafts))
        output = run(model, plain.ids, {}, generation_config=config)
        assert torch.equal(output.sequences, plain.sequences)
        assert drafts and len(drafts) == sum(stage.draft_tokens > 0 for stage in output.metrics.stages)
        for budget, draft in drafts:
            text = plain.sequences[:, : plain.ids.shape[1] + budget]
            text = torch.cat([text, torch.tensor([[VOCAB_SIZE - 1, *close]])], dim=1)
            wanted = run(model, text, {"max_new_tokens": len(draft), "do_sample": False})[0, text.shape[1] :].tolist()
            assert draft == wanted, budget


@pytest.mark.parametrize("architecture", ["lfm2", "gpt_oss", "mistral", "gemma3"])
@pytest.mark.parametrize("max_overhead", [0.5, "off"])
def test_forks_in_the_middle_of_blocks(architecture, max_overhead, monkeypatch):
    """Rows of different lengths, a new child at once where an old one ends."""
    monkeypatch.setattr(hf_ssr.scheduling, "costs_of", lambda model: GuessedCosts(CPU))
    model = build_once(architecture)
    for seed in range(6):
        plain = plain_run(model, {"max_new_tokens": 120, "do_sample": True, "temperature": 0.5}, seed=seed)
        config = SSRConfig(
            thinking_start=[], thinking_end=[VOCAB_SIZE - 1], max_overhead=max_overhead, **plain.settings
        )
        assert torch.equal(run(model, plain.ids, {}, seed, generation_config=config), plain.sequences), seed


def test_threads_share_costs(model):
    """Two threads generate with one model: what one measures, the other reads."""
    costs, errors, stop = StepCosts(CPU), [], threading.Event()

    def work(add: bool) -> None:
        rng = random.Random(add)
        try:
            while not stop.is_set():
                if add:
                    costs.add(1, rng.choice([1, 2, 4, 8, 16, 17]), rng.random())
                else:
                    costs(1, rng.randrange(1, 20))
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(add,)) for add in (True, True, False, False)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        stop.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def test_children_of_a_batch(model, monkeypatch):
    """What they cost is a share of a step of the whole batch."""
    governor = governor_with(model, monkeypatch)
    for _ in range(100):
        governor.pay([1] * 4, 4, 1)
    costs = governor.costs
    assert governor.allows_child(4, (8, 1)) and costs(8, 1) - 1 < 2.5
    extra = costs(8, 1) / costs(4, 1) - 1
    count = 0
    while governor.allows_child(4, (8, 1)):
        governor.pay([1] * 4, 8, 1)
        count += 1
    assert count == pytest.approx(0.025 * (100 + count) / extra, abs=1.5)


class FakeTime:
    """A clock that stands still, but for a forward of any size and what the test lets take time."""

    def __init__(self, monkeypatch, model, step: float = 0.002):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        forward = model.forward

        def timed(*args, **kwargs):
            self.now += step
            return forward(*args, **kwargs)

        timed.__signature__ = inspect.signature(forward)
        monkeypatch.setattr(model, "forward", timed)

    def slowed(self, function, seconds: float):
        def slow(*args):
            self.now += seconds
            return function(*args)

        return slow


@pytest.mark.measured_costs
def test_copies_are_part_of_what_a_block_costs(monkeypatch):
    """A recurrent state is copied before each block: three layers, 3 ms each, where a forward takes 2 ms."""
    model = build("qwen3_5")
    clock = FakeTime(monkeypatch, model)
    monkeypatch.setattr(hf_ssr.cache_states, "_copy_of_state", clock.slowed(hf_ssr.cache_states._copy_of_state, 0.003))
    plain = plain_run(model, {"max_new_tokens": 80, "do_sample": False})
    settings = {"num_draft_tokens": 3, "draft_budgets": [], "sources": ["draft"], "max_overhead": "off"}
    for drafts in ([], plain.new):  # plain steps, and then blocks
        config = SSRConfig(prediction_ids=drafts, **settings, **plain.settings)
        assert torch.equal(run(model, plain.ids, {}, generation_config=config), plain.sequences)
    assert costs_of(model)(1, 4) == pytest.approx(5.5, rel=0.05)


@pytest.mark.measured_costs
@pytest.mark.parametrize("seconds", [0.0, 0.03])
def test_forks_that_are_dear_are_rare(monkeypatch, seconds):
    """A fork and its end copy a row: for nothing, or for 15 plain steps each, twice a tenth of a whole text."""
    model = build("mistral")
    clock, forks = FakeTime(monkeypatch, model), []
    select_rows = clock.slowed(hf_ssr.target_rows.select_rows, seconds)
    monkeypatch.setattr(hf_ssr.target_rows, "select_rows", lambda *args: forks.append(seconds) or select_rows(*args))
    monkeypatch.setattr(RowsInSlots, "takes_masks", False)  # a branch copies nothing
    settings = {"max_new_tokens": 150, "do_sample": True, "sources": ["draft"], "return_dict_in_generate": True}
    config = SSRConfig(thinking_start=[], thinking_end=[VOCAB_SIZE - 1], forced_close=[VOCAB_SIZE - 1], **settings)
    stages = [len(run(model, prompt_ids(), {}, generation_config=config).metrics.stages) for _ in range(5)]
    assert sum(forks) <= 0.05 * 5 * 150 * 0.002
    assert stages == ([1, 0, 0, 0, 0] if seconds else [stages[0]] * 5) and (seconds or stages[0] > 2)


@pytest.mark.measured_costs
def test_what_each_token_takes_makes_no_block_dear(monkeypatch):
    """A slow processor and a slow streamer: plain `generate` waits for them at each token, too."""
    model = build("qwen3")
    plain = plain_run(model, {"max_new_tokens": 80, "do_sample": False})
    clock = FakeTime(monkeypatch, model)

    class Slow:
        def put(self, tokens):
            clock.now += 0.004

        def end(self):
            pass

    for drafts in ([], plain.new[:50]):  # plain steps, and then blocks
        config = SSRConfig(prediction_ids=drafts, draft_budgets=[], sources=["draft"], **plain.settings)
        processors = [clock.slowed(lambda ids, scores: scores, 0.005)]
        settings = {"generation_config": config, "streamer": Slow(), "logits_processor": processors}
        assert torch.equal(run(model, plain.ids, {}, **settings), plain.sequences)
    costs = costs_of(model)
    assert [costs(1, tokens) for tokens in (4, 17)] == pytest.approx([1, 1])


def test_what_was_dear_once_is_paid_off(model, monkeypatch):
    """Forks took 40 plain steps: tried again, but seldom; and where one was slow by chance, that is soon seen."""
    costs = StepCosts(CPU)
    governor = governor_with(model, monkeypatch, costs)

    def steps_until_a_stage() -> int:
        for count in itertools.count():
            if governor.allows_stage():
                return count
            costs.add(1, 1, 0.010)
            governor.pay([1], 1, 1)

    costs.add(1, 1, 0.010)
    costs.add_once("fork", 0.400)
    assert costs.once("fork") == pytest.approx(40) and costs.once("end") == 0
    assert 40 / 0.05 < steps_until_a_stage() < 40 / 0.02
    costs.add_once("fork", 0.001)
    assert costs.once("fork") == pytest.approx(0.1) and steps_until_a_stage() == 0
    costs.add_once("fork", 100.0)  # the machine slept
    assert costs.once("fork") == pytest.approx(40)
    costs.add_once("fork", 0.001)
    assert costs.once("fork") == pytest.approx(0.1)


def test_the_first_block_of_a_batch():
    """It is compared with plain steps whose cost nobody has asked for yet."""
    costs = StepCosts(CPU)
    costs.add(2, 1, 0.010, 2)
    costs.add(2, 5, 0.020, 2)
    assert costs(2, 5) / costs(2, 1) == pytest.approx(2)


def test_a_batch_is_measured_by_its_own_plain_steps():
    """No step of one text was ever made."""
    costs = StepCosts(CPU)
    costs.add(8, 1, 0.1, 4)
    assert costs(8, 1) == costs.guess(8, 1)
    for seconds in (0.010, 0.020):  # of a machine that slows down
        for _ in range(9):
            costs.add(4, 1, seconds, 4)
            costs.add(8, 1, 1.5 * seconds, 4)
    assert costs(8, 1) / costs(4, 1) == pytest.approx(1.5)
