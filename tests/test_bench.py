"""`hf-ssr bench`: what it runs, counts and says."""

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB_SIZE, build

from hf_ssr import SSRConfig
from hf_ssr.bench import command, records, runner, suite
from hf_ssr.bench.int8 import Int8Linear, parameters_of, to_int8
from hf_ssr.bench.methods import METHODS, SSR_SETTINGS, arguments_of
from hf_ssr.bench.records import REQUIRED, Record, read_bench, read_records
from hf_ssr.bench.runner import Bench, Prompt, loops, overlap
from hf_ssr.bench.suite import MOST_GENERATED, texts_of
from hf_ssr.bench.summary import pooled, stages_of, summarize
from hf_ssr.command.cli import main
from hf_ssr.markers import resolved_settings
from hf_ssr.running.reasoner import load_reasoner


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def test_every_method(tmp_path, capsys):
    """The same tokens, all runs on file, and the summary last on stdout."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "runs.jsonl").write_text("of another bench\n")
    options = ["--tasks", "path", "--limit", "1", "--methods", ",".join(METHODS), "--json", "--overwrite"]
    status = main(["bench", *options, "--out", str(out)])
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
    assert "8 runs in" in capsys.readouterr().out
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
        (["--tasks", "humaneval"], "--data"),
        (["--sample"], "recommends nothing"),
        (["--resume"], "there is no bench in"),
        (["--dtype", "float33"], "--dtype: must be one of auto, float64, float32"),
        (["--int8", "--device", "meta"], "--int8 is for a CPU"),
        (["--methods", "magic"], "'magic' is none of plain"),
        (["--limit", "0"], "--limit: must be an integer of at least 1"),
        (["--prompts", "nowhere.jsonl"], "argument --prompts: there is no file 'nowhere.jsonl'"),
        (["--prompts", "empty.jsonl"], "--prompts empty.jsonl is empty"),
        (["--prompts", "broken.jsonl"], "--prompts broken.jsonl: line 1 is no JSON"),
        (["--prompts", "other.jsonl"], "--prompts other.jsonl: line 1 has no `prompt`"),
        (["--out", "empty.jsonl"], "--out must be a folder"),
        (["--model", "/no/where"], "--model /no/where: there is no such folder"),
        (["--tasks", ""], "nothing to run"),
    ],
)
def test_refused(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("empty", ""), ("broken", "{"), ("other", '{"a": 1}')):
        (tmp_path / f"{name}.jsonl").write_text(text)
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
    status = main(["bench", *arguments, str(tmp_path / "out"), "--json"])
    assert status == (130 if isinstance(error, KeyboardInterrupt) else 0)
    runs = lines_of(tmp_path / "out")
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])["path"]
    if isinstance(error, KeyboardInterrupt):
        assert len(runs) == 2 and summary["ssr"]["runs"] == 1
    else:
        assert len(runs) == 6 and sum(run["error"] is not None for run in runs) == 1
        assert summary["ssr"]["runs"] == 2


def bench(out, *arguments) -> int:
    options = ["--tasks", "path", "--limit", "3", "--max-new-tokens", "24", "--methods", "ssr", "--out", str(out)]
    return main(["bench", *options, *arguments])


def comparable(folder) -> list[tuple]:
    names = ("task", "prompt", "method", "repeat", "tokens", "forwards", "same_tokens", "score")
    return [tuple(run[name] for name in names) for run in lines_of(folder)]


def test_resumed(tmp_path, capsys, monkeypatch):
    """What is done is not run again, whatever was cut off, and the result is that of one go."""
    assert bench(tmp_path / "whole", "--repeats", "2") == 0
    out = tmp_path / "out"
    assert bench(out, "--repeats", "2") == 0
    lines = (out / "runs.jsonl").read_text().splitlines(keepends=True)
    done = lines[:5]  # of the third prompt, only plain
    (out / "runs.jsonl").write_text("".join(done) + lines[5][:40])
    before, ran = (out / "runs.jsonl").read_text(), []
    timed = runner.timed_generate
    monkeypatch.setattr(runner, "timed_generate", lambda *a, **k: ran.append(1) or timed(*a, **k))
    monkeypatch.setattr(command, "commit", lambda: "another")  # a commit need not be of the engine
    assert bench(out, "--repeats", "2", "--resume") == 0
    assert len(ran) == 2 + 8  # a warm-up of each method, and four prompts of six
    assert comparable(out) == comparable(tmp_path / "whole")
    assert (out / "runs.jsonl").read_text().startswith("".join(done[:4])) and before
    capsys.readouterr()
    with pytest.raises(SystemExit):
        bench(out, "--repeats", "3", "--resume")
    assert "`repeats` 2, which is now 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench(out, "--repeats", "2", "--instruction", "Now. ", "--resume")
    assert "began with other prompts of these tasks" in capsys.readouterr().err
    assert len(lines_of(out)) == 12  # nothing lost
    assert bench(out, "--overwrite") == 0 and len(lines_of(out)) == 6


def test_an_earlier_bench_is_not_lost(tmp_path, capsys, monkeypatch):
    """Neither of one process nor of several that were stopped, unless that is asked for."""
    monkeypatch.setattr(command, "load_model", lambda _: pytest.fail("a model is loaded"))
    for name in ("runs.jsonl", "1-runs.jsonl"):
        (tmp_path / name).write_text("{}\n")
        with pytest.raises(SystemExit):
            bench(tmp_path)
        error = capsys.readouterr().err
        assert "holds the runs of an earlier bench" in error and "--resume" in error and "--overwrite" in error
        assert (tmp_path / name).read_text() == "{}\n"
        (tmp_path / name).unlink()
    with pytest.raises(SystemExit):
        bench(tmp_path, "--resume", "--overwrite")
    assert "not allowed with" in capsys.readouterr().err


def test_each_run_is_written_when_it_is_done(tmp_path, monkeypatch):
    """Behind plain, to which it is compared; what is there is read, and gone on with."""
    timed, seen = runner.timed_generate, []

    def looking(*args, **kwargs):
        seen.append(len(read_records(tmp_path / "runs.jsonl")))
        return timed(*args, **kwargs)

    monkeypatch.setattr(runner, "timed_generate", looking)
    assert bench(tmp_path, "--methods", "plain,suffix_only,ssr", "--limit", "2") == 0
    # a warm-up of each; plain, suffix_only, ssr; then suffix_only, ssr, plain
    assert seen == [0, 0, 0, 0, 1, 2, 3, 3, 3] and len(lines_of(tmp_path)) == 6


def test_a_full_disk(tmp_path, capsys, monkeypatch):
    """Runs that were finished are whole, the error names the file, and the bench goes on where there is room."""
    monkeypatch.setattr(Bench, "_samples", lambda *_: [])
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert bench(whole) == 0
    room = int(0.75 * (whole / "runs.jsonl").stat().st_size)
    capsys.readouterr()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))  # a longer file is written up to there, then an error
    try:
        with pytest.raises(SystemExit) as error:
            bench(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"hf-ssr: {out / 'runs.jsonl'} cannot be written") and "--resume" in message
    kept = (out / "runs.jsonl").read_text()
    assert 2 <= len(read_bench(out)[1]) == kept.count("\n") < 6 and kept.endswith("\n")
    assert bench(out, "--resume") == 0
    assert comparable(out) == comparable(whole)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_a_disk_without_any_room(tmp_path):
    """What is written as a whole leaves the old file as it is."""
    with pytest.raises(OSError, match=r"/dev/full cannot be written: No space left on device\. What it held is kept"):
        records.append_lines(Path("/dev/full"), [{"a": 1}])
    file = tmp_path / "runs.jsonl"
    file.write_text("old\n")
    (tmp_path / "runs.jsonl.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"runs\.jsonl cannot be written: No space left on device\. It is as it was"):
        records.write_lines(file, [{"a": 1}])
    assert file.read_text() == "old\n" and [path.name for path in tmp_path.iterdir()] == ["runs.jsonl"]


def test_parts_of_processes_that_were_stopped_are_read(tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(dict.fromkeys(REQUIRED, 1)))
    records.write_lines(tmp_path / "runs.jsonl", [])
    for rank in range(2):
        records.append_lines(tmp_path / f"{rank}-runs.jsonl", [Record("t", str(rank), "plain", 0)])
    with open(tmp_path / "1-runs.jsonl", "a") as file:
        file.write('{"task": "t", "pro')
    assert [record.prompt for record in read_bench(tmp_path)[1]] == ["0", "1"]


def test_no_limit_takes_longer_than_the_prompts_there_are(tmp_path, capsys, monkeypatch):
    """Tasks that are generated have no end, so there the limit has; of files all is taken."""
    monkeypatch.setattr(command, "load_model", lambda _: pytest.fail("a model is loaded"))
    monkeypatch.setattr(suite, "draw", lambda *_: pytest.fail("prompts are drawn"))
    with pytest.raises(SystemExit):
        bench(tmp_path / "out", "--limit", "99999999999")
    assert f"--limit must be at most {MOST_GENERATED} for the task 'path'" in capsys.readouterr().err
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [text for _, _, text, _, _ in texts_of([], 99999999999, None, prompts)] == ["a", "b"]


@pytest.mark.slow
def test_two_processes_share_the_prompts(tmp_path):
    """One result, as of one process."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hf_ssr"]
    options = ["--tasks", "path", "--limit", "3", "--max-new-tokens", "24", "--methods", "ssr_off", "--threads", "1"]
    command = [*launch, "bench", *options, "--out", str(tmp_path / "two"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert bench(tmp_path / "one", "--methods", "ssr_off") == 0
    assert comparable(tmp_path / "two") == comparable(tmp_path / "one")
    settings, _ = read_bench(tmp_path / "two")
    assert summary["path"]["ssr_off"]["runs"] == 3 and settings["processes"] == 2
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "bench.json",
        "runs.jsonl",
        "samples.jsonl",
        "summary.json",
    ]


def test_a_difference_is_told(tmp_path, monkeypatch, capsys):
    """Where a text parts from plain, and by how little; what loops does not count as speed."""
    timed = runner.timed_generate

    def another(model, ids, seed, **kwargs):
        run = timed(model, ids, seed, **kwargs)
        if isinstance(kwargs["generation_config"], SSRConfig):
            run.tokens[7] += 1
        return run

    monkeypatch.setattr(runner, "timed_generate", another)
    assert bench(tmp_path / "out") == 0
    for run in lines_of(tmp_path / "out"):
        is_ssr = run["method"] == "ssr"
        assert run["same_tokens"] == (not is_ssr) and run["first_difference"] == (7 if is_ssr else None)
        assert (run["margin"] is not None and run["margin"] > 0) == is_ssr
    monkeypatch.setattr(runner, "loops", lambda tokens: True)
    assert bench(tmp_path / "out", "--overwrite") == 0
    assert all(run["loops"] for run in lines_of(tmp_path / "out"))
    assert json.loads((tmp_path / "out/summary.json").read_text()) == {"path": {}}


def test_the_oracle_has_plains_answer(tmp_path):
    """Whichever is first in turn: it is run behind plain, and all of its draft is kept."""
    assert bench(tmp_path / "out", "--methods", "oracle", "--limit", "2", "--max-new-tokens", "2000") == 0
    runs = {(run["prompt"], run["method"]): run for run in lines_of(tmp_path / "out")}
    for prompt in ("0", "1"):
        oracle, plain = runs[prompt, "oracle"], runs[prompt, "plain"]
        assert oracle["metrics"]["acceptance_rate"] == 1 and oracle["same_tokens"]
        assert oracle["forwards"] < plain["thinking_tokens"] + (plain["tokens"] - plain["thinking_tokens"]) / 8
        assert not oracle["loops"]


def test_a_text_that_ends_is_no_loop(tmp_path, monkeypatch):
    """Only one that was cut off."""
    monkeypatch.setattr(runner, "loops", lambda tokens: True)
    assert bench(tmp_path / "out", "--limit", "1", "--max-new-tokens", "2000") == 0
    assert not any(run["loops"] for run in lines_of(tmp_path / "out"))


def test_each_process_has_its_share(tmp_path):
    model, tokenizer = load_reasoner()
    prompts = [Prompt("path", str(n), torch.tensor([[5, 6, 7 + n]])) for n in range(5)]
    settings = {"max_new_tokens": 3, "do_sample": False}, resolved_settings(SSRConfig(), tokenizer)
    for rank in range(2):
        Bench(model, tokenizer, ["plain"], 1, *settings, rank, 2).run(prompts, tmp_path)
    shares = [[record.prompt for record in read_records(tmp_path / f"{rank}-runs.jsonl")] for rank in range(2)]
    assert shares == [["0", "2", "4"], ["1", "3"]]


def test_a_thinking_budget_for_all(tmp_path):
    assert bench(tmp_path / "out", "--methods", "plain,prompt_lookup,ssr", "--thinking-budget", "10") == 0
    runs = lines_of(tmp_path / "out")
    assert all(run["same_tokens"] and run["thinking_tokens"] == 13 for run in runs)  # and three of the close


def test_int8():
    """Close to what it stands for, and nothing is lost in the count."""
    torch.manual_seed(0)
    model = build("qwen3")
    ids = torch.randint(3, VOCAB_SIZE, (1, 12))
    before, count = model(ids).logits, model.num_parameters()
    to_int8(model.model)
    after = model(ids).logits
    assert any(isinstance(module, Int8Linear) for module in model.modules()) and parameters_of(model) == count
    assert 0 < (after - before).std() < 0.05 * before.std()


def test_loops_and_overlaps():
    assert loops([1, 2, 3] * 60) and loops([9] * 200) and loops(list(range(50)) + [4, 5] * 64)
    assert not loops(list(range(300))) and not loops([1, 2] * 20) and not loops([1, 2] * 100 + [3])
    assert overlap([1, 2, 3, 4], [1, 2, 9, 4]) == (0.5, 0.75)
    assert overlap([], [1]) == (0, 0) and overlap([5, 1, 2], [1, 2]) == (0, 1) and overlap([1], []) == (0, 0)


def test_pooled_metrics_are_sums(tmp_path):
    assert bench(tmp_path / "out", "--max-new-tokens", "200") == 0
    _, records = read_bench(tmp_path / "out")
    found = [record.metrics for record in records if record.metrics is not None]
    total = pooled(found)
    for name in ("new_tokens", "drafted_tokens", "accepted_tokens", "answer_tokens", "target_forwards"):
        assert getattr(total, name) == sum(each[name] for each in found) > 0
    assert len(total.stages) == sum(len(each["stages"]) for each in found) > 0
    assert total.accepted_by_position[0][0] == total.rounds
    assert sum(kept for _, kept in total.accepted_by_position) == total.accepted_tokens
    row = summarize(records)["path"]["ssr"]
    assert row["ssr"]["acceptance_rate"] == total.acceptance_rate
    assert sum(stage["accepted_tokens"] for stage in row["ssr"]["stages"]) <= total.accepted_tokens
    low, high = row["seconds_ratio_interval"]
    assert low <= row["seconds_ratio"] <= high and row["worst_seconds_ratio"] <= row["mean_seconds_ratio"]


def test_ratios_are_those_of_totals():
    records = [
        Record("t", "a", "plain", 0, tokens=10, forwards=10, cost=10, seconds=1.0),
        Record("t", "a", "ssr", 0, tokens=10, forwards=5, cost=8, seconds=0.5),
        Record("t", "b", "plain", 0, tokens=90, forwards=90, cost=90, seconds=9.0),
        Record("t", "b", "ssr", 0, tokens=90, forwards=45, cost=72, seconds=10.0, same_tokens=False),
        Record("t", "c", "ssr", 0, error="out of memory"),
        Record("t", "d", "plain", 0, tokens=10, forwards=10, cost=10, seconds=1.0, loops=True),
        Record("t", "d", "ssr", 0, tokens=10, forwards=1, cost=1, seconds=0.1),
    ]
    for record, fed in zip(records, (10, 40, 90, 160, 0, 10, 10), strict=True):
        record.fed_tokens = fed
    row = summarize(records)["t"]["ssr"]
    assert (row["runs"], row["tokens"], row["same_tokens"]) == (2, 100, 0.5)
    assert row["forwards_ratio"] == 2 and row["cost_ratio"] == 100 / 80
    assert math.isclose(row["seconds_ratio"], 10 / 10.5) and row["worst_seconds_ratio"] == 0.9
    assert row["fed_tokens_ratio"] == 2 and (row["loops"], row["errors"]) == (1, 1)


def test_intervals_are_as_wide_as_chance_has_it():
    """Of the mean of 100 ratios, half of them 1 and half 3: two standard errors of 0.1."""
    records = []
    for prompt in range(100):
        records.append(Record("t", str(prompt), "plain", 0, tokens=1, seconds=1.0 + 2 * (prompt % 2)))
        records.append(Record("t", str(prompt), "ssr", 0, tokens=1, seconds=1.0))
    row = summarize(records)["t"]["ssr"]
    for name in ("seconds_ratio_interval", "mean_seconds_ratio_interval"):  # every prompt takes as long
        assert row[name] == pytest.approx([1.804, 2.196], abs=0.035)


def test_what_a_stage_costs():
    """Its forwards' time beyond plain steps, in plain steps; `used for` and `drafted` are sums."""
    stages = [{"draft_budget": 32, "draft_tokens": 5, "forwards": 10, "seconds": 0.15, "accepted_tokens": 4}]
    found = [{"stages": stages}, {"stages": [*stages, {**stages[0], "draft_budget": 64, "forwards": 2}]}]
    first, second = stages_of(found, step=0.01)
    assert (first["runs"], first["draft_tokens"], first["accepted_tokens"]) == (2, 10, 8)
    assert first["cost"] == pytest.approx(10) and second["cost"] == pytest.approx(13) and second["runs"] == 1


def test_methods_differ_in_what_they_say():
    kinds = {str(arguments_of(method, {"do_sample": False}, None, {}, 3, [5])) for method in METHODS}
    assert len(kinds) == len(METHODS)
