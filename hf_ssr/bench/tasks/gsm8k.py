"""*gsm8k*: word problems whose answer is a number (arXiv 2110.14168)."""

import re
from decimal import Decimal
from pathlib import Path

from .rows import Item, read_rows

MAY_PUBLISH = True  # MIT
FILE = "gsm8k_100.jsonl"
SOURCE = "rows of grade_school_math/data/test.jsonl of github.com/openai/grade-school-math"
ASK = "{}\n\nEnd your answer with a line of #### and the final number."


def load(limit: int, data: Path | None) -> list[Item]:
    """The first `limit` problems, in the file's order. `data` is the solution that comes with it."""
    rows = read_rows("gsm8k", data, FILE, SOURCE, ("question", "answer"))
    return [
        Item("gsm8k", str(row.get("index", number)), ASK.format(row["question"]), row["answer"])
        for number, row in enumerate(rows[:limit])
    ]


def score(item: Item, answer: str) -> float:
    """1 if the answer's number is that of the solution, else 0."""
    return float(same_number(item.data, answer))


def same_number(solution: str, answer: str) -> bool:
    """Whether both end in the same number; `18`, `$18` and `18.00` are the same."""
    right = number_of(solution)
    return right is not None and number_of(answer) == right


def number_of(text: str) -> Decimal | None:
    """
    The number that a text gives as its answer: the last one of the line after the last `####`, else of the last
    `\\boxed{}`, else of the text.
    """
    if "####" in text:
        text = text.rpartition("####")[2].strip().split("\n")[0]
    elif boxed := re.findall(r"\\boxed\{([^{}]*)", text):
        text = boxed[-1]
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("$", ""))
    numbers = re.findall(r"(?:(?<![\w)])-)?(?:\d+(?:\.\d+)?|\.\d+)", text)
    return Decimal(numbers[-1]) if numbers else None
