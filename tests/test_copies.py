"""What people deep-copy or pickle with a request comes out in the same state, and on its own."""

import copy
import pickle

import pytest
import torch
from conftest import plain_run, run
from tiny_models import prompt_ids
from transformers import LogitsProcessorList, StoppingCriteriaList

import hf_ssr
from hf_ssr import SSRConfig, StopThinking, ThinkingBudgetLogitsProcessor
from hf_ssr.suffix_automaton import SuffixAutomaton, SuffixMatch

MARKERS = {"thinking_start": [], "thinking_end": [159], "forced_close": [4, 159, 6]}
WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda thing: pickle.loads(pickle.dumps(thing))}


def an_output(model):
    config = SSRConfig(**MARKERS, thinking_budget=9, draft_budgets=[2], max_new_tokens=30, return_dict_in_generate=True)
    return run(model, prompt_ids(), {}, generation_config=config)


def of_public_names(model, tokenizer) -> dict:
    """One of each, used."""
    output, drafter = an_output(model), hf_ssr.SuffixDrafter(["draft", "answer"], 1, 8, 99)
    drafter.add_draft([1, 2, 3, 4])
    drafter.observe(1)
    automaton = SuffixAutomaton([1, 2, 3, 1, 2])
    match = SuffixMatch(automaton)
    match.advance(1)
    processor = ThinkingBudgetLogitsProcessor(
        SSRConfig.from_tokenizer(tokenizer, thinking_budget=2), prompt_length=1, max_new_tokens=20
    )
    processor(torch.tensor([[5, 6]]), torch.zeros(1, 160))
    things = {
        "Draft": hf_ssr.Draft([1, 2], "draft"),
        "Drafter": drafter,
        "SSRConfig": SSRConfig.from_tokenizer(tokenizer, thinking_budget=2),
        "SSRMetrics": output.metrics,
        "SSROutput": output,
        "SplitThinking": hf_ssr.SplitThinking([1], [2]),
        "Stage": output.metrics.stages[0],
        "StopThinking": StopThinking(),
        "SuffixAutomaton": automaton,
        "SuffixDrafter": drafter,
        "SuffixMatch": match,
        "ThinkingBudgetLogitsProcessor": processor,
    }
    functions = {name for name in hf_ssr.__all__ if not isinstance(getattr(hf_ssr, name), type)}
    assert set(things) == set(hf_ssr.__all__) - functions - {"SSRGenerationMixin"}  # a model is copied as any model
    return things | {name: getattr(hf_ssr, name) for name in functions}


@pytest.mark.parametrize("way", WAYS)
def test_all_public_names(model, tokenizer, way):
    for name, thing in of_public_names(model, tokenizer).items():
        copied = WAYS[way](thing)
        assert type(copied) is type(thing), name
        if name in ("SSRConfig", "SplitThinking", "Draft", "Stage"):
            assert copied == thing
        if name == "SSROutput":
            assert (
                torch.equal(copied.sequences, thing.sequences) and copied.metrics.to_dict() == thing.metrics.to_dict()
            )
            assert copied.cache.get_seq_length() == thing.cache.get_seq_length()
        if name == "SuffixDrafter":
            assert copied.propose(3).ids == thing.propose(3).ids == [2, 3, 4]
        if name == "SuffixMatch":
            assert copied.continuation() == thing.continuation()
        if name == "ThinkingBudgetLogitsProcessor":
            ids = torch.tensor([[5, *tokenizer.encode("<think>a b")]])
            assert torch.equal(copied(ids, torch.zeros(1, 160)), thing(ids, torch.zeros(1, 160)))
            assert thing(ids, torch.zeros(1, 160)).isinf().any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_set", [False, True])
def test_a_handle_and_what_holds_it(way, is_set):
    stop = StopThinking()
    if is_set:
        stop.set()
    for held in (
        lambda s: s,
        lambda s: StoppingCriteriaList([s]),
        lambda s: {"stopping_criteria": [s], "max_new_tokens": 5},
    ):
        thing = held(stop)
        copied = WAYS[way](thing)
        found = copied if thing is stop else copied[0] if isinstance(copied, list) else copied["stopping_criteria"][0]
        assert found.is_set == is_set and found.stops_thinking
        if way != "copy" or thing is stop:  # a shallow copy of a list has its elements
            assert found is not stop
            found.clear() if is_set else found.set()
            assert stop.is_set == is_set


def test_a_copied_handle_stops(model):
    """And a copy of the processor of the budget enforces it."""
    plain = plain_run(model, {"max_new_tokens": 40, "do_sample": False})
    config = SSRConfig(**MARKERS, draft_budgets=[], **plain.settings)
    stop = StopThinking()
    stop.set()
    for way in WAYS.values():
        new = run(
            model, plain.ids, {}, generation_config=way(config), stopping_criteria=way(StoppingCriteriaList([stop]))
        )
        assert new[0, 20:23].tolist() == config.forced_close
        config.thinking_budget = 3
        processors = way(LogitsProcessorList([ThinkingBudgetLogitsProcessor(config, prompt_length=20)]))
        assert run(model, plain.ids, plain.settings, logits_processor=processors)[0, 23:26].tolist() == [4, 159, 6]
        config.thinking_budget = None


def test_copies_of_a_config_know_its_tokenizer(tokenizer):
    """Without a copy of it; no file and no comparison has it."""
    config = SSRConfig.from_tokenizer(tokenizer)
    assert copy.deepcopy(config)._tokenizer.tokenizer is tokenizer
    assert SSRConfig.from_config(copy.deepcopy(config))._tokenizer.tokenizer is tokenizer
    assert pickle.loads(pickle.dumps(config))._tokenizer.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert "_tokenizer" not in config.to_dict() and "_tokenizer" not in repr(config)
    assert SSRConfig.from_dict(config.to_dict()) == config
