"""The tasks of `hf-ssr bench`: those of the small reasoner, and public benchmarks whose data the user has."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from .tasks import HELD_OUT, TASKS, check, classeval, draw, gsm8k, humaneval, longproc, spec_bench
from .tasks.rows import Item

MOST_GENERATED = 1000  # prompts of a task that is generated, and so has no end


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
        if limit > MOST_GENERATED:
            raise ValueError(
                f"--limit must be at most {MOST_GENERATED} for the task {self._family!r}, whose prompts are generated "
                f"without end, but is {limit}."
            )
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

Text = tuple[str, str, str, str, Item | None]  # task, name, prompt, how the model's turn begins, what scores it


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


def texts_of(tasks: Sequence[str], limit: int, data: Path | None, prompts: Path | None) -> list[Text]:
    """
    What a bench is to ask, as text.

    Args:
        tasks (`Sequence[str]`): of `SUITE`.
        limit (`int`): prompts of each task.
        data, prompts (`Path`, *optional*): the settings `--data` and `--prompts`.

    Returns:
        Of each prompt its task, its name, its text, how the model's turn begins, and what to score an answer by.

    Raises:
        `ValueError`: for a file that is missing or not as it should be, and if there is nothing to ask.
    """
    texts: list[Text] = [(task, item.name, item.prompt, "", item) for task in tasks for item in load(task, limit, data)]
    if prompts is not None:
        own: list[Text] = [(*entry, None) for entry in _own_prompts(prompts, limit)]
        if not own:
            raise ValueError(f"--prompts {prompts} is empty: give a line of JSON with `prompt` for each.")
        texts += own
    if not texts:
        raise ValueError("there is nothing to run: name some --tasks, or give --prompts.")
    return texts


def _own_prompts(path: Path, limit: int) -> Iterator[tuple[str, str, str, str]]:
    counts: dict[str, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        where = f"--prompts {path}: line {number + 1}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is no JSON: {error}.") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise ValueError(f"{where} has no `prompt`.")
        task, prefill = entry.get("task", path.stem), entry.get("prefill", "")
        if not isinstance(task, str) or not isinstance(prefill, str):
            raise ValueError(f"{where}: `task` and `prefill` must be texts.")
        counts[task] = counts.get(task, 0) + 1
        if counts[task] <= limit:
            yield task, str(entry.get("name", number)), entry["prompt"], prefill


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


__all__ = ["MAY_PUBLISH", "MOST_GENERATED", "SUITE", "Item", "Task", "load", "score", "texts_of"]
