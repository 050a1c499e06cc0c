"""Does SSR apply to a model, its cache and a call? If not, plain decoding runs, and the user is told why."""

from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from .config import SSRConfig
from .forking import has_linear_attention, unsupported_cache
from .host import eos_token_ids, extends_kwargs_itself, is_of_user, is_stateful
from .processors import ROW_WISE_PROCESSORS
from .self_check import why_not_in_blocks, why_not_in_rows

ROW_WISE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


def why_plain(
    model, config: SSRConfig, prompt_length: int, model_kwargs: dict[str, Any], synced_gpus: bool
) -> str | None:
    """Why plain decoding must run, or `None`."""
    if model.config.is_encoder_decoder:
        return "the model is an encoder-decoder"
    if model_kwargs.get("inputs_embeds") is not None:
        return "the prompt is given as `inputs_embeds`"
    if synced_gpus:
        return "`synced_gpus` needs as many forwards on every rank"
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name) and config.return_dict_in_generate:
            return f"`{name}` is set, which is not supported"
    if extends_kwargs_itself(model):
        return f"{type(model).__name__} prepares its steps in a way of its own"
    cache: Any = model_kwargs.get("cache") if config.use_cache else None
    reason = unsupported_cache(cache) or _why_positions_are_plain(model, config, prompt_length)
    return reason or why_not_in_blocks(model, _windows_to_pass(cache, config.max_length))


def _windows_to_pass(cache: Cache, max_length: int) -> set[int]:
    """Lengths of the windows that a text may outgrow, together with what the cache holds before it."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    return {layer.sliding_window for layer in layers if layer.sliding_window < layer.get_seq_length() + max_length}


def _why_positions_are_plain(model, config: SSRConfig, prompt_length: int) -> str | None:
    """Rotary positions that depend on the longest in a forward: those of a block differ from those of its tokens."""
    text_config = model.config.get_text_config(decoder=True)
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for rope in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        kind = rope.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        limit = rope.get("original_max_position_embeddings") or text_config.max_position_embeddings
        if config.max_length > limit and (kind == "dynamic" or prompt_length <= limit):
            return (
                f"the rotary positions of {type(model).__name__} change where a text passes {limit} tokens, and "
                f"`max_length` is {config.max_length}"
            )
    return None


def why_batch_is_plain(model, config: SSRConfig, stream, processors, criteria, model_kwargs) -> str | None:
    """The same for a batch. Each row goes its own way, so what sees all rows at once cannot be asked about one."""
    cache = model_kwargs["cache"]
    if type(cache) is not DynamicCache or is_of_user(cache):
        return "a batch (`num_return_sequences` counts) needs a DynamicCache of its own"
    if has_linear_attention(cache):
        if (reason := why_not_in_rows(model)) is not None:
            return reason
    elif is_stateful(model):
        return f"in a batch, what {type(model).__name__} keeps cannot go back for each row alone"
    if model_kwargs.get("position_ids") is None:
        return (
            f"in a batch, {type(model).__name__} takes positions from the place in the cache, not from `position_ids`"
        )
    if getattr(model.config.get_text_config(decoder=True), "attn_temperature_tuning", False):
        return f"in a batch, {type(model).__name__} scales its attention by the place in the cache, padding included"
    for name in ("output_scores", "output_logits"):
        if getattr(config, name) and config.return_dict_in_generate:
            return f"`{name}` is set, which is not supported for a batch"
    if stream.streamer is not None:
        return "a streamer is given a token of every row at once, and the rows of a batch go on at different times"
    for given, known in ((processors, ROW_WISE_PROCESSORS), (criteria, ROW_WISE_CRITERIA)):
        others = (each for each in given if type(each) not in known and not getattr(each, "stops_thinking", False))
        unknown = next((type(each).__name__ for each in others), None)
        if unknown is not None:
            return f"{unknown} may look at all rows of a batch at once"
    if any(type(each) is StopStringCriteria for each in criteria) and not eos_token_ids(config):
        return "`stop_strings` without an end-of-text token do not end the rows of a batch one by one"
    return None
