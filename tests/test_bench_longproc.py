"""*longproc*: what is loaded, and what is right in each of its sub-tasks."""

import json
import os
import shutil
from pathlib import Path

import pytest

from hf_ssr.bench.suite import Item, load, score

SUMS = {"nums": [2, 3, 10, 5], "target": 40}
STEPS = (
    "Ann's belief:\n- Step 0: (start) {Ann: hall; cup: hall's box}\n- Step 1: {Ann: None}\nFinal Answer: the hall's box"
)
ROUTE = "From Aa, take a bus to Bb.\nFrom Bb, take a ferry to Cc Dd."
TRIP = {
    "num_cities": 3,
    "total_days": 8,
    "constraints": [
        *({"type": "duration", "city": city, "num_days": days} for city, days in {"Aa": 3, "Bb": 3, "Cc": 4}.items()),
        {"type": "fixed", "city": "Bb", "start_day": 3, "end_day": 5},
    ],
    "connected_cities": [["Aa", "Bb"], ["Bb", "Cc"], ["Cc", "Bb"], ["Bb", "Aa"]],
}
PLAN = """<Plan>
**Day 1-3:** Arriving in Aa and visit Aa for 3 days.
**Day 3:** Fly from Aa to Bb.
**Day 3-5:** Visit Bb for 3 days.
**Day 5:** Fly from Bb to Cc.
**Day 5-8:** Visit Cc for 4 days.
</Plan>"""
DOUBLE = {"testcases": [[["2", "5 7"], ["10", "14"]], [["1", "-1"], ["-2"]]]}
PROGRAM = "int main() {\n  int n, x;\n  cin >> n;\n  while (cin >> x) cout << 2 * x << endl;\n  return 0;\n}"


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


def longproc(subtask: str, item: dict, reference: str = "") -> Item:
    return Item("longproc", "made", "", (subtask, {"item": item, "reference_output": reference}))


def test_longproc_takes_turns(tmp_path):
    def rows(name, count):
        return [{"id": f"{name}/{i}", "input_prompt": name, "reference_output": "", "item": {}} for i in range(count)]

    write(tmp_path / "longproc_countdown_2k.jsonl", rows("countdown_2k", 3))
    write(tmp_path / "longproc_format_path_traversal_2k_generated.jsonl", rows("made", 1))
    write(tmp_path / "longproc_tom_tracking_2k.jsonl", rows("tom_2k", 2))
    names = ["countdown_2k/0", "made/0 (LongProc-format, generated)", "tom_2k/0", "countdown_2k/1", "tom_2k/1"]
    names.append("countdown_2k/2")
    assert [item.name for item in load("longproc", 99, tmp_path)] == names
    assert [item.name for item in load("longproc", 4, tmp_path)] == names[:4]
    write(tmp_path / "longproc_html_to_tsv_2k.jsonl", rows("html", 1))
    with pytest.raises(ValueError, match=r"html_to_tsv_2k\.jsonl must be of one of countdown"):
        load("longproc", 1, tmp_path)


COUNTS = "<Solution>\n3 + 2 = 5\n10 - 5 = 5\n5 * 5 = 25\n</Solution>"


@pytest.mark.parametrize(
    ("old", "new", "right"),
    [
        ("", "", 1),
        ("<Solution>", "Between <Solution> and </Solution>:\n<Solution>", 1),
        ("</Solution>", "", 0),
        ("3 + 2 = 5", "3 + 2 = 6", 0),
        ("3 + 2 = 5\n", "", 0),
        ("3 + 2 = 5\n10 - 5 = 5\n5 * 5 = 25", "5 * 3 = 15\n15 + 10 = 25", 0),  # 2 is left
        ("10 - 5 = 5\n5 * 5 = 25", "10 - 5 = 5\n5 * 10 = 50", 0),  # 10 twice
        ("5 * 5 = 25", "5 + 5 = 10", 0),  # not the target
        ("10 - 5 = 5", "5 / 10 = 0", 0),
        ("10 - 5 = 5", "__import__('os') = 5", 0),
        ("10 - 5 = 5", f"{'9' * 9999} - 5 = 5", 0),
        ("5 * 5 = 25", "5 * 5 = 25\nDone.", 0),
    ],
)
def test_countdown(old, new, right):
    assert old in COUNTS
    item = longproc("countdown", {**SUMS, "target": 25})
    assert score(item, f"# Search Procedure\n3 + 2 = 5\n{COUNTS.replace(old, new, 1) if old else COUNTS}") == right


def test_countdown_results_are_positive_and_small():
    answer = "<Solution>\n2 - 2 = 0\n0 + 5 = 5\n</Solution>"
    assert score(longproc("countdown", {"nums": [2, 2, 5], "target": 5}), answer) == 0
    answer = "<Solution>\n50 * 50 = 2500\n2500 / 5 = 500\n</Solution>"
    assert score(longproc("countdown", {"nums": [50, 50, 5], "target": 500}), answer) == 0
    answer = "<Solution>\n7 / 2 = 3\n</Solution>"
    assert score(longproc("countdown", {"nums": [7, 2], "target": 3}), answer) == 0


def test_tom_tracking():
    item = longproc("tom_tracking", {}, STEPS)
    assert score(item, STEPS) == 1
    assert score(item, "Sure.\n" + STEPS.replace("the hall", "hall").replace("Final Answer:", "**Final answer**:")) == 1
    for old, new in {"Ann: None": "Ann: hall", "the hall's box": "the hall's bag", "- Step 1": "Step 1"}.items():
        assert old in STEPS and score(item, STEPS.replace(old, new)) == 0
    assert score(item, STEPS.partition("Final")[0]) == score(item, STEPS + "\n- Step 2: {Ann: None}") == 0


def test_path_traversal():
    item = longproc("path_traversal", {}, ROUTE)
    assert score(item, ROUTE) == score(item, f"Go:\n<Route>\n{ROUTE}\n</Route>\nDone.") == 1
    assert score(item, f"Go:\n{ROUTE}") == score(item, ROUTE.replace("ferry", "bus")) == 0
    assert score(item, ROUTE.split("\n")[0]) == score(item, "") == score(item, f"<Route></Route>\n{ROUTE}") == 0


@pytest.mark.parametrize(
    ("old", "new", "right"),
    [
        ("<Plan>", "<Plan>\n", 1),
        ("</Plan>", "", 0),
        ("3-5", "3-6", 0),
        ("3-5", f"3-{'5' * 9999}", 0),
        ("Visit Bb for 3 days", "Visit Bb for 4 days", 0),
        ("Arriving in Aa", "Arriving in Cc", 0),
        ("**Day 5:** Fly", "**Day 4:** Fly", 0),
        ("from Bb to Cc", "from Bb to Aa", 0),
        ("**Day 3:** Fly from Aa to Bb.\n", "", 0),
        ("\n**Day 5:** Fly from Bb to Cc.\n**Day 5-8:** Visit Cc for 4 days.", "", 0),
        ("**Day 5-8:** Visit Cc for 4 days.", "**Day 5-8:** Visit Aa for 4 days.", 0),
        ("Day 5-8:** Visit Cc for 4", "Day 5-9:** Visit Cc for 5", 0),
    ],
)
def test_travel_planning(old, new, right):
    assert old in PLAN
    assert score(longproc("travel_planning", TRIP), PLAN.replace(old, new)) == right


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({"constraints": [{"type": "duration", "city": "Aa", "num_days": 3}]}, 1),
        ({"constraints": [{"type": "duration", "city": "Cc", "num_days": 5}]}, 0),
        ({"constraints": [{"type": "fixed", "city": "Bb", "start_day": 2, "end_day": 4}]}, 0),
        ({"constraints": [{"type": "duration", "city": "Dd", "num_days": 3}]}, 0),
        ({"connected_cities": [["Aa", "Bb"], ["Cc", "Bb"]]}, 0),  # flights are one-way
        ({"num_cities": 4}, 0),
        ({"total_days": 9}, 0),
    ],
)
def test_travel_planning_keeps_what_is_asked(change, right):
    assert score(longproc("travel_planning", {**TRIP, **change}), PLAN) == right


def test_travel_planning_leaves_no_day_out():
    plan = PLAN.replace("3-5", "4-6").replace("Day 5:", "Day 6:")
    assert score(longproc("travel_planning", {**TRIP, "constraints": []}), PLAN) == 1
    assert score(longproc("travel_planning", {**TRIP, "constraints": []}), plan) == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_pseudo_to_code():
    item = longproc("pseudo_to_code", DOUBLE)
    assert score(item, PROGRAM) == score(item, f"Here:\n```cpp\n{PROGRAM}\n```\nDone.") == 1
    wrong = {"2 * x": "x * x", "return 0": "return 1", "<< endl": "", "cin >> n;": ""}
    for old, new in wrong.items():
        assert old in PROGRAM and score(item, PROGRAM.replace(old, new)) == 0, old
    assert score(item, PROGRAM.replace("int main", "int man")) == 0


def test_pseudo_to_code_without_a_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert score(longproc("pseudo_to_code", DOUBLE), PROGRAM) is None


@pytest.mark.slow
@pytest.mark.skipif("HF_SSR_DATA" not in os.environ, reason="HF_SSR_DATA names no folder with the data")
def test_damaged_references_are_wrong():
    """A digit or a name changed in the part that counts, or the last third cut off."""
    for item in load("longproc", 1000, Path(os.environ["HF_SSR_DATA"])):
        reference = item.data[1]["reference_output"]
        head, _, last = reference.rstrip().rpartition("\n")
        if item.data[0] in ("countdown", "travel_planning"):  # the last line is the tag
            head, _, last = head.rpartition("\n")
            assert score(item, f"{head}\n{last.replace(last.split()[-2], '77')}\n</") == 0, item.name
        assert score(item, reference[: 2 * len(reference) // 3]) == 0, item.name
        assert score(item, head) == 0, item.name
