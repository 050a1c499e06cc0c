"""
*longproc*: long procedures carried out step by step (arXiv 2501.05414), five of its six sub-tasks.

An answer is right or wrong, by the rules that its prompt states. The benchmark's own evaluators differ a little: they
take any integer as a result in *countdown*, leave out the final answer of *tom_tracking*, look at cities and durations
alone in *travel_planning*, where the reference is the one right plan (here any that keeps the constraints), forgive
words such as "on" and "in", and want tags or a fence around a route or a program, which are read as they are here if
there is none.
"""

import re
import shutil
import string
import tempfile
from itertools import chain, pairwise, zip_longest
from pathlib import Path

from ..sandbox import run_program
from .rows import Item, folder_of, last_block, read_rows

MAY_PUBLISH = True  # Apache-2.0
FILES = "longproc_*.jsonl"
SOURCE = (
    "rows of load_longproc_data of github.com/princeton-pli/LongProc, one a line with an `id`, "
    "in a file for each data set, such as longproc_countdown_2k.jsonl"
)
FIELDS = ("id", "input_prompt", "reference_output", "item")
GENERATED = "_generated.jsonl"  # ends the name of a file in LongProc's format that is not its data
MOST = 2_000  # that a result of countdown may be
HEADERS = """
cstdio iostream vector algorithm numeric cmath cstring set map queue stack list fstream climits cassert iomanip sstream
bitset
"""
COMPILE_SECONDS = 60.0


def load(limit: int, data: Path | None) -> list[Item]:
    """
    `limit` rows: the first of each file, then the second of each, and so on, files in the order of their names. `data`
    is the sub-task and the row.

    Raises:
        `ValueError`: if there is no such file, or one of another sub-task.
    """
    paths = sorted(folder_of("longproc", data, FILES, SOURCE).glob(FILES))
    if not paths:
        raise ValueError(f"`--data` {data} has no {FILES}, which the task 'longproc' reads: {SOURCE}.")
    columns = []
    for path in paths:
        name = path.name.removeprefix("longproc_").removeprefix("format_")
        subtask = next((subtask for subtask in RULES if name.startswith(f"{subtask}_")), None)
        if subtask is None:
            raise ValueError(f"`--data`: {path} must be of one of {', '.join(RULES)}. Rename or remove it.")
        label = " (LongProc-format, generated)" if name.endswith(GENERATED) else ""
        rows = read_rows("longproc", data, path.name, SOURCE, FIELDS)
        columns.append([Item("longproc", row["id"] + label, row["input_prompt"], (subtask, row)) for row in rows])
    return [item for item in chain.from_iterable(zip_longest(*columns)) if item is not None][:limit]


def score(item: Item, answer: str) -> float | None:
    """1 if the answer is right, else 0; `None` for *pseudo_to_code* where there is no g++."""
    subtask, row = item.data
    right = RULES[subtask](row, answer)
    return None if right is None else float(right)


def check_countdown(row: dict, answer: str) -> bool:
    """Whether the equations hold, use each number once and end at the target."""
    numbers = list(row["item"]["nums"])
    lines = (_tagged(answer, "Solution") or "").split("\n")
    for line in lines:
        found = re.fullmatch(r"(\d{1,9}) ([-+*/]) (\d{1,9}) = (\d{1,9})", line.strip())
        if not found:
            return False
        a, b, result = int(found[1]), int(found[3]), int(found[4])
        for number in (a, b):
            if number not in numbers:
                return False
            numbers.remove(number)
        right = {"+": a + b == result, "-": a - b == result, "*": a * b == result, "/": a == b * result}[found[2]]
        if not right or not 0 < result <= MOST:
            return False
        numbers.append(result)
    return numbers == [row["item"]["target"]]


def check_tom_tracking(row: dict, answer: str) -> bool:
    """Whether every step, and the final answer, say what the reference says; case, articles and marks do not count."""
    return _steps(answer) == _steps(row["reference_output"])


def _steps(text: str) -> list[str]:
    lines = [line.strip() for line in text.split("\n")]
    kept = [_plain(line) for line in lines if line.startswith("-")]
    return [*kept, *[line for line in map(_plain, lines) if line.startswith("final answer")][-1:]]


def _plain(line: str) -> str:
    words = line.lower().translate(str.maketrans("", "", string.punctuation + "’")).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def check_path_traversal(row: dict, answer: str) -> bool:
    """Whether the route is the reference's, which is the only one, line by line."""
    route = _tagged(answer, "Route")
    return _lines(answer if route is None else route) == _lines(row["reference_output"])


def check_travel_planning(row: dict, answer: str) -> bool:
    """Whether the plan visits each city once, as long and when it should, over flights that exist, from day to day."""
    item = row["item"]
    lines = _lines(_tagged(answer, "Plan") or "")
    stay = r"\*\*Day (\d{1,4})-(\d{1,4}):\*\* (?:Arriving in (.+) and visit|Visit) (.+) for (\d{1,4}) days?\."
    flight = r"\*\*Day (\d{1,4}):\*\* Fly from (.+) to (.+)\."
    stays = [found for line in lines[::2] if (found := re.fullmatch(stay, line))]
    flights = [found for line in lines[1::2] if (found := re.fullmatch(flight, line))]
    if len(stays) + len(flights) != len(lines) or len(stays) != len(flights) + 1:
        return False
    days = {found[4]: (int(found[1]), int(found[2])) for found in stays}
    told = [(days[found[4]][1] - days[found[4]][0] + 1, found[3] or found[4]) for found in stays]
    if told != [(int(found[5]), found[4]) for found in stays] or not len(days) == len(stays) == item["num_cities"]:
        return False
    starts, ends = zip(*days.values(), strict=True)
    if (starts[0], ends[-1]) != (1, item["total_days"]) or starts[1:] != ends[:-1]:
        return False
    wanted = [(days[a][1], a, b) for a, b in pairwise(days)]
    if [(int(found[1]), found[2], found[3]) for found in flights] != wanted:
        return False
    return all([a, b] in item["connected_cities"] for _, a, b in wanted) and all(
        _keeps(days, constraint) for constraint in item["constraints"]
    )


def _keeps(days: dict[str, tuple[int, int]], constraint: dict) -> bool:
    start, end = days.get(constraint["city"], (0, -1))
    if constraint["type"] == "duration":
        return end - start + 1 == constraint["num_days"]
    return (start, end) == (constraint["start_day"], constraint["end_day"])


def check_pseudo_to_code(row: dict, answer: str) -> bool | None:
    """Whether the C++ program compiles and writes what each test case expects; `None` where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    code = last_block(answer, ("cpp", "c++", ""))
    head = "".join(f"#include <{header}>\n" for header in HEADERS.split()) + "using namespace std;\n"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "program.cpp").write_text(
            head + (answer if code is None else code), encoding="utf-8", errors="replace"
        )
        command = [compiler, "-std=c++11", "-O", "-o", "program", "program.cpp"]
        if run_program(command, folder, seconds=COMPILE_SECONDS, may_fork=True).status != "passed":
            return False
        for given, wanted in row["item"]["testcases"]:
            outcome = run_program([str(folder / "program")], folder, "\n".join(given) + "\n")
            if outcome.status != "passed" or outcome.stdout != "\n".join(wanted) + "\n":
                return False
    return True


def _tagged(text: str, tag: str) -> str | None:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
    return found[-1].strip() if found else None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


RULES = {
    "countdown": check_countdown,
    "tom_tracking": check_tom_tracking,
    "path_traversal": check_path_traversal,
    "travel_planning": check_travel_planning,
    "pseudo_to_code": check_pseudo_to_code,
}
