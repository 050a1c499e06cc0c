"""What is tried before SSR is trusted with a model: blocks, windows, two texts in one row, random draws."""

import threading
import warnings

import pytest
import torch
import transformers
from conftest import build_once, run
from tiny_models import VOCAB_SIZE, build, prompt_ids
from torch import nn

import hf_ssr.self_check
import hf_ssr.self_trials
from hf_ssr import SSRConfig
from hf_ssr.self_check import tells_texts_apart, why_not_in_blocks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SETTINGS = {"max_new_tokens": 40, "do_sample": True, "top_k": 20}


def ssr(model, ids, seed: int = 7, **settings):
    """SSR with a child and a prediction, from a seed."""
    config = SSRConfig(
        thinking_start=[],
        thinking_end=[159],
        draft_budgets=[4],
        max_overhead="off",
        return_dict_in_generate=True,
        **{**SETTINGS, **settings},
    )
    return run(model, ids, {}, seed, generation_config=config)


def moshi(window: int, dtype: torch.dtype = torch.float64):
    """A model whose cache slides, and its mask does not."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MoshiConfig(
        vocab_size=VOCAB_SIZE, head_dim=16, ffn_dim=96, sliding_window=window, max_position_embeddings=5000, **sizes
    )
    model = transformers.MoshiForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [8, 64, 4096])
def test_a_window_that_the_mask_does_not_know(window, dtype):
    model = moshi(window, dtype)
    assert "reads them one by one" in why_not_in_blocks(model, [window])
    if window > 16:
        assert why_not_in_blocks(model) is None  # nothing shows in a short text
        assert f"its window of {window} tokens" in why_not_in_blocks(model, [window])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [8, 64, 4096])
@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "gemma4", "gpt_oss", "olmo3", "cohere2"])
def test_windows_that_it_knows(architecture, window, dtype):
    assert why_not_in_blocks(build(architecture, dtype, sliding_window=window), [window]) is None


def test_windows_are_tried_where_a_text_may_pass_them():
    model = moshi(64)
    ids = prompt_ids()
    assert ssr(model, ids, max_new_tokens=40).metrics.plain_reason is None
    expected = run(model, ids, {**SETTINGS, "max_new_tokens": 60})
    with pytest.warns(UserWarning, match="its window of 64 tokens"):
        output = ssr(model, ids, max_new_tokens=60)
    assert torch.equal(output.sequences, expected)


def without_cache():
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
    return transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(vocab_size=VOCAB_SIZE, **sizes))


def with_a_cache_of_its_own():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "dim_head": 16, "dim_ff": 96, "num_hidden_layers": 2}
    return transformers.CpmAntForCausalLM(transformers.CpmAntConfig(vocab_size=VOCAB_SIZE, **sizes))


def with_n_streams():
    sizes = {"hidden_size": 64, "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    kind = {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": False}
    config = transformers.ProphetNetConfig(vocab_size=VOCAB_SIZE, **sizes, **kind)
    return transformers.ProphetNetForCausalLM(config)


@pytest.mark.parametrize(
    "make, reason",
    [(without_cache, "returns no `cache`"), (with_a_cache_of_its_own, "CpmAnt"), (with_n_streams, "ProphetNet")],
)
def test_what_cannot_be_tried_runs_plain(make, reason):
    torch.manual_seed(0)
    model, ids = make().eval(), prompt_ids()
    expected = run(model, ids, SETTINGS)
    with pytest.warns(UserWarning, match=reason):
        assert torch.equal(ssr(model, ids).sequences, expected)


@pytest.mark.parametrize(
    "architecture, settings",
    [("qwen3", {"attention_dropout": 0.2}), ("mistral", {"attention_dropout": 0.2}), ("phi3", {"resid_pdrop": 0.2})],
)
def test_dropout_in_training_mode_runs_plain(architecture, settings):
    """With the tokens of plain `generate`: nothing was drawn before."""
    model, ids = build(architecture, **settings).train(), prompt_ids()
    expected = run(model, ids, SETTINGS)
    with pytest.warns(UserWarning, match="call `model.eval\\(\\)`") as caught:
        assert torch.equal(ssr(model, ids).sequences, expected)
    assert len(caught) == 1
    with pytest.raises(ValueError, match=r"draws random numbers.*`strict` is set"):
        ssr(model, ids, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = ssr(model.eval(), ids)
    assert output.metrics.plain_reason is None and output.metrics.stages
    assert torch.equal(output.sequences, run(model, ids, SETTINGS))


def test_dropout_in_a_part_that_trains():
    model, ids = build("phi3", resid_pdrop=0.2), prompt_ids()
    model.model.layers[1].train()
    expected = run(model, ids, SETTINGS)
    with pytest.warns(UserWarning, match="draws random numbers"):
        assert torch.equal(ssr(model, ids).sequences, expected)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert ssr(model, ids).metrics.plain_reason is None  # a rate that changes is seen
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    assert "draws random numbers" in ssr(model, ids).metrics.plain_reason


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5"])
def test_training_mode_without_dropout(architecture):
    model, ids = build(architecture).train(), prompt_ids()
    output = ssr(model, ids)
    assert output.metrics.plain_reason is None and output.metrics.stages
    assert torch.equal(output.sequences, run(model, ids, SETTINGS))


def test_draws_of_evaluation_mode(monkeypatch):
    """However a model draws, plain `generate` draws in between."""
    model, ids = build("qwen3"), prompt_ids()
    forward = type(model.model).forward

    def noisy(self, *args, **kwargs):
        torch.rand(())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", noisy)
    expected = run(model, ids, SETTINGS)
    with pytest.warns(UserWarning, match="draws random numbers in its forward;"):
        assert torch.equal(ssr(model, ids).sequences, expected)


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5", "lfm2"])
def test_generators_and_the_default_device_are_no_matter(architecture, device):
    model = build(architecture, torch.float32)
    state = torch.default_generator.get_state()
    with torch.device(device) if device else torch.no_grad():  # "meta" stands for one that is not the model's
        assert why_not_in_blocks(model) is None
        assert tells_texts_apart(model) or architecture != "qwen3"
    assert torch.equal(torch.default_generator.get_state(), state)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, KeyError])
def test_an_error_is_not_kept(error, monkeypatch):
    model, ids = build("qwen3_5"), prompt_ids()
    expected = run(model, ids, SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(hf_ssr.self_trials, "_random_ids", lambda *_: (_ for _ in ()).throw(error("for once")))
        with pytest.warns(UserWarning, match="no memory" if error is torch.OutOfMemoryError else "for once"):
            assert torch.equal(ssr(model, ids).sequences, expected)
    assert ssr(model, ids).metrics.plain_reason is None


class Autocast:
    """As `Accelerator.prepare_model` wraps a forward: autocast is on inside of it only."""

    def __init__(self, model):
        self.forward = model.forward

    def __call__(self, *args, **kwargs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.forward(*args, **kwargs)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5", "lfm2", "mamba2"])
def test_autocast(architecture):
    """Its rounding is no fault, and what was found in it says nothing about float32."""
    model = build(architecture, torch.float32)

    def is_trusted():
        return why_not_in_blocks(model) is None and (architecture != "qwen3" or tells_texts_apart(model))

    model.forward = Autocast(model)
    assert is_trusted()
    del model.forward
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_trusted()
    assert is_trusted()
    assert len({key[2] for key in hf_ssr.self_check._results[model]}) == 3


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5", "lfm2"])
def test_norms_of_another_precision(architecture):
    """float32 embeddings and norms over bfloat16 layers, under autocast: as PEFT prepares a quantized model."""
    model = build(architecture, torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or "embed" in name or "lm_head" in name:
            parameter.data = parameter.data.float()
    assert model.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert why_not_in_blocks(model) is None
        assert tells_texts_apart(model) or architecture != "qwen3"


def test_hooks_do_not_see_it(count_forwards):
    model = build("gemma3")
    counter = count_forwards(model)
    assert why_not_in_blocks(model, [8]) is None
    assert counter.count == 0


def test_threads_that_sample():
    """What another thread draws while one tries is not taken for the model's."""
    model, ids, reasons = build("qwen3"), prompt_ids(), []

    def generate():
        reasons.append(ssr(model, ids).metrics.plain_reason)

    threads = [threading.Thread(target=generate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reasons == [None] * 4


def test_a_thread_that_draws_all_the_time():
    """A service that samples in one thread, while another makes the first call of a model."""
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            torch.rand(10)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        assert why_not_in_blocks(build("qwen3")) is None
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("architecture", ["jamba", "mamba", "falcon_mamba", "recurrent_gemma", "minimax"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_states_that_a_block_drops(architecture, dtype):
    assert why_not_in_blocks(build_once(architecture, dtype=dtype)) is not None
