"""All routes into SSR give the same tokens, stream and output object."""

import json
import subprocess
import sys
import textwrap
import warnings
from threading import Thread

import pytest
import torch
from conftest import plain_run, run
from tiny_models import prompt_ids
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3ForCausalLM,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import hf_ssr
from hf_ssr import SSRConfig, SSRGenerationMixin, SSROutput
from hf_ssr.command.exporting import export
from hf_ssr.target import Target


class Recorder(BaseStreamer):
    def __init__(self):
        self.tokens, self.ends = [], 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ends += 1


class MixedModel(SSRGenerationMixin, Qwen3ForCausalLM):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ssr_folder")
    export(folder)
    return str(folder)


@pytest.fixture
def plain(model):
    return plain_run(model, {"max_new_tokens": 64, "do_sample": True, "top_k": 20})


def settings_of(plain) -> dict:
    """Drafts of any cost: a folder's copy measures them, and this machine may be busy."""
    markers = {"thinking_start": [], "thinking_end": [plain.marker]}
    return {**markers, "draft_budgets": [4], "prediction_ids": plain.answer, "max_overhead": "off"}


def check(output, plain, streamer):
    """Same tokens, same stream, SSR did it."""
    assert type(output).__name__ == SSROutput.__name__
    assert torch.equal(output.sequences, plain.sequences)
    assert output.metrics.accepted_tokens > 0 and output.metrics.stages
    assert streamer.tokens == plain.sequences[0].tolist()
    assert streamer.ends == 1


def mixed(model):
    mixed = MixedModel(model.config).to(model.dtype).eval()
    mixed.load_state_dict(model.state_dict())
    return mixed


OUT = {"return_dict_in_generate": True}


def test_generation_mode(model, plain):
    streamer = Recorder()
    config = SSRConfig(**settings_of(plain), **plain.settings, **OUT)
    before = config.to_dict()
    check(run(model, plain.ids, {}, generation_config=config, streamer=streamer), plain, streamer)
    assert config.to_dict() == before


def test_mixin_with_a_config_on_the_model(model, plain):
    model, streamer = mixed(model), Recorder()
    model.generation_config = SSRConfig(
        **settings_of(plain), eos_token_id=2, do_sample=True, top_k=20, max_new_tokens=64
    )
    check(run(model, plain.ids, OUT, streamer=streamer), plain, streamer)
    # a plain config asks for plain decoding
    output = run(model, plain.ids, {}, generation_config=GenerationConfig(**plain.settings, **OUT))
    assert not isinstance(output, SSROutput)
    # what a call sets replaces what it inherits
    output = run(model, plain.ids, {**OUT, "draft_interval": 6})
    assert [s.draft_budget for s in output.metrics.stages][:2] == [6, 12]


def test_callable(model, plain):
    streamer = Recorder()
    config = SSRConfig(**settings_of(plain), **plain.settings, **OUT)
    output = run(model, plain.ids, {}, generation_config=config, streamer=streamer, custom_generate=hf_ssr.generate)
    check(output, plain, streamer)
    streamer = Recorder()  # and with settings as keywords
    output = run(
        model,
        plain.ids,
        {**plain.settings, **OUT, **settings_of(plain)},
        streamer=streamer,
        custom_generate=hf_ssr.generate,
    )
    check(output, plain, streamer)


def test_callable_does_not_hang_a_threaded_stream(model, plain, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    kwargs = {"streamer": streamer, "custom_generate": hf_ssr.generate, **settings_of(plain)}
    thread = Thread(target=run, args=(model, plain.ids, plain.settings), kwargs=kwargs)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(plain.sequences[0])


def test_callable_sees_the_tokenizer(model, tokenizer):
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    settings = {**settings_of(plain), "thinking_end": tokenizer.decode([plain.marker])}
    output = run(
        model, plain.ids, {**plain.settings, **OUT, **settings}, tokenizer=tokenizer, custom_generate=hf_ssr.generate
    )
    assert torch.equal(output.sequences, plain.sequences) and output.metrics.accepted_tokens > 0


def test_direct_call(model, plain):
    torch.manual_seed(7)
    output = hf_ssr.generate(
        model, plain.ids, eos_token_id=None, pad_token_id=0, **plain.settings, **OUT, **settings_of(plain)
    )
    assert torch.equal(output.sequences, plain.sequences)


def test_direct_call_takes_what_generate_takes(model, plain):
    torch.manual_seed(7)
    config = SSRConfig(**settings_of(plain), **plain.settings)
    model.generation_config.eos_token_id, eos = None, model.generation_config.eos_token_id
    try:
        assert torch.equal(hf_ssr.generate(model, plain.ids, config), plain.sequences)
    finally:
        model.generation_config.eos_token_id = eos


def test_folder(model, plain, folder):
    streamer = Recorder()
    call = {"custom_generate": folder, "trust_remote_code": True, "streamer": streamer}
    check(run(model, plain.ids, {**plain.settings, **OUT, **settings_of(plain)}, **call), plain, streamer)


def test_folder_takes_an_installed_config(model, plain, folder):
    streamer = Recorder()
    config = SSRConfig(**settings_of(plain), **plain.settings, **OUT)
    call = {"custom_generate": folder, "trust_remote_code": True, "streamer": streamer}
    output = run(model, plain.ids, {}, generation_config=config, **call)
    check(output, plain, streamer)
    assert not isinstance(output, SSROutput)  # the copy has classes of its own


def test_folder_with_stop_strings(model, tokenizer, folder):
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    stop = {"stop_strings": [tokenizer.decode(plain.new[-8:-6])], "tokenizer": tokenizer}
    expected = run(model, plain.ids, {**plain.settings, **stop})
    output = run(
        model,
        plain.ids,
        {**plain.settings, **stop, **settings_of(plain), **OUT},
        custom_generate=folder,
        trust_remote_code=True,
    )
    assert expected.shape[1] < plain.sequences.shape[1]
    assert torch.equal(output.sequences, expected) and output.metrics.accepted_tokens > 0


def test_folder_needs_trust(model, plain, folder):
    with pytest.raises(ValueError, match="trust_remote_code"):
        run(model, plain.ids, plain.settings, custom_generate=folder, trust_remote_code=False)


def test_none_as_a_keyword_means_none(model, plain, folder):
    """`eos_token_id=None`: inside a config "inherit", as a keyword "none"; the same on every route."""
    assert model.generation_config.eos_token_id == 2
    inside = SSRConfig(**settings_of(plain), **plain.settings, eos_token_id=None)
    torch.manual_seed(7)
    inherits = model.generate(plain.ids, generation_config=GenerationConfig(**plain.settings, eos_token_id=None))
    torch.manual_seed(7)
    assert torch.equal(model.generate(plain.ids, generation_config=inside), inherits)
    for route in ({"custom_generate": hf_ssr.generate}, {"custom_generate": folder, "trust_remote_code": True}):
        output = run(model, plain.ids, {**plain.settings, **settings_of(plain)}, **route)
        assert torch.equal(output, plain.sequences)


def test_model_folder(model, plain, tmp_path, folder):
    model.save_pretrained(tmp_path)
    # settings may also lie in the folder's own generation config
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    del stored["_from_model_config"]  # with it transformers drops what it does not know
    (tmp_path / "generation_config.json").write_text(json.dumps({**stored, "draft_budgets": [4]}))
    export(tmp_path)
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, dtype=model.dtype)
    streamer = Recorder()
    settings = {**plain.settings, **OUT, **settings_of(plain)}
    del settings["draft_budgets"]
    output = run(loaded, plain.ids, settings, streamer=streamer)  # inputs are positional
    check(output, plain, streamer)
    assert [s.draft_budget for s in output.metrics.stages] == [4]


@pytest.mark.parametrize("way", ["mode", "function", "folder", "model folder", "mixin"])
def test_settings_in_generation_config_json(model, plain, folder, tmp_path, way):
    """Each way inherits them; a keyword of the call goes before them. Alone they turn nothing on."""
    model.save_pretrained(tmp_path)
    SSRConfig(**{**settings_of(plain), "draft_budgets": [4, 9]}, eos_token_id=2).save_pretrained(tmp_path)
    loaded = MixedModel.from_pretrained(tmp_path, dtype=model.dtype)
    assert not isinstance(loaded.generation_config, SSRConfig) and loaded.generation_config.draft_budgets == [4, 9]
    settings, call = {**plain.settings, **OUT}, {}
    output = run(loaded, plain.ids, settings)
    assert torch.equal(output.sequences, plain.sequences) and not hasattr(output, "metrics")
    if way == "mode":
        settings, call = {}, {"generation_config": SSRConfig(**settings)}
    elif way == "function":
        call = {"custom_generate": hf_ssr.generate}
    elif way == "folder":
        call = {"custom_generate": folder, "trust_remote_code": True}
    elif way == "model folder":
        export(tmp_path)
        loaded = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=model.dtype, trust_remote_code=True)
    else:
        loaded.generation_config = SSRConfig.from_pretrained(tmp_path)
    for budgets in ([4, 9], [6]):
        output = run(loaded, plain.ids, settings, **call)
        assert torch.equal(output.sequences, plain.sequences)
        assert [s.draft_budget for s in output.metrics.stages] == budgets
        if way == "mode":
            call["generation_config"].draft_budgets = [6]
        else:
            settings["draft_budgets"] = [6]


def test_nothing_installed(model, plain, tmp_path):
    """A fresh interpreter that cannot import `hf_ssr`: both Hub routes give the same tokens."""
    model.save_pretrained(tmp_path)
    export(tmp_path)
    torch.save(plain, tmp_path / "plain.pt")
    settings = {**plain.settings, **settings_of(plain), "eos_token_id": None, "pad_token_id": 0}
    script = f"""
        import sys
        class Blocked:
            def find_spec(self, name, *rest):
                if name.split(".")[0] == "hf_ssr":
                    raise ImportError("hf_ssr is not installed")
        sys.meta_path.insert(0, Blocked())
        import torch
        from transformers import AutoModelForCausalLM
        folder = {str(tmp_path)!r}
        ids, expected = torch.tensor({plain.ids.tolist()}), torch.tensor({plain.sequences.tolist()})
        settings = {settings!r}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        torch.manual_seed(7)
        settings["return_dict_in_generate"] = True
        out = model.generate(ids, custom_generate=folder, trust_remote_code=True, **settings)
        assert torch.equal(out.sequences, expected) and out.metrics.accepted_tokens > 0
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, trust_remote_code=True)
        torch.manual_seed(7)
        out = model.generate(ids, **settings)
        assert torch.equal(out.sequences, expected) and out.metrics.accepted_tokens > 0
        print("both routes agree")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "both routes agree" in result.stdout


@pytest.mark.parametrize("where", ["call", "construction"])
def test_pipeline(model, tokenizer, where, monkeypatch):
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False}, eos_token_id=2)
    prompt = tokenizer.decode(plain.ids[0])
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=60, do_sample=False, pad_token_id=0)
    new = expected[0, ids.shape[1] :].tolist()
    close = next(i for i, t in enumerate(new) if i > 14 and t not in new[:i])
    config = SSRConfig(
        thinking_start=[], thinking_end=[new[close]], draft_budgets=[4], max_new_tokens=60, do_sample=False
    )
    heard = []
    drafting = Target.fork
    monkeypatch.setattr(Target, "fork", lambda *args: heard.append(1) or drafting(*args))
    at_construction = {"generation_config": config} if where == "construction" else {}
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, **at_construction)
    at_call = {"generation_config": config} if where == "call" else {}
    result = pipe(prompt, return_tensors=True, **at_call)
    assert result[0]["generated_token_ids"] == expected[0].tolist()
    assert heard  # SSR did it


def test_our_drafter_drives_assisted_decoding(model):
    """transformers' own loop with our drafter, through the mixin."""
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    model = mixed(model)
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    config = SSRConfig(prediction_ids=plain.new, num_draft_tokens=9, prompt_lookup_num_tokens=3, **plain.settings)
    with pytest.warns(UserWarning, match="running assisted generation"):
        output = run(model, plain.ids, {}, generation_config=config)
    assert torch.equal(output, plain.sequences)
    assert len(forwards) == 6  # 10 tokens each
    wrong = SSRConfig(prediction_ids=plain.new[30:], prompt_lookup_num_tokens=3, **plain.settings)
    assert torch.equal(run(model, plain.ids, {}, generation_config=wrong), plain.sequences)
    wrong.prediction_ids = [plain.new, plain.new]
    with pytest.raises(ValueError, match="holds 2 lists, but the batch has 1 prompts"):
        run(model, plain.ids, {}, generation_config=wrong)


@pytest.mark.parametrize(
    "route", ["manager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("generate_batch", "paged"))]
)
def test_continuous_batching_says_that_ssr_is_left_out(model, route):
    """One warning, an error under `strict`, and the model is as before."""
    ids, marker = prompt_ids(), 159
    settings = {"thinking_start": [], "thinking_end": [marker], "forced_close": [marker], "thinking_budget": 3}
    settings |= {"max_new_tokens": 8, "eos_token_id": 158, "do_sample": False}
    expected = run(model, ids, {}, generation_config=SSRConfig(**settings), eos_token_id=158)
    attention = model.config._attn_implementation

    def call(config):
        if route == "generate_batch":
            shared = ContinuousBatchingConfig()
            return model.generate_batch([ids[0].tolist()], generation_config=config, continuous_batching_config=shared)
        if route == "paged":
            return model.generate(ids, generation_config=config, cache_implementation="paged")
        return model.init_continuous_batching(generation_config=config)

    try:
        with pytest.raises(ValueError, match=r"SSR does not apply: continuous batching.*`thinking_budget`; `strict`"):
            call(SSRConfig(strict=True, **settings))
        assert model.config._attn_implementation == attention
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(SSRConfig(**settings))
        told = [str(w.message) for w in caught if "SSR does not apply" in str(w.message)]
        assert len(told) == 1 and "does not enforce `thinking_budget`" in told[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            call(GenerationConfig(max_new_tokens=8, eos_token_id=158, do_sample=False))
    finally:
        model.set_attn_implementation(attention)
    assert torch.equal(run(model, ids, {}, generation_config=SSRConfig(**settings), eos_token_id=158), expected)
    assert hf_ssr.ThinkingBudgetLogitsProcessor.supports_continuous_batching is False
