"""Everything else that `generate` can be asked for gives the same tokens with SSR as without."""

import pytest
import torch
from conftest import build_once, plain_run, run
from transformers import LogitsProcessorList, SynthIDTextWatermarkLogitsProcessor, WatermarkingConfig

from hf_ssr import SSRConfig

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
