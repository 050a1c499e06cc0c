"""
*classeval*: write a Python class from its skeleton; its unit tests are run (arXiv 2308.01861).

The data is CC BY-NC 4.0: measure with it, give its authors credit, and publish neither prompts nor answers.
"""

import re
from pathlib import Path

from ..sandbox import run_python
from .rows import Item, last_block, read_rows

MAY_PUBLISH = False  # CC BY-NC 4.0
FILE = "classeval.jsonl"
SOURCE = "data/ClassEval_data.json of github.com/FudanSELab/ClassEval, one row a line"
FIELDS = ("task_id", "class_name", "import_statement", "skeleton", "test")
ASK = (
    "Complete the class {}: write the body of every method. Answer with the whole class and its imports in one "
    "```python block.\n\n```python\n{}\n```"
)
SECONDS = 60.0  # some import much
RUN = """
import sys, unittest
_load = unittest.defaultTestLoader.loadTestsFromTestCase
_result = unittest.TextTestRunner(stream=sys.stderr).run(unittest.TestSuite(map(_load, [{}])))
assert _result.testsRun and _result.wasSuccessful() and not _result.skipped
"""


def load(limit: int, data: Path | None) -> list[Item]:
    """The first `limit` classes, in the file's order. `data` is the row."""
    rows = read_rows("classeval", data, FILE, SOURCE, FIELDS)
    return [
        Item("classeval", row["task_id"], ASK.format(row["class_name"], row["skeleton"]), row) for row in rows[:limit]
    ]


def score(item: Item, answer: str) -> float:
    """1 if all tests of the row pass, those of every method and of the class as a whole, else 0."""
    row = item.data
    code = last_block(answer, ("python", "py", "python3", ""), rf"^class {re.escape(row['class_name'])}\b")
    candidate = "\n".join([*row["import_statement"], answer if code is None else code])
    names = re.findall(r"^class (\w+)\(.*TestCase\)", row["test"], re.M)  # none that the answer may define
    return float(run_python(candidate, row["test"] + RUN.format(", ".join(names)), SECONDS).status == "passed")
