"""Stages: where a text is forked, what its child is given, and what is left when the child ends."""

from collections.abc import Sequence

import torch

from .child import Child
from .choosing import DraftSampling
from .drafting import Draft, Evidence
from .following import follow
from .host import eos_token_ids
from .lanes import Lane, Parent
from .metrics import Stage
from .processors import child_processors
from .scheduling import ForkSchedule, Governor
from .target import Target


class Stages:
    """
    The forks of one text, one child at a time: a new fork ends the older child, whose tokens stay as a draft.

    Args:
        parent ([`Parent`]): whose thought is forked.
        schedule ([`ForkSchedule`]): at which budgets.
        governor ([`Governor`]): whether it is worth while.
    """

    def __init__(self, parent: Parent, schedule: ForkSchedule, governor: Governor):
        self.child: Child | None = None
        self._parent, self._schedule, self._governor = parent, schedule, governor
        self._last_budget: int | None = None  # of the stages so far

    @property
    def tokens_until_budget(self) -> int:
        """Tokens that the thought may grow by before a budget that was asked for."""
        budget = None if self._schedule.is_auto else self._next_budget()
        return self._parent.row.room if budget is None else budget - self._parent.thinking.thinking_tokens

    def _next_budget(self) -> int | None:
        """Thinking tokens, of now or later, after which a stage begins."""
        drafts = [draft.tokens for draft, *_ in self._parent.sources.drafts[-2:]]
        return self._schedule.next_budget(self._parent.thinking.thinking_tokens, drafts, self._last_budget)

    def begin_before(self, token: int, evidence: Evidence) -> None:
        """
        If a budget is reached, and `token` does not close the thought, a stage begins in front of it: the child closes
        the thought at once and drafts the answer, step by step with the parent.
        """
        budget = self._next_budget()
        if budget is None or budget > self._parent.thinking.thinking_tokens or not self._has_room_before(token):
            return
        if not self._governor.allows_stage():
            return
        with self._governor.clock.apart("fork", evidence.logits.device):
            self.end("fork")
            self.child = self._fork()
            self._last_budget = self.child.draft_budget
            follow(self.child, Draft(), evidence)

    def _has_room_before(self, token: int) -> bool:
        """Whether the thought goes on with `token`, and there is room for its close and an answer."""
        thinking = self._parent.thinking
        closing = thinking.forced is not None or thinking.closes_with(token)
        return not closing and self._parent.row.room > len(thinking.known_markers.forced_close) + 1

    def _fork(self) -> Child:
        """A child that goes on from the text with the forced close."""
        parent, chooser, thinking = self._parent, self._parent.chooser, self._parent.thinking
        config, rule = chooser.config, chooser.config.rule
        temperature = config.draft_temperature
        as_parent = temperature is None and rule != "exact"
        if temperature is None:
            temperature = float(as_parent)  # the parent's own is among its processors
        sampling = DraftSampling(temperature)
        if rule == "coupled":
            sampling.noise = chooser.seed, thinking.other_tokens + len(thinking.tail)
        elif temperature > 0:
            # other rules than the exact one are right only if drafts differ from run to run
            seed = (config.setting("draft_seed") + thinking.thinking_tokens + chooser.seed) % 2**63
            sampling.generator = torch.Generator(parent.row.ids.device).manual_seed(seed)
            sampling.keeps_probs = rule != "exact"
        return Child(
            parent.row.fork(),
            thinking.thinking_tokens,
            thinking.known_markers.forced_close,
            child_processors(chooser.logits_processor, temperature == 0, not as_parent),
            sampling,
            eos_token_ids(config),
            parent.sources.drafter_of_child(),
            config.max_draft_length,
            parent.stream,
            parent.metrics,
            self.end,
        )

    def end(self, reason: str) -> None:
        """The child drafts no more; its tokens stay as a draft."""
        if self.child is None:
            return
        child, metrics = self.child, self._parent.metrics
        stage = Stage(child.draft_budget, len(child.tokens), reason, child.forwards, child.seconds, draft=child.tokens)
        metrics.stages.append(stage)
        if child.tokens:
            probs = [None] * len(self._parent.thinking.tail) + child.probs
            self._parent.sources.add_draft(child.drafter.written, probs, stage)
            size = sum(q.nbytes for q in probs if q is not None)
            metrics.draft_probs_bytes = max(metrics.draft_probs_bytes, size)
        self.child = None


def stop_costly_children(lanes: Sequence[Lane], target: Target, governor: Governor) -> None:
    """What is not paid back has a limit."""
    fed = set(target.rows)
    children = [lane.child for lane in lanes if lane.child is not None and lane.child.row in fed]
    if children and not governor.allows_child(len(lanes), target.least_shape):
        for child in children:
            child.end("overhead")


def drop_children(lanes: Sequence[Lane]) -> bool:
    """There is no memory for them; whether there were any. What they have drafted stays."""
    children = [lane.child for lane in lanes if lane.child is not None]
    for child in children:
        child.end("out_of_memory")
    return bool(children)
