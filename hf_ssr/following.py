"""Which tokens a lane takes of a draft: by a rule, along a chain or a tree, and one token of its own further."""

from collections.abc import Callable, Iterator

import torch

from .choosing import Chooser
from .drafting import Draft, Evidence
from .verifying import DraftProbs, accepts, block_acceptance, residual

# Of each token that comes next: it, and the index of the draft token that it is; `None` = it was not proposed
Decisions = Iterator[tuple[int, int | None]]


def follow(lane, draft: Draft, evidence: Evidence) -> None:
    """
    A lane goes on along a draft as far as its rule keeps it, and by one token of its own. Without a draft that is a
    plain step.

    Args:
        lane ([`Lane`]): decides, and is given the tokens.
        draft ([`Draft`]): what was proposed to it.
        evidence ([`Evidence`]): what the target says behind the text, and behind each draft token.
    """
    drafter, phase = lane.drafter, lane.phase(draft)  # a thought that opens on the way has another drafter
    source = "prefix" if draft.is_prefix else draft.source
    places, has_parted = [0], False  # the kept places, in order
    for token, node in lane.decide(draft, evidence.logits):
        has_parted = node is None
        if has_parted:
            lane.part(token, evidence.of(0, places[-1], places[-1] + 1))
        goes_on = lane.take(token, source if node is not None else "model")
        if has_parted:
            break
        places.append(node + 1)
        if not goes_on:
            break
    drafter.show(evidence, [place for place in places if place < evidence.logits.shape[1]])
    drafter.record.note(draft, len(places) - 1, draft.forced)
    lane.note(draft, phase, len(places) - 1, has_parted)


def exact(draft: Draft, picks: Callable[[int], int]) -> Decisions:
    """
    The exact rule: each token is picked as without a draft (one random draw each, in order), and the draft is kept as
    long as it agrees. The text is the one without drafts, whatever was drafted; a draft token is accepted with the
    probability that the target gives it.

    Args:
        draft ([`Draft`]): a chain or a tree.
        picks (`Callable[[int], int]`): the token at a place; each is taken before the next is asked for.
    """
    node: int | None = -1
    while node is not None:
        token = picks(node + 1)
        node = draft.after(node, token)
        yield token, node


def by_tokens(chooser: Chooser, draft: Draft, logits: torch.Tensor) -> Decisions:
    """
    The token rule, along a chain. The processors see a token only when those before it are kept.

    Args:
        chooser ([`Chooser`]): of the text.
        draft ([`Draft`]): with what its tokens were drawn from.
        logits (`torch.FloatTensor` of shape `(1, draft_length + 1, vocab_size)`): what the target says.
    """
    tokens, qs = _drawn(draft)
    for place, (token, q) in enumerate(zip(tokens, qs, strict=True)):
        scores, raw = chooser.processed(logits[:, place])
        chooser.keep_scores(scores, raw)
        probs = scores[0].softmax(dim=-1)
        q = DraftProbs.one_hot(token, probs) if q is None else q
        if not accepts(probs, token, q, torch.rand((), device=probs.device)):
            yield _draw(residual(probs, q)), None
            return
        yield token, place
    if draft.then is None:
        yield chooser.choose(logits[:, -1]), None


def by_blocks(chooser: Chooser, draft: Draft, logits: torch.Tensor) -> Decisions:
    """The block rule, along a chain: it looks at the target's distribution behind every draft token. As `by_tokens`."""
    tokens, drawn = _drawn(draft)
    scores, raw = chooser.processed_ahead(logits, tokens)
    probs = scores.softmax(dim=-1).double()
    qs = [DraftProbs.one_hot(token, probs) if q is None else q for token, q in zip(tokens, drawn, strict=True)]
    passing, weight = block_acceptance(probs, tokens, qs)
    passed = torch.rand(len(tokens), dtype=probs.dtype, device=probs.device) < passing[1:]
    kept = int(passed.nonzero()[-1]) + 1 if passed.any() else 0
    for place in range(kept):
        chooser.keep_scores(scores[place : place + 1], raw[place : place + 1])
        yield tokens[place], place
    if kept < len(tokens) or draft.then is None:
        chooser.keep_scores(scores[kept : kept + 1], raw[kept : kept + 1])
        is_whole = kept == len(tokens)
        yield _draw(probs[kept] if is_whole else residual(weight[kept] * probs[kept], qs[kept])), None


def _drawn(draft: Draft) -> tuple[list[int], list[DraftProbs | None]]:
    """The draft with the token behind it. If all is kept, no token is drawn that could part from the draft."""
    return draft.ids if draft.then is None else [*draft.ids, draft.then], draft.probs


def _draw(probs: torch.Tensor) -> int:
    return int(torch.multinomial(probs, num_samples=1))
