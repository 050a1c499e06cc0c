"""Quantized weights and `device_map="auto"`: the tokens of plain `generate`, or a first difference at a near-tie."""

import pytest
import torch
import transformers
from conftest import Plain, run
from test_wrappers import config_for
from tiny_models import VOCAB_SIZE, prompt_ids
from transformers import AutoModelForCausalLM, DynamicCache

SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
NEAR_TIE = 0.1  # of the scores' standard deviation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in float32 whose widths fit the groups that weights are quantized in."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    folder = tmp_path_factory.mktemp("weights")
    model.save_pretrained(folder)
    return folder


def torchao(name: str, **kwargs):
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(quant_type=getattr(quantization, name)(**kwargs))


def bitsandbytes(**kwargs):
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**kwargs)


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()


def block_error(model, plain) -> float:
    """How far the logits of a block are from those of single steps, in their standard deviations."""
    length, ids = plain.ids.shape[1], plain.sequences[:, : plain.ids.shape[1] + 17]

    def read(parts):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            return torch.cat([model(part, cache=cache).logits for part in (ids[:, :length], *parts)], dim=1)[:, length:]

    steps, block = read(ids[:, length:].split(1, dim=1)), read([ids[:, length:]])
    return ((block - steps).abs().max() / steps.std()).item()


def plain_of(model, seed: int) -> tuple[Plain, tuple[torch.Tensor, ...]]:
    """A plain run over a prompt of that seed, and its scores."""
    ids, settings = prompt_ids(20, seed), {"max_new_tokens": 60, "do_sample": False}
    output = run(model, ids, settings, return_dict_in_generate=True, output_scores=True)
    new = output.sequences[0, 20:].tolist()
    close = next((i for i, token in enumerate(new) if i >= 16 and token not in new[:i]), 16)
    return Plain(ids, output.sequences, settings, close), output.scores


def ssr_of(model, plain: Plain):
    output = run(model, plain.ids, {}, generation_config=config_for(plain.new, plain.close, plain.settings))
    assert output.metrics.plain_reason is None
    return output


def assert_same(model):
    accepted, forwards, stages = 0, 0, 0
    for seed in range(4):
        plain, _ = plain_of(model, seed)
        output = ssr_of(model, plain)
        assert torch.equal(output.sequences, plain.sequences)
        assert block_error(model, plain) < 1e-4
        accepted += output.metrics.accepted_tokens
        forwards += output.metrics.target_forwards
        stages += len(output.metrics.stages)
    assert accepted > 100 and stages and forwards < 4 * 45  # for 4 x 60 tokens


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_alone(folder, kind):
    """A block reads them as a single token does."""
    own = {"weight_dtype": torch.int4} if kind == "IntxWeightOnlyConfig" else {}
    model = load(folder, quantization_config=torchao(kind, **own))
    assert type(model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    assert_same(model)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
ROUNDED = {  # and the least error of a block
    "torchao int8": (lambda: torchao("Int8DynamicActivationInt8WeightConfig"), 1e-3),
    "bitsandbytes 8-bit": (lambda: bitsandbytes(load_in_8bit=True), 1e-3),
    "bitsandbytes 4-bit": (lambda: bitsandbytes(**NF4), 0),
}


@pytest.mark.parametrize("kind", ROUNDED)
def test_activations_rounded_too(folder, kind):
    """
    Where activations are rounded (bitsandbytes in 4 bits: to bfloat16, on a CPU that has it), the last bits of a
    float32 decide between two steps. As in half precision, texts may part at a near-tie.
    """
    config, least_error = ROUNDED[kind]
    model = load(folder, quantization_config=config())
    errors, accepted = [], 0
    for seed in range(8):
        plain, scores = plain_of(model, seed)
        output = ssr_of(model, plain)
        accepted += output.metrics.accepted_tokens + output.metrics.thinking_accepted_tokens
        errors.append(block_error(model, plain))
        ours = output.sequences[0, plain.ids.shape[1] :].tolist()
        place = next((i for i, pair in enumerate(zip(ours, plain.new, strict=True)) if len(set(pair)) > 1), None)
        if place is not None:
            at = scores[place][0]
            assert (at[plain.new[place]] - at[ours[place]]) / at.std() < NEAR_TIE
    assert accepted > 100
    assert max(errors) > least_error  # when this is no more so, the README's table can say "yes"


@pytest.mark.parametrize("memory", [None, 1_500_000])
def test_device_map_auto(folder, memory, tmp_path):
    """On a CPU alone it is one device; where that is too small for the model, the rest lies on the disk."""
    limits = {"max_memory": {"cpu": memory}, "offload_folder": str(tmp_path)} if memory else {}
    model = load(folder, device_map="auto", **limits)
    assert memory is None or set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert_same(model)
