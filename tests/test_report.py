"""`hf-ssr report` and `hf-ssr whatif`: from the files of a bench to a page, and to other machines."""

import itertools
import json
import random
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hf_ssr.bench.records import Record, read_bench
from hf_ssr.bench.report import build, trace_of
from hf_ssr.bench.sources import SOURCES, sources_of
from hf_ssr.bench.whatif import Curve, what_if
from hf_ssr.command.cli import main

METHODS = "prompt_lookup,suffix_only,ssr"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    arguments = ["--tasks", "class,path", "--limit", "2", "--methods", METHODS, "--repeats", "2", "--out", str(out)]
    assert main(["bench", *arguments]) == 0
    return out


class Tags(HTMLParser):
    """Counts tags and complains of what is not closed."""

    VOID = ("meta", "br", "hr")

    def __init__(self):
        super().__init__()
        self.open, self.found, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_page_of_its_own(folder, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    assert main(["report", str(folder), "--trace", str(trace)]) == 0
    text = (folder / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    addresses = [v for _, attrs in tags.found for k, v in attrs.items() if k in ("src", "href") or k.endswith(":href")]
    assert all(address.startswith("#") for address in addresses)  # nothing is loaded from elsewhere
    ids = [attrs["id"] for _, attrs in tags.found if "id" in attrs]
    assert len(ids) == len(set(ids))  # each picture has its own
    assert set(re.findall(r"url\(#([^)]+)\)", text)) | {a[1:] for a in addresses} <= set(ids)
    assert sum(tag == "svg" for tag, _ in tags.found) == len(list((folder / "plots").iterdir())) == 8
    assert "tiny-reasoner" in tags.text and "an instrument, not evidence" in tags.text
    for path in (folder / "plots").iterdir():
        ElementTree.parse(path)
    markdown = (folder / "report.md").read_text()
    for method in ("plain", *METHODS.split(",")):
        assert re.search(rf"^\| path \| {method} \|", markdown, flags=re.MULTILINE)
    for picture in re.findall(r"\]\((\S+)\)", markdown):
        assert (folder / picture).exists()
    lengths = {
        len(line.split("|")) for block in markdown.split("\n\n") for line in block.splitlines()[:3] if "|" in line
    }
    assert min(lengths) > 4
    events = json.loads(trace.read_text())["traceEvents"]
    assert (
        events
        == trace_of([json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()])["traceEvents"]
    )
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"prefill", "plain", "thinking", "verify"}
    assert "report.html" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["report", str(folder), "--trace", str(tmp_path / "no" / "where.json")])
    assert "--trace" in capsys.readouterr().err


def test_the_page_says_what_was_measured(folder):
    """The coloured answer is the answer, and every figure of the first table is that of the summary."""
    page = build(folder)
    summary = json.loads((folder / "summary.json").read_text())
    head, _, *rows = next(block for block in page.markdown if block.startswith("|")).splitlines()
    names = [cell.strip() for cell in head.strip("|").split("|")]
    for line in rows:
        row = dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        found = summary[row["task"]][row["method"]]
        assert float(row["seconds x"]) == pytest.approx(found["seconds_ratio"], abs=0.006)
        assert float(row["forwards"]) == found["forwards"] and row["same tokens"] == "100.0%" == row["score"]
    sample = next(
        s for s in map(json.loads, (folder / "samples.jsonl").read_text().splitlines()) if s["method"] == "ssr"
    )
    shown = next(block for block in page.html if "<pre>" in block)
    tags = Tags()
    tags.feed(shown[shown.index("<pre>") :])
    assert tags.text == "".join(sample["pieces"][sample["thinking_tokens"] :])
    colours = [attrs["style"].removeprefix("border-color:") for tag, attrs in tags.found if tag == "span"]
    sources = sources_of(sample["spans"])[sample["thinking_tokens"] :]
    assert colours == [SOURCES[source].colour for source in sources] and len(set(colours)) > 1


@pytest.mark.parametrize("command", ["report", "whatif"])
def test_no_bench_there(command, folder, tmp_path, capsys):
    messages = {None: "holds no results of `hf-ssr bench`", "null": "has no `model`", "{": "is no JSON"}
    for text, message in messages.items():
        if text is not None:
            (tmp_path / "bench.json").write_text(text)
            (tmp_path / "runs.jsonl").write_text((folder / "runs.jsonl").read_text())
        with pytest.raises(SystemExit):
            main([command, str(tmp_path)])
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and message in lines[0]


def test_own_step_costs_give_what_was_measured():
    """Of each method, where a forward's size tells its time but for noise, and the machine grows slower on the way."""
    rng = random.Random(0)
    runs = []
    for prompt, method in itertools.product(range(8), ("plain", "suffix_only", "ssr")):
        shapes = {"1x1": 300} if method == "plain" else {"1x1": 90, "1x5": 20, "1x17": 10 if method == "ssr" else 3}
        record = Record("t", str(prompt), method, 0, tokens=300, thinking_tokens=100, seconds=0.05)
        for shape, count in shapes.items():
            size = int(shape.split("x")[1])
            seconds = count * (0.01 + 0.0008 * size) * rng.uniform(0.9, 1.1) * (1 + 0.1 * prompt)
            record.shapes[shape], record.seconds = [count, seconds], record.seconds + seconds
        runs.append(record)
    rows = what_if(runs)["t"]
    for method in ("plain", "suffix_only", "ssr"):
        assert rows[method]["seconds"] == pytest.approx(rows[method]["measured"], rel=0.1)
    off = what_if(runs, lambda rows, tokens: 0.02)["t"]
    assert off["plain"]["seconds"] == pytest.approx(8 * 300 * 0.02)


def test_whatif_of_a_bench(folder, capsys):
    """Without other costs, all methods of a task together take what they took."""
    assert main(["whatif", str(folder), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for rows in result.values():
        methods = [row for row in rows.values() if "measured" in row]
        assert len(methods) == 4
        there, here = (sum(row[name] for row in methods) for name in ("measured", "seconds"))
        assert here == pytest.approx(there)
        limits = rows["limit: a free answer"]["seconds"], rows["limit: one forward a block"]["seconds"]
        assert limits[0] < limits[1] < rows["plain"]["seconds"]


def test_what_if_counts_what_it_should(folder):
    """Where every forward takes a second, the seconds are the forwards."""
    _, records = read_bench(folder)
    result = what_if(records, lambda rows, tokens: 1.0)
    for task, rows in result.items():
        for method in ("plain", "ssr", "prompt_lookup"):
            forwards = sum(r.forwards - 1 for r in records if (r.task, r.method) == (task, method))
            assert rows[method]["seconds"] == pytest.approx(forwards)
        thought = sum(r.thinking_tokens - 1 for r in records if (r.task, r.method) == (task, "plain"))
        assert rows["limit: a free answer"]["seconds"] == thought
    doubled = what_if(records, lambda rows, tokens: float(rows * tokens))
    for task, rows in doubled.items():
        work = sum(r.fed_tokens for r in records if (r.task, r.method) == (task, "ssr"))
        assert rows["ssr"]["seconds"] == work


def test_curves(tmp_path, folder, capsys):
    curve = Curve({"1x1": 1.0, "1x5": 2.0, "1x9": 5.0, "2x1": 1.5})
    sizes = ((1, 1), (1, 3), (1, 5), (1, 7), (1, 13), (2, 1), (2, 4), (4, 2))
    assert [curve(*size) for size in sizes] == [1.0, 1.5, 2.0, 3.5, 8.0, 1.5, 1.5, 1.5]
    assert Curve({"1x1": 1.0, "1x4": 2.0, "1x8": 1.5})(1, 64) == 1.5  # noise: longer is not cheaper than the longest
    file = tmp_path / "curve.json"
    file.write_text('{"1x1": 0.5, "1x16": 0.5}')
    assert main(["whatif", str(folder), "--curve", str(file)]) == 0
    for preset in ("cpu", "gpu-launch-bound", "gpu-bandwidth-bound"):
        assert main(["whatif", str(folder), "--preset", preset, "--step", "0.02"]) == 0
    assert "limit: a free answer" in capsys.readouterr().out
    for text in ("[1]", '{"1x4": 1}', '{"a": 1}', '{"1x1": "much"}'):
        file.write_text(text)
        with pytest.raises(SystemExit):
            main(["whatif", str(folder), "--curve", str(file)])
        assert "--curve" in capsys.readouterr().err
