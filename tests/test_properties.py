"""
Random settings, drafts, cuts, processors and seeds on four kinds of cache: always plain's tokens, stream and cache.

The number of examples is set by `HF_SSR_EXAMPLES` (default 12 a kind of cache).
"""

import os

import pytest
import torch
from conftest import build_once, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_stream import Recorder, StopAt
from tiny_models import VOCAB_SIZE, prompt_ids
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList

from hf_ssr import SSRConfig, ThinkingBudgetLogitsProcessor
from hf_ssr.cache_slots import SlotLayer

EXAMPLES = int(os.environ.get("HF_SSR_EXAMPLES", "12"))
tokens = st.integers(3, VOCAB_SIZE - 1)
pytestmark = pytest.mark.measured_costs


@st.composite
def edits(draw):
    """What to do to the true answer: keep it, cut it, or change, insert and drop tokens of it."""
    return [
        (draw(st.sampled_from(["change", "insert", "drop"])), draw(st.integers(0, 60)), draw(tokens))
        for _ in range(draw(st.integers(0, 5)))
    ]


def edited(answer: list[int], changes) -> list[int]:
    answer = list(answer)
    for kind, place, token in changes:
        place = min(place, len(answer))
        if kind == "insert":
            answer.insert(place, token)
        elif place < len(answer):
            answer[place : place + 1] = [token] if kind == "change" else []
    return answer


cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "prompt_length": st.integers(1, 30),
        "sampling": st.sampled_from(
            [
                {"do_sample": False},
                {"do_sample": True, "top_k": 12},
                {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
            ]
        ),
        "penalties": st.sampled_from(
            [
                {},
                {"repetition_penalty": 1.3},
                {"no_repeat_ngram_size": 3},
                {"min_new_tokens": 20},
                {"bad_words_ids": [[9]]},
            ]
        ),
        "max_new_tokens": st.integers(1, 48),
        "close": st.integers(0, 40),
        "close_tail": st.lists(tokens, max_size=3),
        "budgets": st.one_of(
            st.none(),
            st.builds(lambda b: {"draft_budgets": b}, st.lists(st.integers(0, 30), max_size=5)),
            st.builds(lambda n: {"draft_interval": n}, st.integers(1, 20)),
        ),
        "thinking_budget": st.one_of(st.none(), st.integers(0, 40)),
        "prediction": st.one_of(st.none(), edits()),
        "num_draft_tokens": st.integers(1, 20),
        "min_match_length": st.integers(1, 3),
        "max_draft_length": st.one_of(st.none(), st.integers(1, 10)),
        "draft_temperature": st.sampled_from([None, 1.0]),
        "sources": st.sampled_from([None, ["draft"], ["draft", "answer"]]),
        "eos_at": st.one_of(st.none(), st.integers(0, 47)),
        "stop_at": st.one_of(st.none(), st.integers(1, 48)),
        "pads": st.sampled_from([0, 0, 3]),
        "marker_length": st.sampled_from([1, 1, 2, 3]),
        "brings_cache": st.booleans(),
        "speculate_thinking": st.sampled_from([None, None, False]),
        "max_overhead": st.sampled_from([None, "off", "off", 0.0, 0.5]),
        "grow_in_place": st.sampled_from([None, False]),
    }
)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5", "lfm2"])
@given(case=cases)
@settings(
    deadline=None,
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
@pytest.mark.filterwarnings("ignore")
def test_plain_whatever_happens(architecture, case):
    model = build_once(architecture)
    ids = prompt_ids(case["prompt_length"], case["seed"])
    mask = torch.ones_like(ids)
    if case["pads"] and architecture in ("qwen3", "gemma3"):
        ids = torch.cat([torch.zeros(1, case["pads"], dtype=torch.long), ids], dim=1)
        mask = torch.cat([torch.zeros(1, case["pads"], dtype=torch.long), mask], dim=1)
    length = ids.shape[1]
    call = {"max_new_tokens": case["max_new_tokens"], **case["sampling"], **case["penalties"]}
    new = run(model, ids, call, case["seed"], attention_mask=mask)[0, length:].tolist()

    # any token of the text may be declared to be the closing marker, or the end of text
    place = min(case["close"], len(new) - 1)
    marker = new[place : place + case["marker_length"]]
    markers = {"thinking_start": [], "thinking_end": marker, "forced_close": [7, *marker, *case["close_tail"]]}
    if case["eos_at"] is not None:
        call["eos_token_id"] = new[min(case["eos_at"], len(new) - 1)]
    extra = {"attention_mask": mask}
    if case["stop_at"] is not None:
        extra["stopping_criteria"] = StoppingCriteriaList([StopAt(length + case["stop_at"])])
    budget = {}
    processors = LogitsProcessorList()
    if case["thinking_budget"] is not None:
        budget["thinking_budget"] = case["thinking_budget"]
        processors.append(
            ThinkingBudgetLogitsProcessor(
                SSRConfig(**markers, **budget), prompt_length=length, max_new_tokens=case["max_new_tokens"]
            )
        )
    theirs = Recorder()
    expected = run(model, ids, call, case["seed"], logits_processor=processors, streamer=theirs, **extra)
    after = torch.rand(1)

    new = expected[0, length:].tolist()
    closes = [i for i in range(len(new)) if new[i : i + len(marker)] == marker]
    answer = new[closes[0] + len(marker) :] if closes else new
    names = ("num_draft_tokens", "min_match_length", "max_draft_length", "draft_temperature", "sources")
    names += ("speculate_thinking", "max_overhead", "grow_in_place")
    config = SSRConfig(
        **markers,
        **budget,
        **(case["budgets"] or {}),
        **{name: case[name] for name in names},
        **{k: v for k, v in call.items() if k != "eos_token_id"},
        prediction_ids=None if case["prediction"] is None else edited(answer, case["prediction"]),
        return_dict_in_generate=True,
    )
    ours, brought = Recorder(), {}
    if case["brings_cache"]:  # then it is not ours to share rows of, or to let grow
        brought["cache"] = DynamicCache(config=model.config)
    eos = {"eos_token_id": call["eos_token_id"]} if "eos_token_id" in call else {}
    output = run(model, ids, eos, case["seed"], generation_config=config, streamer=ours, **brought, **extra)

    assert torch.equal(output.sequences, expected)
    assert torch.equal(torch.rand(1), after)
    assert [v.tolist() for v in ours.values] == [v.tolist() for v in theirs.values] and ours.ends == 1
    cache = brought.get("cache", output.cache)
    assert output.cache is cache and cache.get_seq_length() == expected.shape[1] - 1
    assert not any(type(layer) is SlotLayer for layer in cache.layers)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    metrics = output.metrics
    accounted = metrics.accepted_tokens + metrics.recovered_tokens + metrics.bonus_tokens + metrics.plain_tokens
    assert metrics.answer_tokens == accounted and metrics.plain_reason is None


batch_cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "lengths": st.lists(st.integers(2, 20), min_size=2, max_size=4),
        "penalties": st.sampled_from(
            [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}, {"min_new_tokens": 20}]
        ),
        "max_new_tokens": st.integers(2, 48),
        "closes": st.lists(st.integers(0, 40), min_size=4, max_size=4),
        "close_tail": st.lists(tokens, max_size=3),
        "budgets": st.one_of(
            st.none(),
            st.builds(lambda b: {"draft_budgets": b}, st.lists(st.integers(0, 30), max_size=5)),
            st.builds(lambda n: {"draft_interval": n}, st.integers(1, 20)),
        ),
        "predictions": st.one_of(st.none(), st.lists(edits(), min_size=4, max_size=4)),
        "verify": st.sampled_from([None, "exact", "coupled", "speculative", "block"]),  # greedy: all give plain's text
        "num_draft_tokens": st.integers(1, 20),
        "min_match_length": st.integers(1, 3),
        "max_draft_length": st.one_of(st.none(), st.integers(1, 10)),
        "speculate_thinking": st.sampled_from([None, None, False]),
        "max_overhead": st.sampled_from([None, "off", "off", "off"]),
        "eos_of": st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 47))),
    }
)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5", "lfm2"])
@given(case=batch_cases)
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@pytest.mark.filterwarnings("ignore")
def test_plain_batches_whatever_happens(architecture, case):
    """Rows that draft in their thoughts, with children of their own, and end when they like."""
    model, lengths = build_once(architecture), case["lengths"]
    width = max(lengths)
    prompts = [prompt_ids(length, case["seed"] + row) for row, length in enumerate(lengths)]
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in prompts])
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    call = {"max_new_tokens": case["max_new_tokens"], "do_sample": False, **case["penalties"]}
    new = run(model, ids, call, attention_mask=mask)[:, width:].tolist()
    if case["eos_of"] is not None:
        row, place = case["eos_of"]
        call["eos_token_id"] = new[row % len(new)][min(place, len(new[0]) - 1)]
    expected = run(model, ids, call, attention_mask=mask)

    # any token of a row's text may be declared to be a closing marker
    ends = {row[min(close, len(row) - 1)] for row, close in zip(new, case["closes"], strict=False)}
    markers = {"thinking_start": [], "thinking_end": [[end] for end in sorted(ends)]}
    markers["forced_close"] = [7, min(ends), *case["close_tail"]]
    predictions = None
    if case["predictions"] is not None:
        predictions = [edited(row, changes) for row, changes in zip(new, case["predictions"], strict=False)]
    names = ("num_draft_tokens", "min_match_length", "max_draft_length", "speculate_thinking", "max_overhead", "verify")
    config = SSRConfig(
        **markers,
        **(case["budgets"] or {}),
        **{name: case[name] for name in names},
        **{k: v for k, v in call.items() if k != "eos_token_id"},
        prediction_ids=predictions,
        return_dict_in_generate=True,
    )
    eos = {"eos_token_id": call["eos_token_id"]} if "eos_token_id" in call else {}
    output = run(model, ids, eos, generation_config=config, attention_mask=mask)
    assert torch.equal(output.sequences, expected) and output.metrics.plain_reason is None
    for row in output.metrics.per_row:
        own = row.recovered_tokens + row.bonus_tokens + row.plain_tokens
        assert row.answer_tokens == row.accepted_tokens + own
