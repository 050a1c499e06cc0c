"""
SSR, Self-Speculation for Reasoning Models (arXiv 2608.20359). Read this first.

    prompt --> think ---------------+-- think on ---------------+--> speculate --> output
               (parent, to budget)  |   (parent)                |    (the draft first, then
                                    +-- close early, draft -----+     whatever still matches)
                                        the answer (child)
"""

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .config import SSRConfig
from .drafter_suffix import SuffixDrafter
from .drafting import Child, child_processors
from .metrics import SSRMetrics, Stage
from .output import SSROutput, Stream
from .preparing import prepare, run_plain
from .scheduling import ForkSchedule
from .speculating import speculate
from .state import TargetState


def ssr_decoding(
    model,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    tokenizer=None,
    **model_kwargs,
) -> SSROutput | torch.LongTensor:
    """
    The decoding method of the `ssr` generation mode: what plain `generate` returns, sooner.

    Args:
        model (`PreTrainedModel`): the target.
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): the prompt.
        logits_processor, stopping_criteria, synced_gpus, streamer, model_kwargs: as `generate` gives them to any
            decoding method.
        generation_config (`GenerationConfig`): prepared by `generate`; settings of SSR that it lacks have their
            defaults.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): finds the thinking markers.

    Returns:
        [`SSROutput`] under `return_dict_in_generate`, else a `torch.LongTensor` of shape `(1, sequence_length)`.

    Raises:
        `ValueError`: before the first token, for settings that do not fit each other, the model or the prompt.
    """
    metrics = SSRMetrics(prompt_tokens=input_ids.shape[1])
    with Stream.around(streamer) as stream, metrics.timed_in_all():
        config = SSRConfig.from_config(generation_config)
        plan = prepare(model, input_ids, config, tokenizer, model_kwargs, synced_gpus)
        plain = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria, **model_kwargs}
        if plan.plain_reason is not None:
            return run_plain(plan, model, input_ids, config, stream, metrics, synced_gpus=synced_gpus, **plain)
        target = TargetState(model, input_ids, config, plan.thinking, stream, metrics, **plain)
        generate_text(target, config)
    return target.output()


def generate_text(target: TargetState, config: SSRConfig) -> None:
    """Think, draft, verify and speculate until the text is done."""
    tail = target.thinking.tail
    drafter = SuffixDrafter.from_config(config, lead=tail)
    prediction = list(config.prediction_ids or [])
    drafter.add_draft(prediction)
    with target.metrics.timed("prefill"):
        target.prefill()
    knows_prompt = False
    while not target.done:
        if target.thinking.open:
            # experts have a kernel of their own for one-token steps
            with target.model._optimize_model_for_decode():
                drafts = think(target, config)
            drafter.begin_answer()
            drafter.add("thought", target.thinking.thought)
            if prediction:  # added last: it ranks first
                drafts.append(prediction)
            for draft in drafts:
                drafter.add_draft(draft if tuple(draft[: len(tail)]) == tail else [*tail, *draft])
        else:
            if not knows_prompt:
                drafter.add("prompt", target.prompt)
                knows_prompt = True
            speculate(target, drafter)


def think(target: TargetState, config: SSRConfig) -> list[list[int]]:
    """
    The parent thinks until the thought closes. At each budget the cache is forked: the child closes the thought at once
    and drafts the answer in the same forwards, two rows in step.

    Returns:
        `list[list[int]]`: the draft of each stage, in order, from the token behind the forced close.
    """
    schedule = ForkSchedule(config)
    stages: list[list[int]] = []
    child: Child | None = None
    try:
        while target.thinking.open and not target.done:
            phase = "thinking" if child is None else "drafting"
            with target.metrics.timed(phase):
                logits = target.forward(phase)[:, -1]
                thinking_tokens = target.thinking.thinking_tokens
                token = target.choose(logits[:1])
                if schedule.due(thinking_tokens) and target.can_draft_ahead_of(token):
                    end_stage(target, child, "fork", stages)
                    child = fork(target, config, thinking_tokens)
                    logits = logits[[0, 0]]
                child_token = None if child is None else choose_for_child(target, child, logits[1:])
                target.emit(token, child_token)
                if child is not None and child.ended_by:
                    end_stage(target, child, child.ended_by, stages)
                    drop_child(target)
                    child = None
        end_stage(target, child, "stop" if target.thinking.open else "close", stages)
        drop_child(target)
    finally:
        target.settle()
    return stages


def fork(target: TargetState, config: SSRConfig, thinking_tokens: int) -> Child | None:
    """A child that goes on from the target's text with the forced close; `None` if there is no memory for its row."""
    with target.metrics.timed("drafting_exposed"):
        try:
            target.fork()
        except torch.OutOfMemoryError:
            target.metrics.stages.append(Stage(thinking_tokens, 0, "out_of_memory"))
            return None
        temperature = config.setting("draft_temperature")
        generator = None
        if temperature > 0:
            generator = torch.Generator(target.ids.device).manual_seed(
                (config.setting("draft_seed") + thinking_tokens) % 2**63
            )
        return Child(
            thinking_tokens,
            target.thinking.markers.forced_close,
            child_processors(target.logits_processor, greedy=temperature == 0),
            target.eos_ids,
            config.max_draft_length,
            temperature,
            generator,
        )


def choose_for_child(target: TargetState, child: Child, logits: torch.FloatTensor) -> int:
    """The child's next token. The parent waits for it, so the time is not hidden in the thought."""
    with target.metrics.timed("drafting_exposed"):
        return child.choose(target.child_ids, logits)


def end_stage(target: TargetState, child: Child | None, reason: str, stages: list[list[int]]) -> None:
    """The child drafts no more; its tokens stay as a draft."""
    if child is None:
        return
    target.metrics.stages.append(Stage(child.draft_budget, len(child.tokens), reason))
    target.stream.preview(child.tokens)
    if child.tokens:
        stages.append(child.tokens)


def drop_child(target: TargetState) -> None:
    """Back to one row. The parent waits for it."""
    with target.metrics.timed("drafting_exposed"):
        target.drop_child()
