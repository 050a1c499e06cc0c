"""Weights that others quantize or place: the tokens of plain `generate` with the same weights, read in blocks."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    TorchAoConfig,
)

from hf_ssr import SSRConfig
from hf_ssr.bench.reasoner import reasoner_folder
from hf_ssr.bench.tasks import HELD_OUT, draw
from hf_ssr.comparing import prompt_ids

NEW = 700


def torchao():
    quantization = pytest.importorskip("torchao.quantization")
    return {"quantization_config": TorchAoConfig(quantization.Int8WeightOnlyConfig())}


def bitsandbytes_8():
    pytest.importorskip("bitsandbytes")
    return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}


def device_map():
    return {"device_map": "auto"}


@pytest.mark.slow
@pytest.mark.parametrize("way", [torchao, bitsandbytes_8, device_map])
def test_the_reasoner(way):
    folder = reasoner_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **way())
    kind = type(model.model.layers[0].mlp.up_proj.weight).__name__
    assert kind == {torchao: "Int8Tensor", bitsandbytes_8: "Int8Params", device_map: "Parameter"}[way]
    ids = prompt_ids(tokenizer, draw("path", HELD_OUT).prompt)
    call = {"attention_mask": torch.ones_like(ids)}
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False, **call)
    config = SSRConfig.from_tokenizer(
        tokenizer, max_new_tokens=NEW, do_sample=False, max_overhead="off", return_dict_in_generate=True
    )
    output = model.generate(ids, generation_config=config, **call)
    assert output.metrics.plain_reason is None
    assert torch.equal(output.sequences, plain)
    assert output.metrics.target_forwards < 0.6 * output.metrics.new_tokens


@pytest.mark.slow
def test_bitsandbytes_in_4_bits(tmp_path):
    """Of a random model, whose sizes are multiples of bitsandbytes' blocks."""
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    heads = {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": 192, "initializer_range": 0.2}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, eos_token_id=None, pad_token_id=0)).save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=settings)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    ids = torch.arange(20)[None] + 5
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 60, "do_sample": False}
    plain = model.generate(ids, **call)
    new = plain[0, 20:].tolist()
    close = max(place for place, token in enumerate(new[:40]) if token not in new[:place])
    markers = {"thinking_start": [], "thinking_end": [new[close]], "draft_budgets": [3]}
    config = SSRConfig(**markers, max_overhead="off", return_dict_in_generate=True)
    output = model.generate(ids, generation_config=config, prediction_ids=new[close + 1 :], **call)
    assert output.metrics.plain_reason is None
    assert torch.equal(output.sequences, plain)
    assert output.metrics.accepted_tokens > 10
