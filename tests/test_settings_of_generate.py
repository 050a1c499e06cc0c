"""Everything else that `generate` can be asked for gives the same tokens with SSR as without."""

import pytest
import torch
from conftest import build_once, plain_run, run
from test_stream import Recorder
from tiny_models import prompt_ids
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    SynthIDTextWatermarkLogitsProcessor,
    WatermarkingConfig,
)

from hf_ssr import SSRConfig, ThinkingBudgetLogitsProcessor

SETTINGS = {
    "temperature, top_k, top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.9},
    "top_h": {"top_h": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.003},
    "eta_cutoff": {"eta_cutoff": 0.003},
    "renormalize_logits": {"renormalize_logits": True},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[7], [9, 11]]},
    "sequence_bias": {"sequence_bias": [[[7], 0.5], [[9, 11], -3.0]]},
    "suppress_tokens": {"suppress_tokens": [5, 6, 70]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [5, 6, 70]},
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": [30, 1.05], "eos_token_id": 9},
    "min_new_tokens": {"min_new_tokens": 40, "eos_token_id": [9, 11, 13]},
    "min_length": {"min_length": 50, "eos_token_id": [9, 11, 13]},
    "remove_invalid_values": {"remove_invalid_values": True},
    "max_time": {"max_time": 600.0},
    "guidance_scale": {"guidance_scale": 1.5},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
    "prefill_chunk_size": {"prefill_chunk_size": 6},
}


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_same_tokens(setting, architecture):
    model = build_once(architecture)
    settings = {"max_new_tokens": 60, "do_sample": True, **SETTINGS[setting]}
    plain = plain_run(model, settings)
    assert len(plain.answer) > 5
    for draft in ({"draft_budgets": [3, 8]}, {"prediction_ids": [*plain.answer[:6], 5, *plain.answer[7:]]}):
        call = {"eos_token_id": settings["eos_token_id"]} if "eos_token_id" in settings else {}
        config = SSRConfig(
            thinking_start=[],
            thinking_end=[plain.marker],
            num_draft_tokens=6,
            return_dict_in_generate=True,
            **draft,
            **{name: value for name, value in settings.items() if name not in call},
        )
        output = run(model, plain.ids, call, generation_config=config)
        assert torch.equal(output.sequences, plain.sequences)
        assert output.metrics.plain_reason is None
        assert output.metrics.stages if "draft_budgets" in draft else output.metrics.accepted_tokens > 0


def test_a_watermark_that_keeps_state(model):
    """SynthID remembers its last calls: one call a token, none for the child or a rejected position."""

    def watermark() -> LogitsProcessorList:
        keys = [654, 400, 836, 123, 340, 443]
        return LogitsProcessorList(
            [
                SynthIDTextWatermarkLogitsProcessor(
                    ngram_len=4,
                    keys=keys,
                    sampling_table_size=2**8,
                    sampling_table_seed=0,
                    context_history_size=64,
                    device="cpu",
                )
            ]
        )

    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": True}, logits_processor=watermark())
    config = SSRConfig(
        thinking_start=[],
        thinking_end=[plain.marker],
        draft_budgets=[3],
        prediction_ids=[*plain.answer[:6], 5, *plain.answer[7:]],
        return_dict_in_generate=True,
        **plain.settings,
    )
    output = run(model, plain.ids, {}, generation_config=config, logits_processor=watermark())
    assert torch.equal(output.sequences, plain.sequences)
    assert output.metrics.stages and output.metrics.accepted_tokens > 0


WATERMARKS = {
    "green list": WatermarkingConfig(bias=2.5),
    "self-hash": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash"),
    "SynthID": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=4),
}
OUTPUTS = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}


def assert_same_scores(output, expected):
    for ours, theirs in ((output.scores, expected.scores), (output.logits, expected.logits)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("runs_plain", [False, True])
@pytest.mark.parametrize("watermark", WATERMARKS)
def test_scores_under_a_budget_and_a_watermark(model, watermark, runs_plain):
    """The budget's tokens are forced where `generate` would force them: the watermark comes behind."""
    settings = {"max_new_tokens": 40, "do_sample": True, "watermarking_config": WATERMARKS[watermark]}
    budget = {"thinking_start": [], "thinking_end": [9], "forced_close": [7, 9, 8], "thinking_budget": 6}

    def processors() -> LogitsProcessorList:
        return LogitsProcessorList([ThinkingBudgetLogitsProcessor(SSRConfig(**budget), prompt_length=20)])

    ids = prompt_ids()
    expected = run(model, ids, {**settings, **OUTPUTS}, logits_processor=processors())
    answer = expected.sequences[0, 29:].tolist()
    config = SSRConfig(**budget, prediction_ids=[*answer[:8], 5, *answer[9:]], draft_budgets=[3], **settings, **OUTPUTS)
    config.output_attentions = runs_plain  # not supported
    output = run(model, ids, {}, generation_config=config)
    assert torch.equal(output.sequences, expected.sequences)
    assert (output.metrics.plain_reason is not None) == runs_plain
    assert_same_scores(output, expected)


class Rounded(LogitsProcessor):
    """Works in place."""

    def __call__(self, input_ids, scores):
        return scores.mul_(4).round_().div_(4)


@pytest.mark.parametrize("verify", ["exact", "block"])
def test_logits_that_a_processor_changes_in_place(model, verify):
    """They are given out as plain `generate` gives them."""
    settings = {"max_new_tokens": 40, "do_sample": True}
    plain = plain_run(model, settings, logits_processor=LogitsProcessorList([Rounded()]))
    config = SSRConfig(
        thinking_start=[], thinking_end=[plain.marker], draft_budgets=[3], verify=verify, **settings, **OUTPUTS
    )
    output = run(model, plain.ids, {}, generation_config=config, logits_processor=LogitsProcessorList([Rounded()]))
    assert len(output.logits) == output.sequences.shape[1] - plain.ids.shape[1]
    for logits in output.logits:
        assert torch.equal(4 * logits, (4 * logits).round())
    if verify == "exact":
        expected = run(model, plain.ids, {**settings, **OUTPUTS}, logits_processor=LogitsProcessorList([Rounded()]))
        assert_same_scores(output, expected)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_either_width(model, dtype, rows):
    plain = plain_run(model, {"max_new_tokens": 30, "do_sample": False})
    ids = plain.ids.repeat(rows, 1).to(dtype)
    expected = run(model, ids, plain.settings)
    config = SSRConfig(thinking_start=[], thinking_end=[plain.marker], draft_budgets=[3], **plain.settings)
    found = run(model, ids, {}, generation_config=config)
    assert found.dtype == expected.dtype == torch.long and torch.equal(found, expected)
    if rows == 1:
        streams = [Recorder(), Recorder()]
        run(model, ids, {}, generation_config=config, streamer=streams[0])
        run(model, ids, plain.settings, streamer=streams[1])
        assert [value.dtype for value in streams[0].values] == [value.dtype for value in streams[1].values]
