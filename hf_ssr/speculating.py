"""Rounds of speculation: draft, one target forward, verify, forget what was rejected; with any drafter."""

from .drafting import Draft, Drafter
from .metrics import SSRMetrics
from .state import TargetState
from .verifying import verify_exact


def speculate(target: TargetState, drafter: Drafter) -> None:
    """
    Writes on until the text is done or a thought opens. A round without a draft is a plain step.

    Args:
        target ([`TargetState`]): one row, no child.
        drafter ([`Drafter`]): proposes; is told every token.
    """
    with target.rollback:
        try:
            while not (target.done or target.thinking.open):
                round_of_speculation(target, drafter)
        finally:
            target.settle()


def round_of_speculation(target: TargetState, drafter: Drafter) -> None:
    """One draft and its verification: one target forward."""
    is_prefilled = target.has_logits  # the first token needs no forward, and so no draft
    # the forward also yields the token behind the draft
    draft = Draft() if is_prefilled else drafter.propose(min(drafter.num_draft_tokens, target.room - 1))
    phase = "verify" if draft.is_prefix else "speculate"
    with target.metrics.timed(phase):
        logits = target.forward(phase, draft.ids)
        choices = target.choices(logits)

        def next_token(kept: int) -> tuple[int, bool]:
            token = next(choices)
            target.emit(token)
            drafter.observe(token)
            return token, not (target.done or target.thinking.open)

        kept, followed = verify_exact(draft.ids, next_token)
        target.roll_back_rejected()
    _count(target.metrics, draft, kept, followed)
    target.metrics.lookups += not (draft.is_prefix or is_prefilled)


def _count(metrics: SSRMetrics, draft: Draft, kept: int, followed: bool) -> None:
    if draft.is_prefix:
        metrics.prefix_accepted += kept
    else:
        metrics.hits += kept > 0
        if draft.source is not None:
            metrics.suffix_accepted[draft.source] += kept
    metrics.drafted_tokens += len(draft.ids)
    metrics.rounds += bool(draft.ids)
    if followed:
        if not draft.ids:
            metrics.plain_tokens += 1
        elif kept == len(draft.ids):
            metrics.bonus_tokens += 1
        else:
            metrics.recovered_tokens += 1
