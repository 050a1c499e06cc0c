"""
SSR, Self-Speculation for Reasoning Models (arXiv 2608.20359). Read this first.

    prompt --> think ---------------+-- think on ---------------+--> speculate --> output
               (parent, to budget)  |   (parent)                |    (the draft first, then
                                    +-- close early, draft -----+     whatever still matches)
                                        the answer (child)
"""

from contextlib import nullcontext

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .config import SSRConfig
from .drafter_suffix import SuffixDrafter
from .drafting import Child, Draft, DraftSampling, child_processors, processors_of_row
from .metrics import SSRMetrics
from .output import SSROutput, Stream
from .preparing import prepare, run_plain
from .scheduling import ForkSchedule
from .speculating import verify
from .state import TextState, collect
from .target import Row, Target


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
        texts = [
            TextState(
                row,
                config,
                thinking,
                SuffixDrafter.from_config(config, lead=thinking.tail),
                stream,
                metrics if target.batch_size == 1 else SSRMetrics(prompt_tokens=tokens),
                prediction=prediction,
                logits_processor=processors_of_row(logits_processor, place),
                stopping_criteria=stopping_criteria,
            )
            for place, (row, thinking, prediction, tokens) in enumerate(
                zip(target.rows, plan.thinking, plan.predictions, plan.prompt_tokens, strict=True)
            )
        ]
        generate_texts(target, texts, ForkSchedule(config))
    return collect(target, texts)


def generate_texts(target: Target, texts: list[TextState], schedule: ForkSchedule) -> None:
    """Think, draft, verify and speculate, all texts in step, until each is done."""
    with target.metrics.timed("prefill"):
        target.prefill()
    try:
        for text in texts:
            if text.metrics is not target.metrics:
                text.metrics.forwards["prefill"] = 1
            if text.config.rule != "exact":
                text.seed = int(torch.randint(2**62, ()))
            if not text.thinking.open:
                text.drafter.add_draft(text.prediction)
                text.drafter.add("prompt", text.prompt)
        while running := [text for text in texts if not text.done]:
            if all(text.thinking.open for text in running):
                think_on(target, running, schedule)
            else:
                step(target, running, schedule)
    finally:
        target.settle()


def think_on(target: Target, texts: list[TextState], schedule: ForkSchedule) -> None:
    """Until one of the thoughts closes. Experts have a kernel of their own for one-token steps."""
    with target.model._optimize_model_for_decode():
        while all(text.thinking.open and not text.done for text in texts):
            step(target, texts, schedule)


def step(target: Target, texts: list[TextState], schedule: ForkSchedule) -> None:
    """One forward for all texts. One that thinks takes a token, and so does its child; any other takes a draft."""
    needs_forward = not target.has_logits  # the prefill yields the first token, without a draft
    room = min(text.room for text in texts)  # shorter rows are filled up, and nothing may lie past `max_length`
    drafts = {text: Draft() if text.thinking.open or not needs_forward else text.propose(room) for text in texts}
    phases = [_phase(text, draft) for text, draft in drafts.items()]
    phase = next(name for name in ("drafting", "thinking", "verify", "speculate") if name in phases)
    with target.metrics.timed(phase):
        proposed = {text.row: draft.ids for text, draft in drafts.items()}
        recording = not all(text.thinking.open for text in texts)
        try:
            logits = target.forward(phase, proposed, recording)
        except torch.OutOfMemoryError:
            if not (drop_children(texts) and target.undo_forward()):
                raise
            target.keep([text.row for text in texts])
            logits = target.forward(phase, proposed, recording)
        for (text, draft), own_phase in zip(drafts.items(), phases, strict=True):
            if text.metrics is not target.metrics:
                text.metrics.forwards[own_phase] += needs_forward
            if text.thinking.open:
                think(text, logits, schedule)
            else:
                verify(text, draft, logits[text.row], needs_forward)
        arrange_rows(target, texts)


def _phase(text: TextState, draft: Draft) -> str:
    if text.thinking.open:
        return "thinking" if text.child is None else "drafting"
    return "verify" if draft.is_prefix else "speculate"


def think(text: TextState, logits: dict[Row, torch.FloatTensor], schedule: ForkSchedule) -> None:
    """
    The parent takes a token of its thought. At a budget it is forked: the child closes the thought at once and drafts
    the answer, a token for each of the parent's.
    """
    thinking_tokens = text.thinking.thinking_tokens
    own_logits = logits[text.row][:, -1]
    token = text.choose(own_logits)
    if schedule.due(thinking_tokens) and text.can_draft_ahead_of(token):
        text.end_stage("fork")
        text.child = fork(text, thinking_tokens)
    if text.child is not None:
        child_logits = logits[text.child.row][:, -1] if text.child.row in logits else own_logits
        with text.metrics.timed("drafting_exposed"):  # the parent waits for it
            text.child.choose(child_logits)
            text.stream.preview(text.child.tokens)
    text.emit(token)
    if text.child is not None and text.child.ended_by:
        text.end_stage(text.child.ended_by)
    if text.done or not text.thinking.open:
        text.end_stage("stop" if text.thinking.open else "close")
        begin_answer(text)


def fork(text: TextState, thinking_tokens: int) -> Child:
    """A child that goes on from the text with the forced close."""
    config, rule = text.config, text.config.rule
    temperature = config.draft_temperature
    as_parent = temperature is None and rule != "exact"
    if temperature is None:
        temperature = float(as_parent)  # the parent's own is among its processors
    sampling = DraftSampling(temperature)
    if rule == "coupled":
        sampling.noise = text.seed, len(text.thinking.tail)
    elif temperature > 0:
        # other rules than the exact one are right only if drafts differ from run to run
        seed = (config.setting("draft_seed") + thinking_tokens + text.seed) % 2**63
        sampling.generator = torch.Generator(text.row.ids.device).manual_seed(seed)
        sampling.keeps_probs = rule != "exact"
    return Child(
        text.row.fork(),
        thinking_tokens,
        text.thinking.markers.forced_close,
        child_processors(text.logits_processor, temperature == 0, not as_parent),
        sampling,
        text.eos_ids,
        config.max_draft_length,
    )


def drop_children(texts: list[TextState]) -> bool:
    """There is no memory for them; whether there were any. What they have drafted stays."""
    parents = [text for text in texts if text.child is not None]
    for text in parents:
        text.end_stage("out_of_memory")
    return bool(parents)


def begin_answer(text: TextState) -> None:
    """The drafter learns the thought and the drafts. Of equally long matches, a later draft wins, then the thought."""
    text.drafter.begin_answer()
    if text.done:
        return
    text.drafter.add("thought", text.thinking.thought)
    if text.thinking.open_position == 0:
        text.drafter.add("prompt", text.prompt)
    tail = text.thinking.tail
    for draft, probs in [*text.drafts, (text.prediction, [])]:
        if draft and tuple(draft[: len(tail)]) != tail:
            draft, probs = [*tail, *draft], probs and [None] * len(tail) + probs
        text.drafter.add_draft(draft, probs or None)


def arrange_rows(target: Target, texts: list[TextState]) -> None:
    """The cache forgets what was rejected; rows of texts that are done and of ended children go, new children come."""
    if target.batch_size > 1 and all(text.done for text in texts):
        return
    kept = [text for text in texts if not text.done] or texts
    children = {text.child.row: text for text in kept if text.child is not None}
    new = [row for row in children if row not in target.rows]
    rows = [text.row for text in kept] + [row for row in children if row in target.rows]
    changes = new or len(rows) < len(target.rows)
    with target.metrics.timed("drafting_exposed") if changes else nullcontext():
        target.keep(rows)
        if not new:
            return
        try:
            target.fork(new)
        except torch.OutOfMemoryError:
            for row in new:
                children[row].end_stage("out_of_memory")
