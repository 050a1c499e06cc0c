"""*humaneval*: complete a Python function; its tests are run (arXiv 2107.03374)."""

import re
import textwrap
from pathlib import Path

from ..sandbox import run_python
from .rows import Item, last_block, read_rows

MAY_PUBLISH = True  # MIT
FILE = "humaneval.jsonl"
SOURCE = "data/HumanEval.jsonl.gz of github.com/openai/human-eval, unzipped"
FIELDS = ("task_id", "prompt", "entry_point", "test")
ASK = "Complete this Python function. Answer with the whole function in one ```python block.\n\n```python\n{}```"


def load(limit: int, data: Path | None) -> list[Item]:
    """The first `limit` problems, in the file's order. `data` is the row."""
    rows = read_rows("humaneval", data, FILE, SOURCE, FIELDS)
    return [Item("humaneval", row["task_id"], ASK.format(row["prompt"]), row) for row in rows[:limit]]


def score(item: Item, answer: str) -> float:
    """1 if the row's tests pass on the last Python block, or on the answer if it has none, else 0."""
    row = item.data
    outcome = run_python(program_of(row, answer), f"{row['test']}\ncheck({row['entry_point']})\n")
    return float(outcome.status == "passed")


def program_of(row: dict, answer: str) -> str:
    """The prompt with the answer put in: imports and helpers stay, and the signature where the answer leaves it out."""
    signature = rf"^(?:async )?def {re.escape(row['entry_point'])}\b"
    code = last_block(answer, ("python", "py", "python3", ""), signature)
    code = answer if code is None else code
    if re.search(signature, code, re.M):
        return re.split(signature, row["prompt"], maxsplit=1, flags=re.M)[0] + code
    first = next((line for line in code.split("\n") if line.strip()), "")
    return row["prompt"] + (code if first[:1].isspace() else textwrap.indent(code, "    "))
