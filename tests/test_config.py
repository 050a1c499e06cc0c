"""Settings: documented, validated, saved; bad input is refused before the first token."""

import inspect
import json
import re

import pytest
import torch
from conftest import plain_run, run
from tiny_models import VOCAB_SIZE, prompt_ids
from transformers import AutoModelForCausalLM, GenerationConfig

import hf_ssr
from hf_ssr import SSRConfig
from hf_ssr.config import SETTINGS
from hf_ssr.scheduling import ForkSchedule

MARKERS = {"thinking_start": [], "thinking_end": [9]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_budgets": [-1]}, "`draft_budgets` must be 'auto' or a list of integers of at least 0"),
        ({"draft_budgets": [1.5]}, "`draft_budgets`"),
        ({"draft_budgets": [True]}, "`draft_budgets`"),
        ({"draft_budgets": 64}, "`draft_budgets`"),
        ({"draft_budgets": "always"}, "`draft_budgets`"),
        ({"draft_interval": 0}, "`draft_interval` must be an integer of at least 1, but is 0"),
        ({"draft_budgets": [4], "draft_interval": 4}, "exclude each other: set one"),
        ({"max_draft_length": 0}, "`max_draft_length`"),
        ({"thinking_budget": -1}, "`thinking_budget` must be an integer of at least 0, but is -1"),
        ({"thinking_budget": "512"}, "`thinking_budget`.*'512'"),
        ({"thinking_budget": 512.0}, "`thinking_budget`.*512.0"),
        ({"thinking_end": []}, "`thinking_end`"),
        ({"thinking_end": ""}, "`thinking_end`"),
        ({"thinking_end": [-3]}, "`thinking_end`"),
        ({"thinking_start": [[1], []]}, "`thinking_start`"),
        ({"forced_close": [[1]]}, "`forced_close`"),
        ({"verify": "sometimes"}, "`verify` must be one of"),
        ({"num_draft_tokens": 0}, "`num_draft_tokens`"),
        ({"min_match_length": 0}, "`min_match_length`"),
        ({"sources": ["draft", "web"]}, "`sources` must be a list of some of"),
        ({"sources": ["prompt"], "draft_budgets": [4]}, "`draft_budgets`=.4. needs drafts.*add 'draft' to `sources`"),
        ({"sources": [], "draft_interval": 4}, "`draft_interval`=4 needs drafts"),
        ({"sources": ["prompt"], "prediction_ids": [4]}, "`prediction_ids`"),
        ({"prediction_ids": ["a"]}, "`prediction_ids` must be a list of token ids, or of such lists"),
        ({"prediction_ids": [-4]}, "`prediction_ids`"),
        ({"draft_temperature": -0.1}, "`draft_temperature`"),
        ({"draft_seed": -1}, "`draft_seed`"),
        ({"strict": "yes"}, "`strict`"),
        ({"draft_budget": [4]}, "`draft_budget` is not a setting of SSRConfig: did you mean `draft_budgets`"),
        ({"thinking_buget": 4}, "did you mean `thinking_budget`"),
        ({"prediction_id": [4]}, "did you mean `prediction_ids`"),
        ({"max_new_tokens": 0}, "`max_new_tokens`"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        SSRConfig(**settings)
    if not any("did you mean" in m for m in [message]) and "max_new_tokens" not in settings:
        config = SSRConfig()
        with pytest.raises(ValueError, match=message):
            config.update(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prediction_ids": [VOCAB_SIZE]}, f"`prediction_ids` holds the token id {VOCAB_SIZE}"),
        ({"thinking_end": [5, VOCAB_SIZE]}, "`thinking_end` holds the token id"),
        ({"thinking_end": "</think>"}, "`thinking_end`='</think>' is text, which needs a tokenizer"),
        ({"thinking_start": "<think>", "thinking_end": [5]}, "`thinking_start`='<think>' is text"),
        ({"thinking_end": [5], "forced_close": "done"}, "`forced_close`='done' is text"),
        ({"thinking_end": [5], "forced_close": [4]}, "must contain `thinking_end`"),
        ({"thinking_budget": 5}, "`thinking_budget`=5 needs thinking markers"),
        ({"draft_budgets": [5]}, "`draft_budgets`=.5. needs thinking markers"),
        ({"draft_interval": 5}, "`draft_interval`=5 needs thinking markers"),
    ],
)
def test_bad_settings_for_the_model_are_refused_before_the_first_token(model, settings, message, count_forwards):
    counter = count_forwards(model)
    with pytest.raises(ValueError, match=message):
        run(model, prompt_ids(), {}, generation_config=SSRConfig(max_new_tokens=20, **settings))
    assert counter.count == 0


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("prediction", "`prediction_ids`"),
        ("predicted_output", "`prediction_ids`"),
        ("overhead", "`max_overhead`"),
        ("thinking_tokens", "`thinking_budget`"),
        ("max_thinking_tokens", "`thinking_budget`"),
        ("budget", "`draft_budgets` or `thinking_budget`"),
        ("draft_tokens", "`num_draft_tokens`"),
        ("source", "`sources`"),
        ("verification", "`verify`"),
        ("speculative", "`speculate_thinking`"),
    ],
)
def test_what_looks_like_a_setting_and_is_none(name, nearest, model, tmp_path):
    """Refused with the nearest name, by a config, by one from a file, and by each call that our code sees first."""
    message = re.escape(f"`{name}` is not a setting of SSRConfig: did you mean {nearest}?")
    (tmp_path / "generation_config.json").write_text(json.dumps({name: 3}))
    with pytest.raises(ValueError, match=message):
        SSRConfig(**{name: 3})
    with pytest.raises(ValueError, match=message):
        SSRConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        hf_ssr.generate(model, prompt_ids(), max_new_tokens=5, **{name: 3})
    with pytest.raises(ValueError, match=name):  # transformers looks at these itself
        model.generate(prompt_ids(), max_new_tokens=5, custom_generate=hf_ssr.generate, **{name: 3})


def test_settings_of_others_look_like_none_of_ours():
    """Those of transformers, also misspelt, those that begin with `_`, and any that share no word of ours."""
    others = dict.fromkeys(vars(GenerationConfig()))
    assert not set(SETTINGS) & set(others)
    SSRConfig(**others)
    for name in (
        "temperatur",
        "min_lenght",
        "max_new_token",
        "forced_decoder_ids",
        "source_lang",
        "_draft",
        "strict_mode",
    ):
        SSRConfig(**{name: 1})


@pytest.mark.parametrize("route", ["mode", "callable"])
def test_misspelt_keyword_of_generate(model, route):
    call = {"generation_config": SSRConfig(**MARKERS)} if route == "mode" else {"custom_generate": hf_ssr.generate}
    with pytest.raises(ValueError, match="draft_budgts"):
        model.generate(prompt_ids(), max_new_tokens=5, draft_budgts=[4], **call)


def test_keywords_that_contradict(model):
    for call in ({"custom_generate": hf_ssr.generate}, {"generation_config": SSRConfig(**MARKERS)}):
        with pytest.raises(ValueError, match="exclude each other"):
            model.generate(prompt_ids(), max_new_tokens=5, draft_budgets=[4], draft_interval=4, **call)


def test_empty_prompt(model):
    with pytest.raises(ValueError, match="`input_ids`"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), generation_config=SSRConfig(max_new_tokens=5, **MARKERS))


def test_no_markers_is_one_warning_and_suffix_speculation(model):
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    config = SSRConfig(return_dict_in_generate=True, **plain.settings)
    with pytest.warns(UserWarning, match="No thinking markers") as warnings:
        output = run(model, plain.ids, {}, generation_config=config)
    assert len([w for w in warnings if "No thinking markers" in str(w.message)]) == 1
    assert torch.equal(output.sequences, plain.sequences) and output.metrics.accepted_tokens > 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("settings", [{"draft_budgets": []}, {"prediction_ids": [5, 6]}, {"sources": []}])
def test_no_warning_where_nothing_would_fork(model, settings):
    run(model, prompt_ids(), {}, generation_config=SSRConfig(max_new_tokens=8, **settings))


def test_tokenizer_beside_the_model(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=model.dtype)
    ids = torch.cat([prompt_ids(), torch.tensor([[tokenizer.convert_tokens_to_ids("<think>")]])], dim=1)
    config = SSRConfig(max_new_tokens=20, draft_budgets=[2], do_sample=False, return_dict_in_generate=True)
    with pytest.raises(ValueError, match=r"`draft_budgets`=.2. needs thinking markers"):
        run(loaded, ids, {}, generation_config=config)
    tokenizer.save_pretrained(tmp_path)  # found as soon as it is there
    output = run(loaded, ids, {}, generation_config=config)
    assert output.metrics.stages and output.metrics.thinking_tokens == 20
    assert torch.equal(output.sequences, run(model, ids, {"max_new_tokens": 20, "do_sample": False}))


def test_tokenizer_of_the_call(model, tokenizer):
    """The family's markers, from `generate(..., tokenizer=)`."""
    think, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    ids = torch.cat([prompt_ids(), torch.tensor([[think]])], dim=1)
    settings = {"max_new_tokens": 30, "do_sample": False}
    config = SSRConfig(draft_budgets=[2], thinking_budget=9, return_dict_in_generate=True, **settings)
    output = run(model, ids, {}, generation_config=config, tokenizer=tokenizer)
    assert output.metrics.stages and output.metrics.thinking_tokens == 9 + 2  # `\n</think>`
    assert output.sequences[0, 21 + 9 : 21 + 13].tolist() == tokenizer.encode("\n</think>\n\n")
    assert end not in output.sequences[0, : 21 + 9]


def test_round_trip(tmp_path):
    settings = {
        "draft_budgets": [4, 8],
        "max_draft_length": 100,
        "thinking_budget": 50,
        "thinking_start": [[7], [8]],
        "thinking_end": "</think>",
        "forced_close": [4],
        "verify": "exact",
        "num_draft_tokens": 8,
        "min_match_length": 3,
        "sources": ["draft", "prompt"],
        "draft_temperature": 0.5,
        "draft_seed": 3,
        "strict": True,
        "max_new_tokens": 70,
    }
    config = SSRConfig(**settings, prediction_ids=[1, 2])
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    assert "prediction_ids" not in stored
    loaded = SSRConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in settings} == settings
    assert loaded.prediction_ids is None
    assert SSRConfig.from_dict(json.loads(config.to_json_string())) == config
    # a plain class keeps the settings as extra entries, and they come back
    again = SSRConfig.from_config(GenerationConfig.from_pretrained(tmp_path))
    assert {name: getattr(again, name) for name in settings} == settings


def test_defaults_are_to_inherit(model):
    assert all(getattr(SSRConfig(), name) is None for name in SETTINGS)
    parameters = inspect.signature(SSRConfig).parameters.values()
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
    documented = SSRConfig.__doc__
    assert all(f"        {name} (" in documented for name in SETTINGS)


def test_what_a_call_sets_replaces_what_it_inherits():
    config = SSRConfig(draft_interval=5)
    config.update(defaults_only=True, draft_budgets=[3], num_draft_tokens=4)
    assert (config.draft_budgets, config.draft_interval, config.num_draft_tokens) == (None, 5, 4)
    config.update(draft_budgets=[9])
    assert (config.draft_budgets, config.draft_interval) == ([9], None)


def test_inherited_budgets_give_way_to_the_sources_of_a_call():
    config = SSRConfig(sources=["prompt"])
    config.update(defaults_only=True, draft_budgets=[3], prediction_ids=[4])
    assert config.draft_budgets is None and config.prediction_ids is None
    config = SSRConfig(draft_budgets=[3])
    config.update(sources=["prompt"])
    assert config.draft_budgets is None


OTHER_MODES = [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}]


@pytest.mark.parametrize("settings", OTHER_MODES)
@pytest.mark.parametrize("route", ["mode", "callable"])
def test_other_strategies_run_instead(model, settings, route):
    """Beams and prompt lookup are what they are without SSR, with one warning; an error under `strict`."""
    plain = plain_run(model, {"max_new_tokens": 40, "do_sample": False})
    expected = run(model, plain.ids, {**plain.settings, **settings})
    call = {"custom_generate": hf_ssr.generate} if route == "callable" else {}
    with pytest.warns(UserWarning, match="SSR does not apply: other settings ask for") as warnings:
        config = SSRConfig(**MARKERS, **plain.settings, **settings)
        output = run(model, plain.ids, {}, generation_config=config, **call)
    assert torch.equal(output, expected)
    assert len([w for w in warnings if "SSR does not apply" in str(w.message)]) == 1
    with pytest.raises(ValueError, match="`strict`"):
        config = SSRConfig(strict=True, **MARKERS, **plain.settings, **settings)
        run(model, plain.ids, {}, generation_config=config, **call)
    with pytest.raises(ValueError, match="`thinking_budget`=4 is not enforced in"):
        config = SSRConfig(thinking_budget=4, **MARKERS, **plain.settings, **settings)
        run(model, plain.ids, {}, generation_config=config, **call)


PLAIN = {
    "there is no cache": {"use_cache": False},
    "`output_attentions` is set": {"output_attentions": True},
    "`output_hidden_states` is set": {"output_hidden_states": True},
}


@pytest.mark.parametrize("reason", PLAIN)
def test_runs_plain_where_ssr_does_not_apply(model, reason):
    """With one warning that says why, a thinking budget still holds, and `strict` makes it an error."""
    plain = plain_run(model, {"max_new_tokens": 40, "do_sample": True})
    settings = {**plain.settings, **PLAIN[reason], "return_dict_in_generate": True}
    markers = {"thinking_start": [], "thinking_end": [159], "thinking_budget": 6}
    processor = hf_ssr.ThinkingBudgetLogitsProcessor(SSRConfig(**markers), prompt_length=20)
    expected = run(model, plain.ids, settings, logits_processor=[processor])
    with pytest.warns(UserWarning, match=f"SSR does not apply: {reason}") as warnings:
        output = run(model, plain.ids, {}, generation_config=SSRConfig(**markers, **settings))
    assert len(warnings) == 1
    assert torch.equal(output.sequences, expected.sequences)
    assert (output.sequences[:, 26] == 159).all()
    assert reason in output.metrics.plain_reason and reason in str(output.metrics)
    with pytest.raises(ValueError, match=f"{reason}.*`strict`"):
        run(model, plain.ids, {}, generation_config=SSRConfig(strict=True, **markers, **settings))


def test_an_interval_too_short_to_draft(model):
    with pytest.warns(UserWarning, match="`draft_interval`=2 ends each child before it drafts"):
        config = SSRConfig(thinking_start=[], thinking_end=[9], forced_close=[4, 9], draft_interval=2, max_new_tokens=8)
        run(model, prompt_ids(), {}, generation_config=config)


def test_other_unknown_keys_are_kept_as_transformers_keeps_them():
    assert SSRConfig(my_own_note="x").my_own_note == "x"


def test_tensors_are_taken():
    config = SSRConfig(prediction_ids=torch.tensor([1, 2]), draft_budgets=torch.tensor([3]))
    assert (config.prediction_ids, config.draft_budgets) == ([1, 2], [3])
    assert SSRConfig(prediction_ids=torch.tensor([[1, 2]])).prediction_ids == [1, 2]


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({}, [32, 48, 64, 83, 108, 140, 182, 237, 308, 400, 520, 676]),
        ({"draft_budgets": [0, 7, 7, 3]}, [0, 3, 7]),
        ({"draft_interval": 200}, [200, 400, 600]),
        ({"draft_budgets": []}, []),
        ({"sources": ["prompt"]}, []),
        ({"prediction_ids": [1]}, []),
        ({"prediction_ids": [], "draft_budgets": [5]}, [5]),
        ({"prediction_ids": [1], "draft_budgets": [5]}, [5]),
    ],
)
def test_schedule(settings, due):
    schedule = ForkSchedule(SSRConfig(**settings))
    budgets, last = [], None
    while (budget := schedule.next_budget(0 if last is None else last + 1, [], last)) is not None and budget < 700:
        budgets.append(last := budget)
    assert budgets == due
    assert schedule.never == (not due)
