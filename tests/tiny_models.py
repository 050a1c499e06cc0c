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
_LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
_LAYERS = {"num_hidden_layers": 4}
_SHARED_MOE = {**_MOE, "shared_expert_intermediate_size": 32, "num_experts": 4}

# A state instead of keys and values in some layers, or in all.
RECURRENT = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_LAYERS, **_HEAD, **_LINEAR}, "delta rule, full"),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_LAYERS, **_HEAD, **_LINEAR, **_SHARED_MOE},
        "delta rule, full",
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_LAYERS, **_HEAD, **_LINEAR, **_SHARED_MOE},
        "delta rule, full",
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**_LAYERS, **_MAMBA, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"] * 2},
        "recurrent, full",
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "num_hidden_layers": 3, "n_groups": 2, "chunk_size": 8},
        "recurrent",
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**_MAMBA, "num_hidden_layers": 3, "mamba_d_ssm": 128},
        "recurrent and full in each layer",
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**_HEAD, "hybrid_override_pattern": "M*M-", "mamba_num_heads": 8, "mamba_head_dim": 16}
        | {"ssm_state_size": 16, "chunk_size": 8, "n_groups": 2},
        "recurrent, full, none",
    ),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        {**_LAYERS, **_MAMBA, "attn_layer_indices": [1, 3]},
        "recurrent, full",
    ),
    "zamba2": (
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {**_LAYERS, "num_key_value_heads": 4, "attention_head_dim": 32, "mamba_headdim": 16, "n_mamba_heads": 8}
        | {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 16, "mamba_ngroups": 1, "chunk_size": 8}
        | {"use_mem_rope": True},
        "recurrent, recurrent and full",
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {**_LAYERS, "layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4, **_MOE}
        | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16, "n_group": 1}
        | {"topk_group": 1, "num_local_experts": 4, "linear_head_dim": 16, "linear_num_heads": 4},
        "delta rule, full",
    ),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", _LAYERS, "delta rule, full"),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**_LAYERS, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"] * 2}
        | {"tie_word_embeddings": False},
        "convolution, full",
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {**_LAYERS, **_MOE, "num_dense_layers": 1, "num_experts": 4, "layer_types": ["conv", "full_attention"] * 2},
        "convolution, full",
    ),
}
# They fail the self-check of blocks, and run plain.
UNSUPPORTED = {
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {**_LAYERS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        "recurrent, full",
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"state_size": 8, "num_hidden_layers": 3, "use_mambapy": False},
        "recurrent",
    ),
    "falcon_mamba": (
        "FalconMambaConfig",
        "FalconMambaForCausalLM",
        {"state_size": 8, "num_hidden_layers": 3, "use_mambapy": False},
        "recurrent",
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {"num_hidden_layers": 3, "num_key_value_heads": 1, "attention_window_size": 8, "lru_width": 64},
        "recurrent, in the module",
    ),
    "minimax": (
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {
            **_LAYERS,
            **_HEAD,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 8,
        },
        "of its own",
    ),
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
    "lfm2": (0, 2.0),
    "lfm2_moe": (5, 6.0),
}


def prompt_ids(length: int = 20, seed: int = 3) -> torch.LongTensor:
    """A random prompt, shape `(1, length)`."""
    return torch.randint(3, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))


def build(name: str, dtype: torch.dtype = torch.float64, **settings):
    """A random model of an architecture."""
    config_class, model_class, own, _ = (ARCHITECTURES | RECURRENT | UNSUPPORTED)[name]
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


# What the cache keeps: how its texts lie in it, see [`ways_table`].
_WAYS = {
    "full": "masks",
    "sliding": "masks",
    "sliding, full": "masks",
    "sliding, full, shared": "masks",
    "convolution, full": "back",
    "delta rule, full": "back",
}


def way_of(name: str) -> str:
    """How texts lie in the cache of a model: in slots with `masks`, or beside states that go `back`, or `forward`."""
    return _WAYS.get((ARCHITECTURES | RECURRENT)[name][3], "forward")


def ways_table() -> str:
    """The table of `docs/architecture.md`: which models go which way, from the lists above."""
    tested: dict[str, list[str]] = {}
    for name, (_, model_class, _, _) in (ARCHITECTURES | RECURRENT).items():
        names = tested.setdefault(way_of(name), [])
        if (shown := model_class.removesuffix("ForCausalLM")) not in names:
            names.append(shown)
    plain = ", ".join(model_class.removesuffix("ForCausalLM") for _, model_class, _, _ in UNSUPPORTED.values())
    alone = "a row; while it lives, both go token by token"
    rows = [
        ("way", "where", "a child is", "what is rejected", "a batch", "tested in depth"),
        (
            "slots with masks",
            "all layers are attention, `sdpa` or `eager`; the model passes the trial of masks",
            "a branch in its parent's row",
            "is written again",
            "SSR",
            ", ".join(tested["masks"]),
        ),
        (
            "one row of slots, without masks",
            "the same, where attention takes no mask of ours (FlashAttention, ALiBi, ...): one prompt, not forked",
            "makes rows of it",
            "is written again",
            "rows",
            "Qwen3 (its masks taken away)",
        ),
        (
            "rows that end at the same place",
            "the same with a child, or in a batch",
            "a row",
            "is cropped",
            "SSR",
            "Qwen3 (its masks taken away)",
        ),
        (
            "the same, token by token",
            "models that are told no positions (Bloom), or scale attention by the place (Llama 4); `StaticCache`",
            alone,
            "is cropped",
            "plain",
            "Llama, Qwen3 (static caches)",
        ),
        (
            "rows beside states, with the rule",
            "convolutions; the gated delta rule, if it is not compiled",
            "a row",
            "the rule is applied again, to what is kept; inputs of convolutions are cut",
            "SSR",
            ", ".join(tested["back"]),
        ),
        (
            "rows beside states, with replay",
            "other recurrent layers (Mamba, ...)",
            alone,
            "a copy from before is put back; what is kept is fed again",
            "plain",
            ", ".join(tested["forward"]),
        ),
        ("plain", "the self-check fails, or nothing here can go back", "", "", "plain", plain),
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def compatibility_table() -> str:
    """The README's table of architectures, from the lists above."""
    ways = {
        "full": "slots that are written again",
        "sliding": "slots that are written again",
        "sliding, full": "slots that are written again",
        "sliding, full, shared": "slots that are written again",
        "convolution, full": "inputs of a step are kept, and cut",
        "delta rule, full": "copy of the state, the rule again",
    }
    groups: dict[str, list[str]] = {}
    for name, (_, model_class, _, kind) in (ARCHITECTURES | RECURRENT).items():
        shown = model_class.removesuffix("ForCausalLM") + (" (shared layers)" if name.endswith("_shared") else "")
        groups.setdefault(kind, []).append(shown)
    rows = ["| layers keep | a draft is rolled back by | tested, token for token |", "|---|---|---|"]
    for kind, names in groups.items():
        rows.append(f"| {kind} | {ways.get(kind, 'copy of the state, feed again')} | {', '.join(names)} |")
    plain = ", ".join(model_class.removesuffix("ForCausalLM") for _, model_class, _, _ in UNSUPPORTED.values())
    rows.append(f"| | run plain: they fail the self-check | {plain} |")
    return "\n".join(rows)
