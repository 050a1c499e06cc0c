"""The `hf-ssr` command."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import build_once
from test_thinking import tokenizer_with
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hf_ssr import SSRConfig, split_thinking
from hf_ssr.command import exporting
from hf_ssr.command.cli import SUBCOMMANDS, main
from hf_ssr.command.exporting import export
from hf_ssr.command.streaming import ThoughtAndAnswer


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    build_once("qwen3").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


OPTIONS = ["--dtype", "float64", "--max-new-tokens", "60", "--prefill", "<think>", "--thinking-budget", "30"]


def test_answer(folder, capfd):
    assert main(["Say it.", "--model", folder, *OPTIONS, "--draft-budgets", "4,10", "--compare", "--stats"]) == 0
    out, err = capfd.readouterr()
    assert "same tokens: yes, all 60" in err
    assert "stages (draft from budget)" in err and "ratio" in err
    assert out.strip() and "</think>" not in out and "</think>" in err


def test_an_answer_without_a_thought_goes_to_stdout(folder, capfd):
    assert main(["Say it.", "--model", folder, "--dtype", "float64", "--max-new-tokens", "30"]) == 0
    out, err = capfd.readouterr()
    assert out.strip() and out.strip() not in err


def test_markers_are_not_shown(tokenizer, capfd):
    """The start marker a model writes, and what leads from the close to the answer."""
    config = SSRConfig(thinking_start="ab", thinking_end="cd", forced_close="cdxy")
    for text, thought, answer in (
        ("abhm cdxyyes", "hm cd", "yes"),
        ("abhm cdxno", "hm cd", "xno"),
        ("abhm cdx", "hm cd", "x"),
        ("aa", "", "aa"),
        ("never thinks", "", "never thinks"),
    ):
        streamer = ThoughtAndAnswer(tokenizer, config, [])
        streamer.put(torch.tensor([[5]]))
        for token in tokenizer.encode(text):
            streamer.put(torch.tensor([token]))
        streamer.end()
        out, err = capfd.readouterr()
        assert (err.strip(), out.strip()) == (thought, answer)


def test_json(folder, capfd):
    assert main(["Say it.", "--model", folder, *OPTIONS, "--json", "--compare"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["same_tokens"] is True and report["difference"] is None
    assert report["thought"] and report["answer"]
    assert report["ssr"]["forwards"] == report["metrics"]["forwards"]["prefill"] + sum(
        n for name, n in report["metrics"]["forwards"].items() if name != "prefill"
    )
    assert report["plain"]["forwards"] == 60


def test_sampled_with_a_seed(folder, capfd):
    call = [
        "Say it.",
        "--model",
        folder,
        *OPTIONS,
        "--sample",
        "--temperature",
        "0.8",
        "--seed",
        "5",
        "--json",
        "--compare",
    ]
    assert main(call) == 0
    assert json.loads(capfd.readouterr().out)["same_tokens"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["hello", "--compare", "--model"], "--model"),
        (["hello", "--model", "MODEL", "--thinking-budget", "x"], "--thinking-budget"),
        (
            ["hello", "--model", "MODEL", "--thinking-budget", "-1"],
            "--thinking-budget: must be an integer of at least 0",
        ),
        (["hello", "--model", "MODEL", "--draft-budgets", "4,x"], "--draft-budgets"),
        (["hello", "--model", "MODEL", "--draft-budgets", "4", "--draft-interval", "4"], "exclude each other"),
        (["hello", "--model", "MODEL", "--temperature", "1"], "--sample"),
        (["hello", "--model", "MODEL", "--dtype", "float7"], "--dtype"),
        (["hello", "--model", "MODEL", "--device", "nope"], "--device nope"),
        (["  ", "--model", "MODEL"], "the prompt is empty"),
        (["hello", "--model", "/no/such/folder"], "there is no such folder"),
        (["hello", "--model", "EMPTY"], "no config.json: add --gguf-file model.gguf"),
        (["hello", "--model", "EMPTY", "--gguf-file", "other.gguf"], "--gguf-file other.gguf: not in"),
        (["hello", "--model", "MODEL", "--prediction", "/no/such/file"], "/no/such/file"),
        (["export", ""], "`folder` is empty"),
        (["hello", "--model", "MODEL", "--thinking-end", "x", "--forced-close", "y"], "`forced_close`"),
        (["export"], "FOLDER"),
        (["export", __file__], "must be a folder"),
    ],
)
def test_usage_errors_are_one_line(folder, arguments, message, capfd, tmp_path):
    (tmp_path / "model.gguf").touch()
    places = {"MODEL": folder, "EMPTY": str(tmp_path)}
    with pytest.raises(SystemExit) as stop:
        main([places.get(a, a) for a in arguments])
    assert stop.value.code == 2
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("hf-ssr: ")]
    assert out == "" and len(lines) == 1 and message in lines[0]
    assert err.splitlines()[-1] == lines[0]


def test_a_prediction_from_a_file(folder, capfd, tmp_path):
    call = ["Say it.", "--model", folder, "--dtype", "float64", "--max-new-tokens", "40", "--json"]
    assert main(call) == 0
    plain = json.loads(capfd.readouterr().out)
    (tmp_path / "answer.txt").write_text(plain["answer"])
    assert main([*call, "--prediction", str(tmp_path / "answer.txt")]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["answer"] == plain["answer"]
    assert report["metrics"]["drafted_tokens"] > plain["metrics"]["drafted_tokens"]


def test_no_markers_in_the_commands_own_words(folder, capfd, tmp_path, tokenizer):
    build_once("qwen3").save_pretrained(tmp_path)
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(tokenizer.backend_tokenizer.model), eos_token="<eos>")
    bare.save_pretrained(tmp_path)
    call = ["hello", "--model", str(tmp_path), "--max-new-tokens", "10"]
    assert main(call) == 0
    assert "--thinking-end sets them" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main([*call, "--thinking-budget", "4"])
    assert "give --thinking-end" in capfd.readouterr().err


def test_export(tmp_path, capfd):
    assert main(["export", str(tmp_path)]) == 0
    assert (tmp_path / "custom_generate" / "generate.py").is_file()
    assert "files written" in capfd.readouterr().out


def test_export_says_how_the_folder_is_used(folder, tmp_path, capfd):
    """A model folder by `from_pretrained`, and that is SSR; another one by `custom_generate`."""
    shutil.copytree(folder, tmp_path / "model")
    for name in ("model", "code"):
        assert main(["export", str(tmp_path / name)]) == 0
        out = capfd.readouterr().out
        is_model = f"AutoModelForCausalLM.from_pretrained('{tmp_path / name}', trust_remote_code=True)" in out
        assert is_model == (name == "model")
        assert (f"custom_generate='{tmp_path / name}', trust_remote_code=True" in out) == (name == "code")


def test_export_replaces_its_own_files_only(tmp_path, capfd, monkeypatch):
    target = tmp_path / "custom_generate"
    export(tmp_path)
    files = {path.name: path.read_bytes() for path in target.iterdir()}
    (target / "__pycache__").mkdir()
    written = exporting._files()
    newer = {**{name: content + b"# newer\n" for name, content in written.items()}, "new.py": b""}
    del newer["costs.py"]
    monkeypatch.setattr(exporting, "_files", lambda: dict(newer))
    export(tmp_path)  # of another version
    assert (target / "new.py").exists() and not (target / "costs.py").exists()
    monkeypatch.undo()
    export(tmp_path)
    assert {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()} == files
    (target / "generate.py").write_text("# mine\n")
    (target / "helpers.py").write_text("# mine, too\n")
    (target / "folder").mkdir()
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path)])
    error = capfd.readouterr().err
    assert "changed since: folder, generate.py, helpers.py. Move it away, or export to another folder" in error
    assert (target / "generate.py").read_text() == "# mine\n" and (target / "helpers.py").exists()
    (target / "export.json").write_text(
        "["
    )  # and without knowing what was written, nothing is replaced but by the same
    shutil.rmtree(target / "folder")
    (target / "helpers.py").unlink()
    with pytest.raises(ValueError, match=r"changed since: generate\.py"):
        export(tmp_path)
    (target / "generate.py").write_bytes(files["generate.py"])
    export(tmp_path)


def test_a_subcommand_as_prompt(folder, capfd):
    assert main(["--model", folder, *OPTIONS, "--json", "--", "export"]) == 0
    assert "answer" in json.loads(capfd.readouterr().out)


def test_installed_command():
    result = subprocess.run([sys.executable, "-m", "hf_ssr.command.cli", "--version"], capture_output=True, text=True)
    assert result.stdout.startswith("hf-ssr ")


@pytest.mark.parametrize(
    "command",
    [[], *([name] for name in SUBCOMMANDS), ["bench", "--replay", __file__], ["bench", "--batch-size", "4"]],
    ids=str,
)
def test_help_fits_a_terminal_of_80_columns(command, monkeypatch, capfd):
    """No line is longer, and none ends within a name that has hyphens."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r"\w-$", line)]


def spoken(tokenizer, config, text: str, capsys, prompt: str = "q") -> tuple[str, str]:
    """What is streamed of a text, token by token: the answer, and the thoughts."""
    streamer = ThoughtAndAnswer(tokenizer, config, tokenizer.encode(prompt))
    streamer.put(torch.tensor([tokenizer.encode(prompt)]))
    for token in tokenizer.encode(text):
        streamer.put(torch.tensor([token]))
    streamer.end()
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_several_thoughts_are_streamed_apart(capsys):
    """Without markers, and without what leads from a close to the answer, or half of it to the next thought."""
    special = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    tokenizer = tokenizer_with(*special)
    opens, closes = "<|channel|>analysis<|message|>", "<|end|>"
    lead = "<|start|>assistant"
    final = lead + "<|channel|>final<|message|>"
    config = SSRConfig.from_tokenizer(tokenizer)
    two = f"{opens}one{closes}{lead}{opens}two{closes}{final}the answer"
    assert spoken(tokenizer, config, two, capsys) == ("the answer\n", "one<|end|>\ntwo<|end|>\n")
    between = f"{opens}one{closes}{final}first{opens}two{closes}{final}and last"
    assert spoken(tokenizer, config, between, capsys) == ("firstand last\n", "one<|end|>\ntwo<|end|>\n")
    mentioned = f"{opens}one{closes}{final}<|channel|>else{closes}"
    assert spoken(tokenizer, config, mentioned, capsys) == ("else\n", "one<|end|>\n")
    for text in (two, between, mentioned):
        answer = split_thinking(tokenizer.encode(text), config).answer
        out, err = spoken(tokenizer, config, text, capsys)
        assert out == tokenizer.decode(answer, skip_special_tokens=True) + "\n"
        thought = split_thinking(tokenizer.encode(text), config).thought
        assert err.replace("<|end|>\n", "") == tokenizer.decode(thought)
    unclosed = f"{opens}one{closes}{final}first{opens}two"
    assert spoken(tokenizer, config, unclosed, capsys) == ("first\n", "one<|end|>\ntwo")
    once = SSRConfig.from_tokenizer(tokenizer, thinks_again=False)
    assert spoken(tokenizer, once, between, capsys)[0].startswith("firstanalysistwo")
