"""The reasoner that comes with the package, its tasks, and `hf-ssr demo`."""

import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import hf_ssr.scheduling
from hf_ssr import SSRConfig, split_thinking
from hf_ssr.bench import demo
from hf_ssr.bench.tasks import HELD_OUT, TASKS, VALIDATION, check, draw, split_of
from hf_ssr.command.cli import main
from hf_ssr.costs import StepCosts
from hf_ssr.running.comparing import prompt_ids
from hf_ssr.running.reasoner import load_reasoner, reasoner_folder
from hf_ssr.running.terminal import moving


@pytest.fixture(scope="module")
def reasoner():
    return load_reasoner()


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_pass_and_wrong_ones_do_not(task):
    """The rule accepts the answer of its own task, and no other; nor one with any word changed."""
    samples = [draw(task, seed) for seed in range(40)]
    rng = random.Random(0)
    for sample, other in zip(samples, samples[1:] + samples[:1], strict=True):
        assert check(sample, sample.answer)
        assert not check(sample, other.answer) and not check(sample, "") and not check(sample, sample.answer[:-20])
        words = list(re.finditer(r"[A-Za-z]{3,}|\d+", sample.answer))
        for word in rng.sample(words, 5):
            wrong = str(int(word[0]) + 1) if word[0].isdigit() else word[0][:-1] + "q"
            assert not check(sample, sample.answer[: word.start()] + wrong + sample.answer[word.end() :]), word[0]


@pytest.mark.parametrize("task", TASKS)
def test_held_out_prompts_are_never_drawn_for_training(task):
    for begin, part in ((0, "training"), (VALIDATION, "validation"), (HELD_OUT, "held-out")):
        assert {split_of(draw(task, begin + seed).prompt) for seed in range(30)} == {part}
    assert draw(task, 5) == draw(task, 5)


@pytest.mark.parametrize("task", TASKS)
def test_lengths(task, reasoner):
    """Thoughts and answers of all proportions: longer than the answer, and shorter."""
    _, tokenizer = reasoner
    lengths = []
    for seed in range(200):
        sample = draw(task, seed)
        texts = [sample.prompt, sample.thought, sample.answer]
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        assert [tokenizer.decode(i) for i in ids] == texts
        lengths.append((len(ids[1]), len(ids[2])))
    assert min(t for t, _ in lengths) >= 45 and max(t for t, _ in lengths) <= 800
    assert min(a for _, a in lengths) >= 100 and max(a for _, a in lengths) <= 700
    longer = sum(t > a for t, a in lengths)
    assert 0.1 * len(lengths) < longer < 0.6 * len(lengths)


def test_the_tokenizer_tells_where_thoughts_end(reasoner):
    model, tokenizer = reasoner
    config = SSRConfig.from_tokenizer(tokenizer)
    assert tokenizer.decode(config.forced_close) == "\n</think>\n\n"
    assert model.dtype == torch.float32 and (reasoner_folder() / "model.safetensors").stat().st_size < 14e6
    chat = [{"role": "user", "content": "x"}]
    without = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, enable_thinking=False)
    assert without.endswith("<think>\n\n</think>\n\n")


def report_of(capsys, *argv: str) -> dict:
    assert main(["demo", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("task", TASKS)
def test_demo_as_json(task, capsys, reasoner):
    """Plain `generate`, all there is, and the default; of all three the same tokens."""
    report = report_of(capsys, "--task", task, "--seed", "3")
    assert (report["task"], report["seed"], report["same_tokens"]) == (task, 3, True)
    plain, shown, default = (report[method] for method in ("plain", "ssr_off", "ssr"))
    assert shown["forwards"] < plain["forwards"] and default["forwards"] < plain["forwards"]
    assert min(plain["seconds"], shown["seconds"], default["seconds"], report["block_cost"]) > 0
    assert "metrics" not in plain and len(report["drafts"]) == len(shown["metrics"]["stages"]) > 0
    for metrics in (shown["metrics"], default["metrics"]):
        assert sum(count for _, count in metrics["spans"]) == metrics["new_tokens"] == plain["forwards"]
    model, tokenizer = reasoner
    sample = draw(task, HELD_OUT + 3)
    ids = prompt_ids(tokenizer, sample.prompt)
    text = model.generate(ids, max_new_tokens=1500, do_sample=False)
    answer = split_thinking(text[0], SSRConfig.from_tokenizer(tokenizer), ids.shape[1]).answer
    assert report["answer_right"] == check(sample, tokenizer.decode(answer, skip_special_tokens=True))


class AbsurdCosts(StepCosts):
    """As on a machine that is busy beyond measure: whatever is more than a plain step costs 1,000 of them."""

    def __call__(self, rows: int, tokens: int) -> float:
        return 1.0 if rows == tokens == 1 else 1000.0


def test_what_is_shown_does_not_depend_on_costs(capsys, monkeypatch):
    """The default drafts nothing where larger forwards are absurdly dear; the fork is seen all the same."""
    cheap = report_of(capsys, "--seed", "4")
    monkeypatch.setattr(hf_ssr.scheduling, "costs_of", lambda model: AbsurdCosts(model.device))
    dear = report_of(capsys, "--seed", "4")
    assert dear["drafts"] == cheap["drafts"] and dear["ssr_off"]["forwards"] == cheap["ssr_off"]["forwards"]
    assert dear["ssr_off"]["metrics"]["spans"] == cheap["ssr_off"]["metrics"]["spans"]
    assert not dear["ssr"]["metrics"]["stages"] and dear["ssr"]["forwards"] == dear["plain"]["forwards"]
    assert main(["demo", "--seed", "4"]) == 0
    text = capsys.readouterr().out
    assert demo.DRAFTS in text and "from the draft, as it stood" in text and "Forks after" in text


def test_one_thread(monkeypatch):
    """On busy cores the threads of so small a model wait for each other, and the first command would take minutes."""
    counts = []
    monkeypatch.setattr(demo, "run_demo", lambda *_: counts.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        main(["demo"])
        assert counts == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_fork_is_seen(task, reasoner):
    """In each run that is shown, a draft gives tokens of the answer, and a whole draft is read in one forward."""
    model, tokenizer = reasoner
    for seed in range(20):
        ids = prompt_ids(tokenizer, draw(task, HELD_OUT + seed).prompt)
        run = demo.shown_run(model, tokenizer, ids, Console(quiet=True))
        assert any(stage.accepted_tokens for stage in run.metrics.stages), seed
        assert demo.block_cost([run], [run]) is not None, seed


def test_demo_without_a_terminal(capsys):
    assert main(["demo", "--task", "path"]) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out and "Find the way" in captured.out
    for text in (demo.THINKS, demo.DRAFTS, "In total the", "forwards of the model", "same tokens", "from the draft"):
        assert text in captured.out
    assert "SSR by default" in captured.out and re.search(r"takes \d+\.\d\s+plain\s+steps", captured.out)
    assert max(map(len, captured.out.splitlines())) <= 80


def test_demo_in_a_pipe_that_asks_for_colours(capsys, monkeypatch):
    """As in CI, and as under a notebook's `!`: coloured, but no frame after frame."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-color")
    assert main(["demo", "--task", "path"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[32m" in shown and set(re.findall(r"\x1b\[[0-9;?]*([A-Za-z])", shown)) == {"m"}
    assert shown.count(demo.THINKS) == 1


def test_nothing_moves_in_a_notebook(monkeypatch):
    """The `!` of a notebook is a terminal, but its output keeps every frame."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert moving(screen) is None
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert moving(screen) is False


@pytest.mark.parametrize("width", [60, 120])
def test_demo_on_a_terminal(width, monkeypatch):
    """The draft stands beside the thought where there is room, else below it; the answer is coloured."""
    screen = io.StringIO()
    monkeypatch.setattr(
        demo, "Console", lambda **_: Console(file=screen, force_terminal=True, width=width, color_system="standard")
    )
    assert demo.run_demo("ledger", 1, as_json=False) == 0
    shown = screen.getvalue()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "\x1b[32m" in shown and "the total after" in text
    titles = text[text.rindex(demo.THINKS) :].splitlines()[0]  # of what stays on the screen
    assert (demo.DRAFTS in titles) == (width >= demo.WIDE) and demo.DRAFTS in text
    assert "Start " in text[text.rindex(demo.THINKS) :]  # the whole thought


def test_bad_arguments(capsys):
    for argv, message in ((["demo", "--task", "x"], "invalid choice"), (["demo", "--seed", "-1"], "--seed: must be")):
        with pytest.raises(SystemExit) as error:
            main(argv)
        assert error.value.code == 2 and message in capsys.readouterr().err


def test_a_prompt_without_a_model(capsys):
    """The small reasoner answers."""
    sample = draw("ledger", HELD_OUT)
    assert main([sample.prompt]) == 0
    captured = capsys.readouterr()
    assert "so the small reasoner answers" in captured.err and "Ledger of" in captured.out


@pytest.mark.slow
def test_training_starts_and_resumes(tmp_path):
    """The script runs from a clean checkout, saves a model that loads, and goes on where it stopped."""
    folder = Path(__file__).parent.parent / "model_cards" / "tiny-reasoner"
    places = ["--run", str(tmp_path / "run"), "--model", str(tmp_path / "model"), "--threads", "1"]
    short = ["--warmup-minutes", "0.02", "--validation-tasks", "1", "--batch-tokens", "512"]
    for extra in (["--minutes", "0.05"], ["--minutes", "0.08", "--resume"]):
        command = [sys.executable, folder / "train.py", *places, *short, *extra]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and len(steps) >= 2
    model, tokenizer = load_reasoner(tmp_path / "model")
    assert SSRConfig.from_tokenizer(tokenizer).thinking_end
    assert model.generate(prompt_ids(tokenizer, "x"), max_new_tokens=3).shape[1] > 3
