"""What must be settled before the first token: do the settings fit, where do thoughts end; and plain decoding."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LogitsProcessorList, StoppingCriteriaList
from transformers.utils import logging

from .applicability import why_batch_is_plain, why_plain
from .config import SSRConfig, not_applicable
from .host import decode_plainly, eos_token_ids
from .markers import ThinkingMarkers, require_markers, resolve_markers
from .metrics import SSRMetrics
from .output import SSROutput, Stream
from .processors import index_of_budget
from .scheduling import ForkSchedule
from .stopping import thinking_stop
from .think_state import ThinkingState
from .thinking import ThinkingBudgetLogitsProcessor

logger = logging.get_logger(__name__)


@dataclass
class Preparation:
    """
    What [`prepare`] found out.

    Args:
        thinking (`list[ThinkingState]`): of each row's prompt.
        predictions (`list[list[int]]`): for each row, from `prediction_ids`.
        prompt_tokens (`list[int]`): of each row, padding not counted.
        plain_reason (`str`, *optional*): why SSR does not apply.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the one that was found.
    """

    thinking: list[ThinkingState]
    predictions: list[list[int]]
    prompt_tokens: list[int]
    plain_reason: str | None
    tokenizer: Any = None


def prepare(
    model,
    input_ids: torch.Tensor,
    config: SSRConfig,
    tokenizer,
    stream: Stream,
    synced_gpus: bool,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    **model_kwargs,
) -> Preparation:
    """
    Checks settings against model and prompt, and finds the thinking markers.

    Args:
        model (`PreTrainedModel`): the target.
        input_ids (`torch.LongTensor` of shape `(batch_size, prompt_length)`): the prompt.
        config ([`SSRConfig`]): prepared by `generate`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): as given to `generate`.
        stream ([`Stream`]): of the call.
        synced_gpus (`bool`): whether ranks must run equally many forwards.
        logits_processor, stopping_criteria: as `generate` prepares them.
        model_kwargs (`dict`): what the model's forward will be given.

    Raises:
        `ValueError`: for an empty prompt, ids out of range, markers that are needed and unknown, or, under `strict`,
            where SSR does not apply.
    """
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise ValueError("`input_ids` is empty: SSR needs a prompt of at least one token.")
    reason = why_plain(model, config, input_ids.shape[1], model_kwargs, synced_gpus)
    if reason is None and len(input_ids) > 1:
        reason = why_batch_is_plain(model, config, stream, logits_processor, stopping_criteria, model_kwargs)
    predictions = predictions_of(config, len(input_ids))
    markers, tokenizer = _find_markers(model, config, tokenizer)
    _validate_ids(model, config, markers)
    most = config.max_length - input_ids.shape[1]
    stop = thinking_stop(stopping_criteria)
    states = [ThinkingState(markers, row, config.thinking_budget, most, stop) for row in input_ids.tolist()]
    thinking = next((state for state in states if state.budget_capped), states[0])
    if thinking.budget_capped:
        warnings.warn(
            f"`thinking_budget`={config.thinking_budget} leaves no room for an answer within the {most} new tokens "
            f"that `max_new_tokens` (`max_length`) allows: it is cut to {thinking.budget}. Set a smaller "
            "`thinking_budget` or a larger `max_new_tokens`.",
            stacklevel=2,
        )
    if markers is not None and config.draft_interval and config.draft_interval <= len(markers.forced_close):
        warnings.warn(
            f"`draft_interval`={config.draft_interval} ends each child before it drafts a token, where it goes token "
            "by token (a static cache, a recurrent state that only goes forward): its forced close takes "
            f"{len(markers.forced_close)}. Set a larger one.",
            stacklevel=2,
        )
    if reason is not None:
        not_applicable(config, reason)
    mask, prompt_tokens = model_kwargs.get("attention_mask"), [input_ids.shape[1]] * len(input_ids)
    if len(input_ids) > 1 and isinstance(mask, torch.Tensor) and mask.ndim == 2:
        prompt_tokens = mask.sum(dim=-1).tolist()
    return Preparation(states, predictions, prompt_tokens, reason, tokenizer)


def predictions_of(config: SSRConfig, rows: int) -> list[list[int]]:
    """Of each row: one for all, or one for each prompt, whose `num_return_sequences` rows follow each other."""
    given = config.prediction_ids or []
    if not given or not isinstance(given[0], (list, tuple)):
        return [list(given)] * rows
    prompts = rows // (config.num_return_sequences or 1)
    if len(given) != prompts:
        raise ValueError(
            f"`prediction_ids` holds {len(given)} lists, but the batch has {prompts} prompts: give one list for each "
            "(`[]` = none), or one flat list for all."
        )
    return [list(given[row * prompts // rows]) for row in range(rows)]


def _find_markers(model, config: SSRConfig, tokenizer) -> tuple[ThinkingMarkers | None, Any]:
    """The thinking markers, from the settings or a tokenizer, and that tokenizer."""
    schedule = ForkSchedule(config)
    needed = next(
        (
            name
            for name, value in (
                ("thinking_budget", config.thinking_budget is not None),
                ("draft_interval", config.draft_interval is not None),
                ("draft_budgets", config.forks_on_request),
                ("thinking_start", isinstance(config.thinking_start, str)),
                ("forced_close", config.forced_close is not None),
            )
            if value
        ),
        None,
    )
    is_complete = config.thinking_end is not None and not any(
        isinstance(s, str) for s in (config.thinking_start, config.thinking_end, config.forced_close)
    )
    is_of_use = needed is not None or not schedule.never or config.prediction_ids
    if tokenizer is None and not is_complete and is_of_use:
        tokenizer = _local_tokenizer(model.name_or_path)
    if config._tokenizer is None:  # a call without a config of its own inherits settings only
        config._tokenizer = getattr(model.generation_config, "_tokenizer", None)
    markers = resolve_markers(config, tokenizer)
    if markers is None and needed is not None:
        try:
            require_markers(config, tokenizer)
        except ValueError as error:
            raise ValueError(f"`{needed}`={getattr(config, needed)!r} needs thinking markers. {error}") from None
    if markers is None and not schedule.never:
        warnings.warn(
            "No thinking markers were found, so nothing is drafted ahead: only suffix speculation speeds up the text. "
            "Set `thinking_end`, pass `tokenizer=`, or use `SSRConfig.from_tokenizer`. `draft_budgets=[]` is silent.",
            stacklevel=2,
        )
    return markers, tokenizer


def _local_tokenizer(name_or_path: str):
    """The tokenizer that lies beside a model on this machine, if any."""
    if not name_or_path:
        return None
    stamps = tuple(sorted((path.name, path.stat().st_mtime_ns) for path in Path(name_or_path).glob("tokenizer*")))
    try:
        return _load_tokenizer(name_or_path, stamps)
    except Exception as error:  # whatever is wrong with it, markers can still be given
        logger.info(f"no tokenizer at {name_or_path}: {error}")
        return None


@lru_cache(maxsize=4)  # loading one takes longer than a short answer
def _load_tokenizer(name_or_path: str, stamps: tuple):
    return AutoTokenizer.from_pretrained(name_or_path, local_files_only=True, trust_remote_code=False)


def _validate_ids(model, config: SSRConfig, markers: ThinkingMarkers | None) -> None:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    predictions = config.prediction_ids or [()]
    flat = predictions if isinstance(predictions[0], int) else [i for prediction in predictions for i in prediction]
    ids: dict[str, Sequence[int]] = {"prediction_ids": flat}
    if markers is not None:
        ids["thinking_start"] = [i for s in (markers.start.spellings if markers.start else ()) for i in s]
        ids["thinking_end"] = [i for s in markers.end.spellings for i in s]
        ids["forced_close"] = markers.forced_close
    for name, values in ids.items():
        wrong = next((v for v in values if v >= vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"`{name}` holds the token id {wrong}, but the model's vocabulary has {vocab_size} tokens."
            )


def run_plain(
    plan: Preparation,
    model,
    input_ids: torch.Tensor,
    config: SSRConfig,
    stream: Stream,
    metrics: SSRMetrics,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    **kwargs,
):
    """Plain decoding, where SSR does not apply. A thinking budget holds there too. Returns as `ssr_decoding` does."""
    metrics.plain_reason = plan.plain_reason
    stop = thinking_stop(stopping_criteria)
    if (config.thinking_budget is not None or stop is not None) and plan.thinking[0].markers is not None:
        budget = ThinkingBudgetLogitsProcessor(
            config,
            prompt_length=input_ids.shape[1],
            tokenizer=plan.tokenizer,
            max_new_tokens=config.max_length - input_ids.shape[1],
            stop=stop,
        )
        logits_processor = LogitsProcessorList(logits_processor)
        logits_processor.insert(index_of_budget(logits_processor), budget)
    output = decode_plainly(
        model,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=config,
        streamer=stream if stream.streamer is not None else None,
        **kwargs,
    )
    if isinstance(output, torch.Tensor) or model.config.is_encoder_decoder:
        return output
    eos_ids = eos_token_ids(config)
    metrics.prompt_tokens = sum(plan.prompt_tokens)
    for row in output.sequences[:, input_ids.shape[1] :].tolist():
        metrics.new_tokens += next((place + 1 for place, token in enumerate(row) if token in eos_ids), len(row))
    fields = ("sequences", "scores", "logits", "attentions", "hidden_states", "cache")
    return SSROutput(**{name: getattr(output, name) for name in fields}, metrics=metrics)
