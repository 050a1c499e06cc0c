"""One task with its thought and its answer, and how a thought is cut short."""

import random
from typing import Any, NamedTuple


class Sample(NamedTuple):
    """
    A task as the reasoner is to solve it.

    Args:
        task (`str`): the family: `"class"`, `"ledger"` or `"path"`.
        prompt (`str`): the user's message.
        thought (`str`): what is thought, without markers and without white space at its ends.
        answer (`str`): a right answer; others may pass `check` as well.
        data (`Any`): what the family's `check` needs.
    """

    task: str
    prompt: str
    thought: str
    answer: str
    data: Any


def cut_thought(thought: list[int], rng: random.Random) -> list[int]:
    """The thought's tokens up to a random point, from none of them to all but one."""
    return thought[: rng.randrange(len(thought))]
