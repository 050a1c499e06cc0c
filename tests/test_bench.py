"""`hf-ssr bench`: what it runs, counts and says."""

import json
import math

import pytest
import torch

from hf_ssr.bench import runner
from hf_ssr.bench.methods import METHODS, SSR_SETTINGS, arguments_of
from hf_ssr.bench.runner import Record, summarize
from hf_ssr.cli import main


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def test_every_method(tmp_path, capsys):
    """The same tokens, all runs on file, and the summary last on stdout."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "runs.jsonl").write_text("of another bench\n")
    status = main(
        ["bench", "--tasks", "path", "--limit", "1", "--methods", ",".join(METHODS), "--out", str(out), "--json"]
    )
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0 and json.loads((out / "summary.json").read_text()) == summary
    assert list(summary) == ["path"] and list(summary["path"]) == list(METHODS)
    plain = summary["path"]["plain"]
    assert plain["forwards"] == plain["tokens"]  # the prefill yields one, each step another
    assert plain["cost"] == pytest.approx(plain["forwards"] - 1)  # the prefill is not counted
    for method, row in summary["path"].items():
        assert row["same_tokens"] == 1 and row["tokens"] == plain["tokens"] and row["runs"] == 1, method
        for name in ("forwards", "cost", "seconds"):
            assert row[f"{name}_ratio"] == pytest.approx(plain[name] / row[name])
    runs = lines_of(out)
    assert [run["method"] for run in runs] == list(METHODS) or {run["method"] for run in runs} == set(METHODS)
    for run in runs:
        assert (run["metrics"] is not None) == (run["method"] in SSR_SETTINGS)
        if run["metrics"] is not None:
            assert run["metrics"]["plain_reason"] is None
            assert sum(run["metrics"]["forwards"].values()) == run["forwards"]
    by_method = {run["method"]: run["metrics"] for run in runs}
    assert not by_method["suffix_only"]["stages"] and by_method["suffix_only"]["thinking_drafted_tokens"]
    assert len(by_method["fork"]["stages"]) == 1 < len(by_method["ssr_off"]["stages"])
    assert not by_method["stages"]["thinking_drafted_tokens"]
    assert summary["path"]["ssr_off"]["forwards"] < summary["path"]["suffix_only"]["forwards"] < plain["forwards"]


def test_prompts_from_a_file(tmp_path, capsys):
    prompts = tmp_path / "mine.jsonl"
    entries = [{"prompt": "Find it.", "task": "a"}, {"prompt": "Go."}, {"prompt": "More.", "task": "a", "name": "x"}]
    prompts.write_text("\n".join(map(json.dumps, entries)))
    arguments = ["--methods", "ssr", "--max-new-tokens", "12", "--repeats", "2", "--out", str(tmp_path / "out")]
    assert main(["bench", "--prompts", str(prompts), "--limit", "1", *arguments]) == 0
    assert "12" in capsys.readouterr().out
    runs = lines_of(tmp_path / "out")
    assert [(run["task"], run["prompt"], run["repeat"]) for run in runs if run["method"] == "ssr"] == [
        ("a", "0", 0),
        ("mine", "1", 0),
        ("a", "0", 1),
        ("mine", "1", 1),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "chess"], "'chess' is none of class, ledger, path"),
        (["--methods", "magic"], "'magic' is none of plain"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--tasks", ""], "nothing to run"),
    ],
)
def test_refused(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        main(["bench", "--out", str(tmp_path / "out"), *arguments])
    assert error.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1] and lines[-1].startswith("hf-ssr: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("no room")])
def test_what_is_done_is_kept(error, tmp_path, capsys, monkeypatch):
    """An interrupt ends the bench, out of memory is a row; what was done before stays."""
    timed, calls = runner.timed_generate, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:  # after the warm-up of two methods and the first prompt, in its second
            raise error
        return timed(*args, **kwargs)

    monkeypatch.setattr(runner, "timed_generate", failing)
    arguments = ["--tasks", "path", "--limit", "3", "--max-new-tokens", "8", "--methods", "ssr", "--out"]
    assert main(["bench", *arguments, str(tmp_path / "out"), "--json"]) == 0
    runs = lines_of(tmp_path / "out")
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])["path"]
    if isinstance(error, KeyboardInterrupt):
        assert len(runs) == 2 and summary["ssr"]["runs"] == 1
    else:
        assert len(runs) == 6 and sum(run["error"] is not None for run in runs) == 1
        assert summary["ssr"]["runs"] == 2


def test_ratios_are_those_of_totals():
    records = [
        Record("t", "a", "plain", 0, tokens=10, forwards=10, cost=10, seconds=1.0),
        Record("t", "a", "ssr", 0, tokens=10, forwards=5, cost=8, seconds=0.5),
        Record("t", "b", "plain", 0, tokens=90, forwards=90, cost=90, seconds=9.0),
        Record("t", "b", "ssr", 0, tokens=90, forwards=45, cost=72, seconds=10.0, same_tokens=False),
        Record("t", "c", "ssr", 0, error="out of memory"),
    ]
    row = summarize(records)["t"]["ssr"]
    assert (row["runs"], row["tokens"], row["same_tokens"]) == (2, 100, 0.5)
    assert row["forwards_ratio"] == 2 and row["cost_ratio"] == 100 / 80
    assert math.isclose(row["seconds_ratio"], 10 / 10.5) and row["worst_seconds_ratio"] == 0.9


def test_methods_differ_in_what_they_say():
    kinds = {str(arguments_of(method, {"do_sample": False}, None, {})) for method in METHODS}
    assert len(kinds) == len(METHODS)
