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

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .config import SSRConfig
from .costs import RoundClock
from .drafter_suffix import SuffixDrafter
from .drafting import Draft, processors_of_row
from .metrics import SSRMetrics
from .output import SSROutput, Stream
from .preparing import prepare, run_plain
from .scheduling import ForkSchedule, Governor
from .seeding import row_seeds
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
        governor = Governor(config, model)
        texts = [
            TextState(
                row,
                config,
                thinking,
                partial(SuffixDrafter.from_config, config, thinking.tail),
                stream,
                metrics if target.batch_size == 1 else SSRMetrics(prompt_tokens=tokens),
                governor.clock,
                prediction=prediction,
                logits_processor=processors_of_row(logits_processor, place),
                stopping_criteria=stopping_criteria,
            )
            for place, (row, thinking, prediction, tokens) in enumerate(
                zip(target.rows, plan.thinking, plan.predictions, plan.prompt_tokens, strict=True)
            )
        ]
        if config.rule != "exact":
            for text, seed in zip(texts, row_seeds(input_ids, model_kwargs.get("attention_mask")), strict=True):
                text.seed = seed
        generate_texts(target, texts, ForkSchedule(config), governor)
    return collect(target, texts)


def generate_texts(target: Target, texts: list[TextState], schedule: ForkSchedule, governor: Governor) -> None:
    """Think, draft, verify and speculate, all texts in step, until each is done."""
    with target.metrics.timed("prefill"):
        target.prefill()
        governor.begin(*target.last_shape)
    try:
        for text in texts:
            if text.metrics is not target.metrics:
                text.metrics.forwards["prefill"] = 1
        while running := [text for text in texts if not text.done]:
            if all(text.thinking.open for text in running):
                think_on(target, running, schedule, governor)
            else:
                step(target, running, schedule, governor)
    finally:
        target.settle()


def think_on(target: Target, texts: list[TextState], schedule: ForkSchedule, governor: Governor) -> None:
    """Until one of the thoughts closes. Experts have a kernel of their own for one-token steps."""
    with target.model._optimize_model_for_decode():
        while all(text.thinking.open and not text.done for text in texts):
            step(target, texts, schedule, governor)


def step(target: Target, texts: list[TextState], schedule: ForkSchedule, governor: Governor) -> None:
    """One forward for all texts and their children, over what they propose; each takes a token at least."""
    governor.open_round(len(texts))
    needs_forward = not target.has_logits  # the prefill yields the first token, without a draft
    drafts = propose(target, texts, schedule, governor) if needs_forward else {}
    if not drafts:
        drafts = {text.row: Draft() for text in texts}
    phases = [_phase(text, drafts[text.row]) for text in texts]
    phase = next(name for name in ("drafting", "thinking", "verify", "speculate") if name in phases)
    with target.metrics.timed(phase):
        lengths = {text: text.row.length for text in texts}
        recording = any(draft.ids for draft in drafts.values()) or not all(text.thinking.open for text in texts)
        try:
            logits = target.forward(phase, drafts, recording)
        except torch.OutOfMemoryError:
            if not (drop_children(texts) and target.undo_forward()):
                raise
            target.keep([text.row for text in texts])
            logits = target.forward(phase, drafts, recording)
        for child in (text.child for text in texts if text.child is not None and text.child.row in logits):
            child.forwards += 1
            child.seconds += target.metrics.timeline[-1][-1]
        for text, own_phase in zip(texts, phases, strict=True):
            draft = drafts[text.row]
            if text.metrics is not target.metrics:
                text.metrics.forwards[own_phase] += needs_forward
            if text.thinking.open:
                think(text, draft, drafts, logits, schedule, governor)
            else:
                record = text.drafter.record  # a thought may open on the way, and has another
                record.note(draft, verify(text, draft, logits[text.row], needs_forward))
        if needs_forward:
            governor.pay([text.row.length - length for text, length in lengths.items()], *target.last_shape)
        stop_costly_children(target, texts, schedule, governor)
        arrange_rows(target, texts, governor.clock)
        governor.close_round(target.last_shape if needs_forward else None)


def _phase(text: TextState, draft: Draft) -> str:
    if text.thinking.open:
        return "thinking" if text.child is None else "drafting"
    return "verify" if draft.is_prefix else "speculate"


def propose(target: Target, texts: list[TextState], schedule: ForkSchedule, governor: Governor) -> dict[Row, Draft]:
    """What each row may write next. In a batch, rows that think take one token: else all rows would have to move."""
    children = [text.child for text in texts if text.child is not None]
    # shorter rows are filled up, and nothing may lie past the end
    room = min(each.row.room for each in [*texts, *children])
    if target.batch_size > 1:

        def shape(length: int) -> tuple[int, int]:
            return target.shape_of([1 + length if row.origin is None else 1 for row in target.rows])

        return {
            text.row: Draft() if text.thinking.open else governor.fitted(text.propose(room - 1), shape)
            for text in texts
        }
    (text,) = texts
    child, limit = text.child, room - 1
    may_differ = child is None or target.takes_uneven_blocks
    if text.thinking.open:
        limit = min(limit, until_fork(text, schedule)) if may_differ and text.speculates_thinking else 0
    draft = governor.fitted(text.propose(limit), lambda n: target.shape_of([1 + n, *[1] * len(children)]))
    drafts = {text.row: draft}
    if child is not None and may_differ:
        own, forced = 1 + len(draft.ids), child.forced(room - 1)
        ahead = child.propose(room - 1 - len(forced))
        ahead = governor.fitted(ahead, lambda n: target.shape_of([own, 1 + len(forced) + n]), target.shape_of([own]))
        drafts[child.row] = child.behind_close(forced, ahead)
    return drafts


def until_fork(text: TextState, schedule: ForkSchedule) -> int:
    """Tokens that the thought may grow by before a budget that was asked for."""
    budget = None if schedule.is_auto else text.next_budget(schedule)
    return text.row.room if budget is None else budget - text.thinking.thinking_tokens


def think(
    text: TextState,
    draft: Draft,
    drafts: Mapping[Row, Draft],
    logits: dict[Row, torch.FloatTensor],
    schedule: ForkSchedule,
    governor: Governor,
) -> None:
    """
    The parent takes the tokens of its thought that it would have written anyway, and one more. At a budget it is
    forked before the last: the child closes the thought at once and drafts the answer, step by step with the parent.
    """
    own_logits, child = logits[text.row], text.child
    if child is not None and child.row in logits:
        with text.metrics.timed("drafting_exposed"):  # the parent waits for it
            child.choose(drafts.get(child.row, Draft()), logits[child.row])
            text.stream.preview(child.tokens)
    choices = text.choices(own_logits)
    for kept in range(own_logits.shape[1]):
        token = next(choices)
        agrees = draft.ids[kept : kept + 1] == [token]
        if not agrees and may_fork(text, token, schedule, governor):
            with governor.clock.apart("fork", own_logits.device):
                text.end_stage("fork")
                text.fork(text.thinking.thinking_tokens)
                text.child.choose(Draft(), own_logits[:, kept : kept + 1])
        text.emit(token, draft.source if agrees else "model")
        text.drafter.observe(token)
        if not agrees or text.done or not text.thinking.open:
            break
    kept += agrees
    text.records["thought"].note(draft, kept)
    text.metrics.thinking_drafted_tokens += len(draft.ids)
    text.metrics.thinking_accepted_tokens += kept
    if text.child is not None and text.child.ended_by:
        text.end_stage(text.child.ended_by)
    if text.done or not text.thinking.open:
        text.end_stage("stop" if text.thinking.open else "close")
        if not text.done:
            text.begin_answer()


def may_fork(text: TextState, token: int, schedule: ForkSchedule, governor: Governor) -> bool:
    """Whether a stage begins before `token` of the thought."""
    budget = text.next_budget(schedule)
    if budget is None or budget > text.thinking.thinking_tokens or not text.can_draft_ahead_of(token):
        return False
    return not schedule.is_auto or governor.allows_stage()


def stop_costly_children(target: Target, texts: list[TextState], schedule: ForkSchedule, governor: Governor) -> None:
    """Under automatic budgets, what is not paid back has a limit."""
    children = [text for text in texts if text.child is not None and text.child.row in target.rows]
    shape = target.shape_of([1] * len(target.rows))
    if schedule.is_auto and children and not governor.allows_child(len(texts), shape):
        for text in children:
            text.end_stage("overhead")


def drop_children(texts: list[TextState]) -> bool:
    """There is no memory for them; whether there were any. What they have drafted stays."""
    parents = [text for text in texts if text.child is not None]
    for text in parents:
        text.end_stage("out_of_memory")
    return bool(parents)


def arrange_rows(target: Target, texts: list[TextState], clock: RoundClock) -> None:
    """The cache forgets what was rejected; rows of texts that are done and of ended children go, new children come."""
    if target.batch_size > 1 and all(text.done for text in texts):
        return
    kept = [text for text in texts if not text.done] or texts
    children = {text.child.row: text for text in kept if text.child is not None}
    new = [row for row in children if row not in target.rows]
    rows = [text.row for text in kept] + [row for row in children if row in target.rows]
    changes = new or len(rows) < len(target.rows)
    ends = any(row.origin is not None and row not in rows for row in target.rows)
    with target.metrics.timed("drafting_exposed") if changes else nullcontext():
        with clock.apart("end", texts[0].row.ids.device) if ends else nullcontext():
            target.keep(rows)
        if not new:
            return
        try:
            with clock.apart("fork", texts[0].row.ids.device):
                target.fork(new)
        except torch.OutOfMemoryError:
            for row in new:
                children[row].end_stage("out_of_memory")
