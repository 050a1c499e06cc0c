"""A round of speculation: a draft and its verification by one target forward; with any drafter."""

import torch

from .drafting import Draft
from .metrics import SSRMetrics
from .state import TextState
from .verifying import DraftProbs, accepts, block_acceptance, residual, verify_exact


def verify(text: TextState, draft: Draft, logits: torch.FloatTensor, needed_forward: bool = True) -> int:
    """
    Writes on as far as the rule accepts the draft, and one token further. A round without a draft is a plain step.

    Args:
        text ([`TextState`]): outside a thought; it goes no further where one opens.
        draft ([`Draft`]): proposed tokens.
        logits (`torch.FloatTensor` of shape `(1, draft_length + 1, vocab_size)`): what the target says after the text,
            and after each draft token.
        needed_forward (`bool`): whether there was one; the prefill yields the first token.

    Returns:
        `int`: draft tokens kept.
    """
    if text.config.rule in ("speculative", "block") and any(q is not None for q in draft.probs):
        follow = _follow_block if text.config.rule == "block" and text.processors_keep_no_state else _follow_tokens
    else:
        follow = _follow_exact
    kept, followed, count = follow(text, draft, logits)
    _count(text.metrics, draft, count, kept, followed)
    text.metrics.lookups += needed_forward and not draft.is_prefix
    return kept


def _emit(text: TextState, token: int, source: str = "model") -> bool:
    """Whether the text goes on behind it."""
    text.emit(token, source)
    text.drafter.observe(token)
    return not (text.done or text.thinking.open)


def _follow_exact(text: TextState, draft: Draft, logits: torch.FloatTensor) -> tuple[int, bool, int]:
    """Draft tokens kept; whether a token of the target's own followed them; draft tokens verified."""
    choices = text.choices(logits)
    source = "prefix" if draft.is_prefix else draft.source

    def next_token(kept: int) -> tuple[int, bool]:
        token = next(choices)
        is_accepted = draft.ids[kept : kept + 1] == [token]
        return token, _emit(text, token, source if is_accepted else "model")

    return *verify_exact(draft.ids, next_token), len(draft.ids)


def _drawn(draft: Draft) -> tuple[list[int], list[DraftProbs | None]]:
    """The draft with the token behind it. If all is kept, no token is drawn that could part from the draft."""
    return draft.ids if draft.then is None else [*draft.ids, draft.then], draft.probs


def _follow_tokens(text: TextState, draft: Draft, logits: torch.FloatTensor) -> tuple[int, bool, int]:
    """By the token rule. The processors see a token only when those before it are kept."""
    tokens, qs = _drawn(draft)
    for kept, (token, q) in enumerate(zip(tokens, qs, strict=True)):
        scores, raw = text.processed(logits[:, kept])
        text.keep_scores(scores, raw)
        probs = scores[0].softmax(dim=-1)
        q = DraftProbs.one_hot(token, probs) if q is None else q
        if not accepts(probs, token, q, torch.rand((), device=probs.device)):
            _emit(text, _draw(residual(probs, q)))
            return kept, True, len(tokens)
        if not _emit(text, token, "prefix"):
            return kept + 1, False, len(tokens)
    if draft.then is None:
        _emit(text, text.choose(logits[:, -1]))
    return len(tokens), draft.then is None, len(tokens)


def _follow_block(text: TextState, draft: Draft, logits: torch.FloatTensor) -> tuple[int, bool, int]:
    """By the block rule, which looks at the target's distribution behind every draft token."""
    tokens, qs = _drawn(draft)
    scores, raw = text.processed_ahead(logits, tokens)
    probs = scores.softmax(dim=-1).double()
    qs = [DraftProbs.one_hot(token, probs) if q is None else q for token, q in zip(tokens, qs, strict=True)]
    passing, weight = block_acceptance(probs, tokens, qs)
    passed = torch.rand(len(tokens), dtype=probs.dtype, device=probs.device) < passing[1:]
    kept = int(passed.nonzero()[-1]) + 1 if passed.any() else 0
    for i in range(kept):
        text.keep_scores(scores[i : i + 1], raw[i : i + 1])
        if not _emit(text, tokens[i], "prefix"):
            return i + 1, False, len(tokens)
    followed = kept < len(tokens) or draft.then is None
    if followed:
        text.keep_scores(scores[kept : kept + 1], raw[kept : kept + 1])
        is_whole = kept == len(tokens)
        _emit(text, _draw(probs[kept] if is_whole else residual(weight[kept] * probs[kept], qs[kept])))
    return kept, followed, len(tokens)


def _draw(probs: torch.FloatTensor) -> int:
    return int(torch.multinomial(probs, num_samples=1))


def _count(metrics: SSRMetrics, draft: Draft, count: int, kept: int, followed: bool) -> None:
    if draft.is_prefix:
        metrics.prefix_accepted += kept
    else:
        metrics.hits += kept > 0
        if draft.source is not None:
            metrics.suffix_accepted[draft.source] += kept
    if draft.stage is not None:
        draft.stage.accepted_tokens += kept
    metrics.add_round(count, kept)
    if followed:
        if not count:
            metrics.plain_tokens += 1
        elif kept == count:
            metrics.bonus_tokens += 1
        else:
            metrics.recovered_tokens += 1
