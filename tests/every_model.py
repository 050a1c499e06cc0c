"""
Every causal language model of the installed transformers, built tiny from one list of usual settings, and what SSR does
with it: the very tokens of plain `generate`, or plain decoding with a reason.

`python tests/every_model.py` writes `docs/models.md` from what it finds; with names of types it prints their outcomes.
"""

import sys
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tiny_models
import torch
import transformers
from tiny_models import VOCAB_SIZE, prompt_ids
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_ssr import SSRConfig

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MOST_PARAMETERS = 100_000_000
NEW_TOKENS = 40

# names that configs use; each is set where a config has it
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "encoder_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "dim_ff", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dense_intermediate_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "dim_head", "d_kv", "global_head_dim"), 16),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_head_dim", "ssm_state_size", "state_size"), 16),
    "n_groups": 2,
    "rotary_dim": 8,
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCAB_SIZE),
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": False,
}
_COMPRESSED = {"num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8}
_COMPRESSED |= {"v_head_dim": 16, "qk_nope_head_dim": 16, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 512}
_TINY = tiny_models.ARCHITECTURES | tiny_models.RECURRENT | tiny_models.UNSUPPORTED
_OWN = {name.removesuffix("Config"): own for name, _, own, kind in _TINY.values() if "shared" not in kind}
_OWN |= {
    "BailingHybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "GPTNeo": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nText": {"num_kv_shared_layers": 0},
    "Reformer": {"axial_pos_embds": False},
    "Zaya": {"num_experts_per_tok": 1},
}


@dataclass
class Outcome:
    """
    What became of a type.

    Args:
        name (`str`): of the model's class, or of the type where there is none.
        unbuilt (`str`): why no model of it could be built, or generate at all.
        reason (`str`): why SSR left it to plain decoding; empty = it ran.
        wrong (`str`): what differed from plain `generate`, or was raised: never to be.
    """

    name: str
    unbuilt: str = ""
    reason: str = ""
    wrong: str = ""


def build(config_class):
    """A random model of a type, in float64 where it can be."""
    model_class = _model_class(config_class)
    if model_class.config_class in getattr(config_class, "sub_configs", {}).values():
        config_class = model_class.config_class  # as `AutoModelForCausalLM` does
    config = _config(config_class)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise MemoryError(f"{size:,} parameters, whatever is set")
    torch.manual_seed(0)
    model = model_class(_config(config_class)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3)
    if "experts" in "".join(name for name, _ in model.named_parameters()):
        model.set_experts_implementation("eager")  # the grouped kernel takes no float64
    if hasattr(model, "set_default_language"):
        model.set_default_language(next(iter(model.config.languages)))
    return model


def _model_class(config_class):
    found = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return found[0] if isinstance(found, (list, tuple)) else found


def _config(config_class):
    own = _OWN.get(config_class.__name__.removesuffix("Config"), {})
    known = set(config_class.__init__.__code__.co_varnames) | set(getattr(config_class, "attribute_map", {}))
    known |= set(getattr(config_class, "__annotations__", {})) | set(config_class().to_dict())
    settings = {name: value for name, value in _SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:
        settings |= {name: value for name, value in _COMPRESSED.items() if name in known}
    for name, sub_class in getattr(config_class, "sub_configs", {}).items():
        if name == "text_config" and hasattr(sub_class, "model_type") and sub_class.model_type:
            settings[name] = _config(sub_class).to_dict()
    return config_class(**{**settings, **own})


@cache
def outcome_of(config_class) -> Outcome:
    """Plain `generate` beside SSR with a prediction that is right in part, and with a child."""
    outcome = Outcome(_model_class(config_class).__name__)
    ids = prompt_ids()
    call = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": 30}
    for dtype in (torch.float64, torch.float32):  # parts of some know only float32
        try:
            model = build(config_class).to(dtype)
            _seeded(model, ids, max_new_tokens=2, **call)  # some settle on a kind of attention here
            plain = _seeded(model, ids, **settings, **call)
            outcome.unbuilt = ""
            break
        except Exception as error:
            outcome.unbuilt = _line(error)
    if outcome.unbuilt:
        return outcome
    new = plain[0, ids.shape[1] :].tolist()
    close = next((place for place in range(6, 20) if new[place] not in new[:place]), 7)
    markers = {
        "thinking_start": [],
        "thinking_end": [new[close]],
        "max_overhead": "off",
        "return_dict_in_generate": True,
    }
    for kind, own in (
        ("prediction", {"prediction_ids": [*new[close + 1 : 28], 5, *new[29:]], "draft_budgets": []}),
        ("child", {"draft_budgets": [3]}),
    ):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                output = _seeded(model, ids, generation_config=SSRConfig(**markers, **own, **settings), **call)
        except Exception as error:
            outcome.wrong = f"{kind}: {_line(error)}"
            return outcome
        outcome.reason = output.metrics.plain_reason or ""
        if not torch.equal(output.sequences, plain):
            outcome.wrong = f"{kind}: other tokens"
            return outcome
        if not outcome.reason and not (output.metrics.stages or output.metrics.accepted_tokens):
            outcome.wrong = f"{kind}: nothing was drafted"
            return outcome
    return outcome


def _seeded(model, ids, **kwargs):
    torch.manual_seed(7)
    return model.generate(ids, **kwargs)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def page() -> str:
    """`docs/models.md`, from what became of every type."""
    found = {config_class.model_type: outcome_of(config_class) for config_class in MODEL_FOR_CAUSAL_LM_MAPPING}
    exact, plain, unbuilt = [], {}, {}
    for name, outcome in sorted(found.items()):
        if outcome.unbuilt:
            unbuilt[name] = outcome.unbuilt
        elif outcome.reason:
            plain.setdefault(outcome.reason.replace(outcome.name, "the model"), []).append(name)
        else:
            exact.append(name)
    built, count = len(found) - len(unbuilt), sum(map(len, plain.values()))
    rows = [f"| the tokens of plain `generate`, exactly | {', '.join(exact)} |"]
    rows += [f"| plain decoding: {_cell(reason)} | {', '.join(names)} |" for reason, names in sorted(plain.items())]
    rows += [f"| not tried: {_cell(reason)} | {name} |" for name, reason in unbuilt.items()]
    return f"""# Models

Every type of causal language model in transformers {transformers.__version__}, built tiny and random, generates by SSR
with a draft that is right in part, and with a child. Of {len(found)} types {built} can be built from one list of usual
settings: {len(exact)} give the very tokens of plain `generate`, and {count} run plain decoding, with a warning that
says why. No name decides that: SSR tries each model on a few tokens before it trusts it.

This page is written by `python tests/every_model.py`.

| SSR gives | types (`model_type` of the config) |
|---|---|
{chr(10).join(rows)}
"""


def _cell(reason: str) -> str:
    return reason.replace("|", "\\|")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = sys.argv[1:]
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        if not names or config_class.model_type in names:
            print(config_class.model_type, outcome_of(config_class), flush=True)
    if not names:
        PAGE.write_text(page())
