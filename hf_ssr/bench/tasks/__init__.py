"""
Three families of small tasks with a thought: a class to write, a ledger to keep, a path to find.

The prompts of a family are split in three by a hash, and a seed draws from one part only: whatever the seeds,
no held-out prompt is ever trained on.
"""

import random
import zlib

from . import classes, ledgers, paths
from .sample import Sample, cut_thought

TASKS = {"class": classes, "ledger": ledgers, "path": paths}
VALIDATION = 5 * 10**8  # the first seed of the validation tasks
HELD_OUT = 10**9  # the first seed of the held-out tasks
EXAMPLE = """Write the Python class Book. Sort its fields by name.
0 title: str = "white"
1 year: int = 9
2 owner: str = "pink\""""  # to be copied by who wants to try the reasoner; held out


def split_of(prompt: str) -> str:
    """The part a prompt belongs to: `"held-out"`, `"validation"` (2 % each) or `"training"`."""
    return {0: "held-out", 1: "validation"}.get(zlib.crc32(prompt.encode()) % 50, "training")


def draw(task: str, seed: int) -> Sample:
    """The sample of a family for a seed: a held-out one for seeds from `HELD_OUT` on."""
    wanted = "held-out" if seed >= HELD_OUT else "validation" if seed >= VALIDATION else "training"
    rng = random.Random(f"{task} {seed}")
    while split_of((sample := TASKS[task].make(rng)).prompt) != wanted:
        pass
    return sample


def task_of(prompt: str) -> str | None:
    """The family that a prompt is of: it is worded like it, line by line, and in its words. `None` if it is of none."""
    return next((task for task, family in TASKS.items() if family.is_one(prompt)), None)


def check(sample: Sample, answer: str) -> bool:
    """Whether `answer` is right for `sample`, by the rule of its family."""
    return TASKS[sample.task].check(sample, answer)


__all__ = [
    "EXAMPLE",
    "HELD_OUT",
    "TASKS",
    "VALIDATION",
    "Sample",
    "check",
    "cut_thought",
    "draw",
    "split_of",
    "task_of",
]
