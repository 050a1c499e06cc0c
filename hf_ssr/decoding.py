"""
SSR, Self-Speculation for Reasoning Models (arXiv 2608.20359). Read this first.

    prompt --> think ---------------+-- think on ---------------+--> speculate --> output
               (parent, to budget)  |   (parent)                |    (the draft first, then
                                    +-- close early, draft -----+     whatever still matches)
                                        the answer (child)

Beyond the paper: all three, thought, draft and answer, are themselves written by speculation, from whatever they
repeat. So a later child goes through an earlier draft in a few steps, and corrects it where the thought has changed it.
Where an answer opens a thought again, all of this begins anew.
"""

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .choosing import Chooser
from .config import SSRConfig
from .draft_sources import DraftSources
from .host import kernels_for_steps
from .lanes import Parent
from .metrics import SSRMetrics
from .output import SSROutput, Stream, collect
from .preparing import Preparation, prepare, run_plain
from .processors import processors_of_row
from .rounds import Rounds
from .scheduling import ForkSchedule, Governor
from .seeding import row_seeds
from .stages import Stages
from .target import Target


def ssr_decoding(
    model,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    tokenizer=None,
    **model_kwargs,
) -> SSROutput | torch.Tensor:
    """
    The decoding method of the `ssr` generation mode: what plain `generate` returns, sooner.

    Args:
        model (`PreTrainedModel`): the target.
        input_ids (`torch.LongTensor` of shape `(batch_size, prompt_length)`): the prompts, padded on the left.
        logits_processor, stopping_criteria, synced_gpus, streamer, model_kwargs: as `generate` gives them to any
            decoding method.
        generation_config (`GenerationConfig`): prepared by `generate`; settings of SSR that it lacks have their
            defaults.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): finds the thinking markers.

    Returns:
        [`SSROutput`] under `return_dict_in_generate`, else a `torch.LongTensor` of shape
        `(batch_size, sequence_length)`.

    Raises:
        `ValueError`: before the first token, for settings that do not fit each other, the model or the prompt.
    """
    metrics = SSRMetrics(prompt_tokens=input_ids.shape[1])
    with Stream.around(streamer) as stream, metrics.timed_in_all():
        config = SSRConfig.from_config(generation_config)
        plain = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria, **model_kwargs}
        plan = prepare(model, input_ids, config, tokenizer, stream, synced_gpus, **plain)
        if plan.plain_reason is not None:
            return run_plain(plan, model, input_ids, config, stream, metrics, synced_gpus=synced_gpus, **plain)
        target = Target(model, input_ids, config, metrics, model_kwargs)
        governor = Governor(config, model)
        seeds = [0] * len(input_ids)
        if config.rule != "exact":
            seeds = row_seeds(input_ids, model_kwargs.get("attention_mask"))
        texts = _texts(target, plan, governor, seeds, stream, logits_processor, stopping_criteria)
        target.ask_for(layer for text in texts for layer in text.drafter.layers)
        generate_texts(target, texts, governor)
    return collect(target, texts)


def generate_texts(target: Target, texts: list[Parent], governor: Governor) -> None:
    """Think, draft, verify and speculate, all texts in step, until each is done."""
    with target.metrics.timed("prefill"):
        target.prefill()
        governor.begin(*target.last_shape, is_inexact=target.is_inexact)
    rounds = Rounds(target, governor)
    try:
        while running := [text for text in texts if not text.done]:
            if all(text.is_thinking for text in running):
                think_on(target, running, rounds)
            else:
                rounds.play(running)
    finally:
        target.settle()


def think_on(target: Target, texts: list[Parent], rounds: Rounds) -> None:
    """Until one of the thoughts closes. Experts have a kernel of their own for one-token steps."""
    with kernels_for_steps(target.model):
        while all(text.is_thinking and not text.done for text in texts):
            rounds.play(texts)


def _texts(
    target: Target,
    plan: Preparation,
    governor: Governor,
    seeds: list[int],
    stream: Stream,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
) -> list[Parent]:
    """One lane a prompt, and what it may fork and draft from."""
    config, schedule = target.config, ForkSchedule(target.config)
    is_batch = len(target.rows) > 1
    texts = []
    for index, row in enumerate(target.rows):
        thinking, prediction = plan.thinking[index], plan.predictions[index]
        metrics = target.metrics
        if is_batch:
            metrics = SSRMetrics(prompt_tokens=plan.prompt_tokens[index])
            metrics.forwards["prefill"] = 1
        processors = processors_of_row(logits_processor, index)
        chooser = Chooser(row, config, thinking, processors, governor.clock, seeds[index])
        sources = DraftSources(config, row.ids[0].tolist(), thinking.tail, prediction)
        texts.append(Parent(row, chooser, sources, stopping_criteria, stream, metrics, is_batch))
        texts[-1].stages = Stages(texts[-1], schedule, governor)
    return texts
