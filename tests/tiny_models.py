"""Tiny random models of many architectures: 2 to 4 layers, 64 wide, windows of 8: every cache kind is cheap to try."""

import torch
import transformers

VOCAB_SIZE = 160
EOS = 2
_COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
_DENSE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_HEAD = {"head_dim": 16}
_SLIDING = {"sliding_window": 8, "num_hidden_layers": 4}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
}
_MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}

# architecture: (config class, model class, settings, kind of cache)
ARCHITECTURES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_hidden_layers": 3}, "full"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_hidden_layers": 3}, "full"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 3, **_HEAD}, "full"),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_hidden_layers": 3, **_HEAD, **_MOE, "num_experts": 4},
        "full",
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {"num_hidden_layers": 3, **_MLA, **_MOE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1},
        "full",
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {"num_hidden_layers": 3, **_HEAD, **_MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1},
        "full",
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"num_hidden_layers": 4}, "full"),
    "minimax_m2": (
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {"num_hidden_layers": 3, **_HEAD, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
        "full",
    ),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", {"num_hidden_layers": 3, **_HEAD}, "full"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"num_hidden_layers": 3}, "full"),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"num_hidden_layers": 3}, "full"),
    "mistral": ("MistralConfig", "MistralForCausalLM", _SLIDING, "sliding"),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**_SLIDING, **_HEAD, **_ALTERNATING, "query_pre_attn_scalar": 16},
        "sliding, full",
    ),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_SLIDING,
            **_HEAD,
            **_ALTERNATING,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
        },
        "sliding, full",
    ),
    "gemma4_shared": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_SLIDING,
            **_HEAD,
            **_ALTERNATING,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
        }
        | {"num_kv_shared_layers": 2},
        "sliding, full, shared",
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_SLIDING, **_HEAD, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
        "sliding, full",
    ),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", _SLIDING, "sliding, full"),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", {**_SLIDING, "sliding_window_pattern": 2}, "sliding, full"),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", _SLIDING, "sliding, full"),
}
# architecture: (seed, sharpness) with which the greedy text from `prompt_ids` goes on without falling into a short loop
_LIVELY = {
    "llama": (2, 3.0),
    "qwen2": (0, 5.0),
    "qwen3": (2, 3.0),
    "qwen3_moe": (15, 3.0),
    "glm4_moe": (12, 3.0),
    "smollm3": (0, 8.0),
    "minimax_m2": (9, 3.0),
    "seed_oss": (0, 5.0),
    "phi3": (2, 3.0),
    "granite": (2, 3.0),
    "gemma3": (1, 2.0),
    "cohere2": (0, 5.0),
}


def prompt_ids(length: int = 20, seed: int = 3) -> torch.LongTensor:
    """A random prompt, shape `(1, length)`."""
    return torch.randint(3, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))


def build(name: str, dtype: torch.dtype = torch.float64, **settings):
    """A random model of an architecture."""
    config_class, model_class, own, _ = ARCHITECTURES[name]
    seed, sharpness = _LIVELY.get(name, (0, 3.0))
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**_COMMON, **_DENSE, **own, **settings})
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and any(part in parameter_name for part in ("proj", "lm_head", "embed", "experts")):
                parameter.mul_(sharpness)
    if "experts" in "".join(parameter_name for parameter_name, _ in model.named_parameters()):
        model.set_experts_implementation("eager")  # the grouped kernel takes no float64
    return model.eval().to(dtype)
