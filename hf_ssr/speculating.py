"""A round of speculation: a draft and its verification by one target forward; with any drafter."""

import torch

from .drafting import Draft
from .metrics import SSRMetrics
from .state import TextState
from .verifying import verify_exact


def verify(text: TextState, draft: Draft, logits: torch.FloatTensor, needed_forward: bool = True) -> None:
    """
    Writes on as far as the draft agrees, and one token further. A round without a draft is a plain step.

    Args:
        text ([`TextState`]): outside its thought.
        draft ([`Draft`]): proposed tokens.
        logits (`torch.FloatTensor` of shape `(1, draft_length + 1, vocab_size)`): what the target says after the text,
            and after each draft token.
        needed_forward (`bool`): whether there was one; the prefill yields the first token.
    """
    choices = text.choices(logits)
    source = "prefix" if draft.is_prefix else draft.source

    def next_token(kept: int) -> tuple[int, bool]:
        token = next(choices)
        is_accepted = draft.ids[kept : kept + 1] == [token]
        text.emit(token, source if is_accepted else "model")
        text.drafter.observe(token)
        return token, not (text.done or text.thinking.open)

    kept, followed = verify_exact(draft.ids, next_token)
    _count(text.metrics, draft, kept, followed)
    text.metrics.lookups += needed_forward and not draft.is_prefix


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
