"""
*spec_bench*: the questions on which speculative decoding is compared, of 13 kinds (arXiv 2401.07851).

Of a question with two turns the first is asked.
"""

from itertools import zip_longest
from pathlib import Path

from .gsm8k import same_number
from .rows import Item, read_rows

MAY_PUBLISH = True  # Apache-2.0
FILE = "spec_bench_question.jsonl"
SOURCE = "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"
FIELDS = ("question_id", "category", "turns")


def load(limit: int, data: Path | None) -> list[Item]:
    """`limit` questions, of each kind in turn. `data` is the solution of those from GSM8K, else `None`."""
    kinds: dict[str, list[dict]] = {}
    for row in read_rows("spec_bench", data, FILE, SOURCE, FIELDS):
        kinds.setdefault(row["category"], []).append(row)
    rows = [row for turn in zip_longest(*kinds.values()) for row in turn if row is not None]
    return [
        Item("spec_bench", f"{row['category']}/{row['question_id']}", row["turns"][0], _solution(row))
        for row in rows[:limit]
    ]


def score(item: Item, answer: str) -> float | None:
    """As for gsm8k where the question is from there; `None` for all others, which have no rule."""
    return None if item.data is None else float(same_number(item.data, answer))


def _solution(row: dict) -> str | None:
    references = row.get("reference") or [""]
    return references[0] if row["category"] == "math_reasoning" and "####" in references[0] else None
