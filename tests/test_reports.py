"""
Faults that users of other engines reported in public, by their numbers in our collection. Each names the tests that
look for its whole kind; what those lack is tried here.
"""

import gc
import importlib

import pytest
import torch
from conftest import build_once, plain_run, run
from test_stream import Recorder, config_of
from tiny_models import prompt_ids
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_ssr import SSRConfig, split_thinking
from hf_ssr.suffix_automaton import SuffixAutomaton

REPORTS = {
    "1, 4: a thinking budget that drafts run past": (
        "test_parity.test_same_tokens",
        "test_thinking.test_budget_is_exact",
    ),
    "2: a budget of 0 or 1": ("test_thinking.test_budget_is_exact", "test_reports.test_no_thought_at_all"),
    "5: a budget under a wrong name, or without a marker": (
        "test_config.test_misspelt_keyword_of_generate",
        "test_config.test_bad_settings_for_the_model_are_refused_before_the_first_token",
    ),
    "6: a newline behind the opening marker counts as thought": ("test_reports.test_no_thought_at_all",),
    "8: the model opens the thought itself, or never": (
        "test_thinking.test_budget_is_exact",
        "test_thinking.test_no_thought_no_budget",
    ),
    "10: a processor that counts its calls": (
        "test_stream.test_a_processor_with_state_is_called_once_per_token_in_order",
    ),
    "11: a budget that leaves no answer": ("test_thinking.test_budget_leaves_room_for_an_answer",),
    "12: past an end of text in a block": (
        "test_stream.test_every_token_as_end_of_text",
        "test_batches.test_rows_that_end_at_different_times",
    ),
    "13: past a stop string or criterion in a block": (
        "test_parity.test_same_tokens",
        "test_stream.test_a_criterion_cuts_where_plain_cuts",
        "test_reports.test_every_pair_as_a_stop",
    ),
    "17: drafts past the longest length": ("test_stream.test_every_length", "test_parity.test_static_cache"),
    "18: the closing marker in the middle of a block": ("test_reports.test_a_marker_in_the_middle_of_a_block",),
    "19, 21: a grammar not applied to drafts": ("test_stream.test_a_grammar_that_begins_behind_the_thought",),
    "25: equal in float32, near-ties in half precision": (
        "test_parity.test_a_difference_in_half_precision_is_a_near_tie",
    ),
    "26: the law of samples": ("test_batches.test_samples_follow_the_targets_law", "test_parity.test_same_tokens"),
    "28: windows are rolled back wrongly": ("test_parity.test_every_count_of_accepted_tokens",),
    "29: recurrent states are rolled back wrongly": (
        "test_parity.test_a_recurrent_cache_is_handed_out_whole",
        "test_parity.test_what_cannot_read_blocks_runs_plain",
    ),
    "30: positions after a block that was accepted in part": (
        "test_parity.test_every_count_of_accepted_tokens",
        "test_reports.test_a_sentence_that_repeats",
    ),
    "31: drafts that never fit": ("test_drafter.test_drafts_that_never_fit_are_left_alone",),
    "33: memory that is never freed": ("test_reports.test_nothing_outlives_a_call",),
    "34: installation": ("test_readme.test_ci_runs_the_shell_blocks", "test_routes.test_nothing_installed"),
}


@pytest.mark.parametrize("report", REPORTS)
def test_the_tests_are_there(report):
    for name in REPORTS[report]:
        module, test = name.split(".")
        assert callable(getattr(importlib.import_module(module), test))


@pytest.mark.parametrize("thinking_budget", [0, 1])
@pytest.mark.parametrize("opening", ["<think>", "<think>\n"])
def test_no_thought_at_all(model, tokenizer, opening, thinking_budget):
    """Tokens of the prompt are no thought of the output's."""
    text = tokenizer("Question. " + opening, return_tensors="pt").input_ids
    settings = {"thinking_start": "<think>", "thinking_end": "</think>", "thinking_budget": thinking_budget}
    settings |= {"forced_close": "</think>", "max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}
    for draft in ({}, {"draft_budgets": [0]}, {"prediction_ids": [5, 6, 7]}):
        config = SSRConfig(**settings, **draft)
        output = run(model, text, {"tokenizer": tokenizer}, generation_config=config)
        new = output.sequences[0, text.shape[1] :].tolist()
        assert new.index(tokenizer.convert_tokens_to_ids("</think>")) == thinking_budget
        assert len(new) == 32


class StopAtPair(StoppingCriteria):
    def __init__(self, pair, begin):
        self.pair, self.begin = pair, begin

    def __call__(self, input_ids, scores, **kwargs):
        ends = input_ids.shape[1] >= self.begin + 2 and input_ids[0, -2:].tolist() == self.pair
        return torch.full((input_ids.shape[0],), ends)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5"])
def test_every_pair_as_a_stop(architecture):
    """At the first, a middle and the last place of a block, whatever the draft is worth."""
    model = build_once(architecture)
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    begin = plain.ids.shape[1]
    for place in range(1, 60, 2):
        pair = plain.new[place - 1 : place + 1]
        criteria = StoppingCriteriaList([StopAtPair(pair, begin)])
        expected = run(model, plain.ids, plain.settings, stopping_criteria=criteria)
        output = run(model, plain.ids, {}, generation_config=config_of(plain), stopping_criteria=criteria)
        assert torch.equal(output, expected), place


def test_a_marker_in_the_middle_of_a_block(model):
    """Text before the thought is drafted, the opening marker in a block among it: all is streamed, once, in order."""
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    opening = next(i for i in range(6, 60) if plain.new[i] not in plain.new[:i])
    closing = next(i for i in range(opening + 6, 60) if plain.new[i] not in plain.new[:i])
    markers = {"thinking_start": [plain.new[opening]], "thinking_end": [plain.new[closing]], "thinks_again": False}
    for shift in range(1, 7):
        streamer = Recorder()
        prediction = plain.new[shift - 1 :] if shift == 1 else [*plain.new[1:shift], 5, *plain.new[shift + 1 :]]
        settings = {"prediction_ids": prediction, "draft_budgets": [2], "return_dict_in_generate": True}
        config = SSRConfig(**markers, **settings, **plain.settings)
        output = run(model, plain.ids, {}, generation_config=config, streamer=streamer)
        assert torch.equal(output.sequences, plain.sequences) and streamer.tokens == plain.new
        parts = split_thinking(output.sequences[0].tolist(), config, prompt_length=plain.ids.shape[1])
        assert parts.thought == plain.new[opening + 1 : closing]
        assert output.metrics.thinking_tokens == closing - opening


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5", "lfm2"])
def test_a_sentence_that_repeats(architecture):
    model = build_once(architecture)
    ids = prompt_ids(8).repeat(1, 4)
    settings = {"max_new_tokens": 48, "do_sample": False}
    expected = run(model, ids, settings)
    for num_draft_tokens in range(1, 17):
        config = SSRConfig(draft_budgets=[], num_draft_tokens=num_draft_tokens, min_match_length=1, **settings)
        assert torch.equal(run(model, ids, {}, generation_config=config), expected), num_draft_tokens


def test_nothing_outlives_a_call(model):
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    for _ in range(3):
        run(model, plain.ids, {}, generation_config=config_of(plain))
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is SuffixAutomaton]
