"""Which tokens of a draft are kept."""

from collections.abc import Callable, Sequence


def verify_exact(draft: Sequence[int], next_token: Callable[[int], tuple[int, bool]]) -> tuple[int, bool]:
    """
    The exact rule: the target picks each token as plain `generate` does (one random draw each, in order), and the draft
    is kept as long as it agrees. The output is plain `generate`'s own path, whatever was drafted; a draft token is
    accepted with the probability that the target gives it.

    Args:
        draft (`Sequence[int]`): the proposed tokens.
        next_token (`Callable[[int], tuple[int, bool]]`): given how many draft tokens have been kept, picks and emits
            the target's token there; returns it, and whether the text goes on.

    Returns:
        `tuple[int, bool]`: how many draft tokens were kept, and whether a token of the target's own followed them.
    """
    for kept, proposed in enumerate(draft):
        token, goes_on = next_token(kept)
        if token != proposed:
            return kept, True
        if not goes_on:
            return kept + 1, False
    next_token(len(draft))
    return len(draft), True
