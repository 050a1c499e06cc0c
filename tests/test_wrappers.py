"""Models around a text model: images in the prompt and positions of three dimensions; chunked attention and prefill."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from accelerate import disk_offload
from conftest import build_once, plain_run, run
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB_SIZE, build, prompt_ids

from hf_ssr import SSRConfig

TEXT = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE, IMAGE_START, IMAGE_END = 150, 152, 153
MARKS = {"image_token_id": IMAGE, "video_token_id": 151}
MARKS |= {"vision_start_token_id": IMAGE_START, "vision_end_token_id": IMAGE_END}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
VISION |= {"num_position_embeddings": 16}


def lively(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "visual" not in name:
                parameter.mul_(4)
    return model.eval()


def qwen3_5_with_images():
    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = transformers.Qwen3_5Config(text_config=TEXT | linear, vision_config=VISION, **MARKS)
    torch.manual_seed(0)
    return lively(transformers.Qwen3_5ForConditionalGeneration(config)).double()


def qwen3_vl():
    rope = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
    vision = VISION | {"deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(text_config=TEXT | rope, vision_config=vision, **MARKS)
    torch.manual_seed(0)
    return lively(transformers.Qwen3VLForConditionalGeneration(config)).double()


def image(model) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The tokens of one image, and its pixels."""
    vision, patches = model.config.vision_config, 16
    tokens = [IMAGE_START, *[IMAGE] * (patches // vision.spatial_merge_size**2), IMAGE_END]
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(patches, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return tokens, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}


def llama4(**settings):
    config = transformers.Llama4TextConfig(
        **TEXT,
        **settings,
        intermediate_size_mlp=96,
        num_local_experts=4,
        attention_chunk_size=8,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = lively(transformers.Llama4ForCausalLM(config))
    model.set_experts_implementation("eager")
    return model.double()


def config_for(new: list[int], close: int, settings: dict) -> SSRConfig:
    prediction = [*new[close + 1 : close + 9], 5, *new[close + 10 :]]
    return SSRConfig(
        thinking_start=[],
        thinking_end=[new[close]],
        draft_budgets=[3],
        prediction_ids=prediction,
        num_draft_tokens=6,
        return_dict_in_generate=True,
        **settings,
    )


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 20}])
def test_an_image_in_the_prompt(sampling):
    """Positions of shape `(4, batch_size, sequence_length)`, and pixels that only the prefill reads."""
    model = qwen3_5_with_images()
    tokens, inputs = image(model)
    text = prompt_ids()
    ids = torch.cat([text[:, :5], torch.tensor([tokens]), text[:, 5:]], dim=1)
    inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    settings = {"max_new_tokens": 60, "repetition_penalty": 1.2, **sampling}
    expected = run(model, ids, settings, **inputs)
    new = expected[0, ids.shape[1] :].tolist()
    close = next(i for i, token in enumerate(new) if i > 14 and token not in new[:i])
    output = run(model, ids, {}, generation_config=config_for(new, close, settings), **inputs)
    assert torch.equal(output.sequences, expected)
    assert output.metrics.stages and output.metrics.accepted_tokens > 20


def test_images_in_some_prompts_of_a_batch():
    """Positions of shape `(3, batch_size, sequence_length)`, and fewer images than rows."""
    model = qwen3_vl()
    tokens, inputs = image(model)
    text = prompt_ids(12)[0].tolist()
    rows = [text[:5] + tokens + text[5:], text, text[4:11]]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    inputs |= {"mm_token_type_ids": (ids == IMAGE).long(), "attention_mask": (ids != 0).long()}
    settings = {"max_new_tokens": 40, "repetition_penalty": 1.2, "do_sample": False}
    expected = run(model, ids, settings, **inputs)
    assert all(len(set(row)) >= 12 for row in expected[:, width:].tolist())
    config = SSRConfig(
        thinking_start=[],
        thinking_end=[[row[12]] for row in expected[:, width:].tolist()],
        draft_budgets=[2],
        prediction_ids=[[*row[13:20], 5, *row[21:]] for row in expected[:, width:].tolist()],
        return_dict_in_generate=True,
        **settings,
    )
    output = run(model, ids, {}, generation_config=config, **inputs)
    assert output.metrics.plain_reason is None and output.metrics.accepted_tokens > 20
    assert torch.equal(output.sequences, expected)


@pytest.mark.parametrize("tuning", [False, True])
def test_chunked_attention_in_a_batch(tuning):
    """With Llama 4's attention scale, which depends on the place in the cache, it runs plain."""
    model = llama4(attn_temperature_tuning=tuning, floor_scale=4)
    ids = torch.cat([torch.nn.functional.pad(prompt_ids(n, n), (20 - n, 0)) for n in (20, 11, 5)])
    mask = torch.stack([(torch.arange(20) >= 20 - n).long() for n in (20, 11, 5)])
    settings = {"max_new_tokens": 40, "repetition_penalty": 1.2, "do_sample": False, "attention_mask": mask}
    expected = run(model, ids, settings)
    answers = [[*row[12:20], 5, *row[21:]] for row in expected[:, 20:].tolist()]
    ends = [[row[11]] for row in expected[:, 20:].tolist()]
    config = SSRConfig(thinking_start=[], thinking_end=ends, prediction_ids=answers, draft_budgets=[2])
    config.update(**{**settings, "return_dict_in_generate": True})
    output = run(model, ids, {"attention_mask": mask}, generation_config=config)
    assert torch.equal(output.sequences, expected)
    if tuning:
        assert "scales its attention by the place in the cache" in output.metrics.plain_reason
    else:
        assert output.metrics.plain_reason is None and output.metrics.accepted_tokens > 20


def test_chunked_attention():
    model = llama4()
    plain = plain_run(model, {"max_new_tokens": 60, "repetition_penalty": 1.2, "do_sample": False})
    output = run(model, plain.ids, {}, generation_config=config_for(plain.new, plain.close, plain.settings))
    assert torch.equal(output.sequences, plain.sequences)
    assert output.metrics.stages and output.metrics.accepted_tokens > 20


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5"])
def test_chunked_prefill(architecture):
    model = build_once(architecture)
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    config = config_for(plain.new, plain.close, {**plain.settings, "prefill_chunk_size": 7})
    output = run(model, plain.ids, {}, generation_config=config)
    assert torch.equal(output.sequences, plain.sequences)


def test_two_threads_on_two_models():
    models = [build("qwen3"), build("gemma3")]
    plains = [plain_run(model, {"max_new_tokens": 60, "do_sample": False}) for model in models]

    def answer(index: int):
        plain = plains[index]
        config = config_for(plain.new, plain.close, plain.settings)
        return [run(models[index], plain.ids, {}, generation_config=config).sequences for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        for plain, outputs in zip(plains, pool.map(answer, range(2)), strict=True):
            assert all(torch.equal(output, plain.sequences) for output in outputs)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5"])
@pytest.mark.measured_costs
def test_threads_on_one_model(architecture):
    """They share what was measured of it, and nothing else: as with plain `generate`, each text is its own."""
    model = build_once(architecture)
    plains = [plain_run(model, {"max_new_tokens": n, "do_sample": False}) for n in (60, 50, 40)]

    def answer(plain):
        config = config_for(plain.new, plain.close, plain.settings)
        config.update(prediction_ids=None, draft_budgets="auto" if len(plain.new) == 50 else [3], max_overhead="off")
        return [run(model, plain.ids, {}, generation_config=config) for _ in range(3)]

    with ThreadPoolExecutor(3) as pool:
        for plain, outputs in zip(plains, pool.map(answer, plains), strict=True):
            assert all(torch.equal(output.sequences, plain.sequences) for output in outputs)
            assert all(output.metrics.target_forwards < len(plain.new) + 1 for output in outputs)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5"])
def test_weights_offloaded_by_accelerate(architecture, tmp_path):
    model = build(architecture)
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    output = run(model, plain.ids, {}, generation_config=config_for(plain.new, plain.close, plain.settings))
    assert torch.equal(output.sequences, plain.sequences)
    assert output.metrics.stages and output.metrics.accepted_tokens > 20


def test_a_lora_adapter():
    """Its weights are in the target's forwards, drafts and blocks too; another adapter, another text."""
    model = build("qwen3")
    base = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=32, init_lora_weights=False, target_modules=["q_proj"]))
    plain = plain_run(adapted.double().eval(), {"max_new_tokens": 60, "do_sample": False})
    assert not torch.equal(plain.sequences, base.sequences)
    output = run(adapted, plain.ids, {}, generation_config=config_for(plain.new, plain.close, plain.settings))
    assert torch.equal(output.sequences, plain.sequences)
    assert output.metrics.stages and output.metrics.accepted_tokens > 20
