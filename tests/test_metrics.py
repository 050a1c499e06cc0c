"""What is counted adds up, prints, and goes to JSON."""

import collections
import itertools
import json
import math

import pytest
from conftest import plain_run, run

from hf_ssr import SSRConfig, SSRMetrics
from hf_ssr.metrics import PHASES
from hf_ssr.validating import SOURCES


@pytest.fixture
def metrics(model, count_forwards):
    plain = plain_run(model, {"max_new_tokens": 64, "do_sample": False})
    counter = count_forwards(model)
    config = SSRConfig(
        thinking_start=[],
        thinking_end=[plain.marker],
        draft_budgets=[5],
        return_dict_in_generate=True,
        **plain.settings,
    )
    metrics = run(model, plain.ids, {}, generation_config=config).metrics
    assert counter.count == metrics.target_forwards
    assert metrics.thinking_tokens == plain.close + 1 and metrics.new_tokens == 64 and metrics.prompt_tokens == 20
    return metrics


def test_counts_add_up(metrics):
    assert metrics.thinking_tokens + metrics.answer_tokens == metrics.new_tokens
    own = metrics.recovered_tokens + metrics.bonus_tokens + metrics.plain_tokens
    assert metrics.accepted_tokens + own == metrics.answer_tokens
    assert metrics.accepted_tokens + metrics.wasted_draft_tokens == metrics.drafted_tokens
    assert metrics.answer_forwards == metrics.rounds + metrics.plain_tokens
    verified, kept = map(sum, zip(*metrics.accepted_by_position, strict=True))
    assert (verified, kept) == (metrics.drafted_tokens, metrics.accepted_tokens) and kept < verified
    # the prefill yields the first token of the thought
    steps = 1 + metrics.forwards["thinking"] + metrics.forwards["drafting"]
    assert steps + metrics.thinking_accepted_tokens == metrics.thinking_tokens
    assert metrics.thinking_accepted_tokens <= metrics.thinking_drafted_tokens
    counts = {phase: sum(n for n, _ in shapes.values()) for phase, shapes in metrics.shapes.items()}
    assert counts == {phase: n for phase, n in metrics.forwards.items() if n and phase != "prefill"}
    (stage,) = metrics.stages
    assert stage.draft_budget == 5 and 0 < stage.accepted_tokens <= stage.draft_tokens
    assert stage.accepted_tokens == metrics.prefix_accepted + metrics.suffix_accepted["draft"]


def test_spans(metrics):
    """Where each token comes from adds up to what was counted."""
    thought, answer = collections.Counter(), collections.Counter()
    place = 0
    for source, count in metrics.spans:
        in_thought = max(0, min(count, metrics.thinking_tokens - place))
        thought[source] += in_thought
        answer[source] += count - in_thought
        place += count
    assert all(a[0] != b[0] for a, b in itertools.pairwise(metrics.spans))
    assert place == metrics.new_tokens and thought.total() == metrics.thinking_tokens
    assert thought.total() - thought["model"] == metrics.thinking_accepted_tokens
    assert answer.pop("prefix", 0) == metrics.prefix_accepted
    own = metrics.recovered_tokens + metrics.bonus_tokens + metrics.plain_tokens
    assert answer.pop("model") == own
    assert {**dict.fromkeys(SOURCES, 0), **answer} == metrics.suffix_accepted


def test_times_add_up(metrics):
    phases = sum(metrics.seconds[name] for name in PHASES)
    assert 0 < metrics.forward_seconds < phases <= metrics.total_seconds
    assert metrics.overhead_seconds == metrics.total_seconds - metrics.forward_seconds
    assert metrics.seconds["drafting_exposed"] < metrics.seconds["drafting"] + metrics.seconds["thinking"]


def test_timeline(metrics):
    """Every forward in order, and the sums of it."""
    assert collections.Counter(phase for phase, *_ in metrics.timeline) == +collections.Counter(metrics.forwards)
    assert sum(seconds for *_, seconds in metrics.timeline) == pytest.approx(metrics.forward_seconds)
    for (*_, begin, seconds), (*_, next_begin, _) in itertools.pairwise(metrics.timeline):
        assert 0 < begin < begin + seconds <= next_begin < metrics.total_seconds
    drafting = [seconds for phase, *_, seconds in metrics.timeline if phase == "drafting"]
    assert metrics.stages[0].forwards == len(drafting)
    assert metrics.stages[0].seconds == pytest.approx(sum(drafting))
    assert "timeline" not in metrics.to_dict()


def test_rates(metrics):
    assert metrics.acceptance_rate == metrics.accepted_tokens / metrics.drafted_tokens
    assert metrics.mean_acceptance_length == 1 + metrics.accepted_tokens / metrics.rounds
    assert metrics.mean_draft_length == metrics.drafted_tokens / metrics.rounds
    assert metrics.suffix_hit_rate == metrics.hits / metrics.lookups
    assert metrics.answer_tokens_per_forward == metrics.answer_tokens / metrics.answer_forwards
    for name in ("verify_overhead", "thinking_slowdown", "answer_speedup", "cost"):
        assert getattr(metrics, name) > 0


def test_undefined_rates_are_nan():
    metrics = SSRMetrics()
    assert math.isnan(metrics.acceptance_rate) and math.isnan(metrics.verify_overhead) and math.isnan(metrics.cost)
    assert metrics.to_dict()["acceptance_rate"] is None


def test_json_and_table(metrics):
    stored = json.loads(json.dumps(metrics.to_dict()))
    assert stored["forwards"] == metrics.forwards and stored["stages"][0]["draft_budget"] == 5
    assert stored["acceptance_rate"] == metrics.acceptance_rate
    table = str(metrics)
    assert "20 prompt" in table and "acceptance rate" in table
    assert max(map(len, table.splitlines())) <= 160


def test_no_stage_tokens_are_lost(model):
    """Each way a child can end."""
    plain = plain_run(model, {"max_new_tokens": 64, "do_sample": False})
    for settings, ends in (
        ({"draft_budgets": [2, 6]}, ["fork", "close"]),
        ({"draft_budgets": [2], "max_draft_length": 3}, ["max_draft_length"]),
        ({"draft_budgets": [2], "max_new_tokens": 12}, ["max_length"]),
    ):
        config = SSRConfig(
            thinking_start=[],
            thinking_end=[plain.marker],
            forced_close=[plain.marker, 5],
            return_dict_in_generate=True,
            **{**plain.settings, **settings},
        )
        metrics = run(model, plain.ids, {}, generation_config=config).metrics
        assert [s.ended_by for s in metrics.stages] == ends
        # the fork's own logits give a child its first token; a step, as many as a block holds, and one
        assert all(s.draft_tokens <= 17 * (s.forwards + 1) for s in metrics.stages)
        assert sum(s.forwards for s in metrics.stages) == metrics.forwards["drafting"]
        if "max_draft_length" in ends:
            assert metrics.draft_tokens == 3
