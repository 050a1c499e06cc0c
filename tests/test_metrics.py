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
    # the prefill yields the first token of the thought
    assert 1 + metrics.forwards["thinking"] + metrics.forwards["drafting"] == metrics.thinking_tokens
    assert sum(count for count, _ in metrics.shapes.values()) == metrics.target_forwards - 1
    assert [s.draft_budget for s in metrics.stages] == [5]


def test_spans(metrics):
    """Where each token comes from adds up to what was counted."""
    counts = collections.Counter()
    for source, count in metrics.spans:
        counts[source] += count
    assert all(a[0] != b[0] for a, b in itertools.pairwise(metrics.spans))
    assert counts.total() == metrics.new_tokens
    assert counts.pop("prefix", 0) == metrics.prefix_accepted
    assert metrics.spans[0][0] == "model" and metrics.spans[0][1] >= metrics.thinking_tokens
    own = metrics.recovered_tokens + metrics.bonus_tokens + metrics.plain_tokens
    assert counts.pop("model") == metrics.thinking_tokens + own
    assert {**dict.fromkeys(SOURCES, 0), **counts} == metrics.suffix_accepted


def test_times_add_up(metrics):
    phases = sum(metrics.seconds[name] for name in PHASES)
    assert 0 < metrics.forward_seconds < phases <= metrics.total_seconds
    assert metrics.overhead_seconds == metrics.total_seconds - metrics.forward_seconds
    assert metrics.seconds["drafting_exposed"] < metrics.seconds["drafting"] + metrics.seconds["thinking"]


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
        ({"draft_budgets": [2], "max_new_tokens": 12}, ["stop"]),
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
        drafted = metrics.forwards["drafting"] + len(metrics.stages)  # the fork's own logits give the first
        closes = 2 * len(metrics.stages)
        last_is_unfed = sum(s.ended_by in ("fork", "close", "stop") for s in metrics.stages)
        assert metrics.draft_tokens <= drafted - closes + last_is_unfed
        if "max_draft_length" in ends:
            assert metrics.draft_tokens == 3
