"""The tasks of `hf-ssr bench`: those of the small reasoner, and public benchmarks whose data the user has."""

from pathlib import Path
from typing import Protocol

from .tasks import HELD_OUT, TASKS, check, classeval, draw, gsm8k, humaneval, longproc, spec_bench
from .tasks.rows import Item


class Task(Protocol):
    """
    What a task is made of: a module or an object.

    Args:
        MAY_PUBLISH (`bool`): whether its licence lets prompts, and answers to them, be published.
    """

    MAY_PUBLISH: bool

    def load(self, limit: int, data: Path | None) -> list[Item]: ...

    def score(self, item: Item, answer: str) -> float | None: ...


class _OfReasoner:
    MAY_PUBLISH = True

    def __init__(self, family: str):
        self._family = family

    def load(self, limit: int, data: Path | None) -> list[Item]:
        samples = [draw(self._family, HELD_OUT + i) for i in range(limit)]
        return [Item(self._family, str(i), sample.prompt, sample) for i, sample in enumerate(samples)]

    def score(self, item: Item, answer: str) -> float:
        return float(check(item.data, answer))


SUITE: dict[str, Task] = {
    **{family: _OfReasoner(family) for family in TASKS},
    "humaneval": humaneval,
    "classeval": classeval,
    "longproc": longproc,
    "gsm8k": gsm8k,
    "spec_bench": spec_bench,
}
MAY_PUBLISH = {name: task.MAY_PUBLISH for name, task in SUITE.items()}


def load(task: str, limit: int, data: Path | None) -> list[Item]:
    """
    The first prompts of a task; the same ones every time.

    Args:
        task (`str`): of `SUITE`.
        limit (`int`): how many, or fewer where there are no more.
        data (`Path`, *optional*): the folder with the data of public benchmarks, the setting `--data`.

    Raises:
        `ValueError`: if the task needs a file that is not there, or that is not as it should be.
    """
    return SUITE[task].load(limit, data)


def score(item: Item, answer: str) -> float | None:
    """
    How right an answer is, by its task's rule.

    Args:
        item (`Item`): what was asked.
        answer (`str`): the model's, without its thought.

    Returns:
        From 0 to 1; `None` where there is no rule, or not what it takes (a compiler).
    """
    return SUITE[item.task].score(item, answer)


__all__ = ["MAY_PUBLISH", "SUITE", "Item", "Task", "load", "score"]
