"""Which model a command runs: what is not there is said at once, and what was downloaded is taken without the Hub."""

import re
import socket

import pytest
from conftest import build_once
from huggingface_hub import constants
from test_installation import into_cache

from hf_ssr.command.cli import main
from hf_ssr.running import loading
from hf_ssr.running.parsing import MOST, integer, number


@pytest.fixture
def unreachable(monkeypatch):
    """The Hub, asked once at most: what would wait for it is an error."""
    tried = []

    def refuse(address, timeout):
        tried.append((*address, timeout))
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tried


@pytest.mark.parametrize(
    ("name", "message", "connections"),
    [
        ("nothere", "it was not downloaded before, and the Hub (https://huggingface.co) cannot be reached", 1),
        ("some/where", "it was not downloaded before, and the Hub", 1),
        ("no where", "there is no such folder, and an id on the Hub looks otherwise", 0),
        ("a/b/c", "there is no such folder", 0),
        ("./nothere", "there is no such folder", 0),
        ("", "is empty: name a folder", 0),
        (__file__, "is a file: give the folder it is in", 0),
    ],
)
def test_no_such_model(name, message, connections, unreachable, monkeypatch, capsys):
    monkeypatch.setattr(loading, "load_tokenizer", lambda _: pytest.fail("something is loaded"))
    for call in (["hi", "--model", name], ["chat", "--model", name], ["bench", "--model", name], ["probe", name]):
        unreachable.clear()
        with pytest.raises(SystemExit) as stop:
            main(call)
        lines = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and len(lines) == 1
        assert lines[0].startswith(f"hf-ssr: --model {name}".rstrip()) and message in lines[0]
        assert unreachable == [("huggingface.co", 443, loading.HUB_SECONDS)] * connections


def test_what_was_downloaded_before_is_taken(unreachable, tokenizer, tmp_path, monkeypatch, capfd):
    build_once("qwen3").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    into_cache(tmp_path / "hub", "somebody/reasoner", tmp_path / "model")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    call = ["Say it.", "--model", "somebody/reasoner", "--max-new-tokens", "5", "--dtype", "float64"]
    assert main(call) == 0
    out, err = capfd.readouterr()
    assert out.strip() and "somebody/reasoner is taken as it was downloaded before" in err
    assert len(unreachable) == 1


def test_a_proxy_is_asked_in_place_of_the_hub(unreachable, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    assert not loading.reaches("https://huggingface.co")
    monkeypatch.setenv("NO_PROXY", "huggingface.co")
    assert not loading.reaches("https://huggingface.co")
    assert [address[:2] for address in unreachable] == [("proxy.example", 3128), ("huggingface.co", 443)]
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: socket.socket())
    assert loading.reaches("https://huggingface.co")
    assert loading.source_of("--model", "nothere", "config.json") == "nothere"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (integer(1), "0", "must be an integer of at least 1, but is 0"),
        (integer(1), "1.5", "must be an integer of at least 1, but is '1.5'"),
        (integer(1), str(MOST + 1), f"must be an integer from 1 to {MOST}, but is {MOST + 1}"),
        (integer(0, 2**64 - 1), "9" * 5000, f"to {2**64 - 1}, but is '{'9' * 37}...'"),
        (integer(1, 8), "9", "must be an integer from 1 to 8, but is 9"),
        (number(0, 1), "7", "must be a number of at least 0 and at most 1, but is 7"),
        (number(0, is_open=True), "0", "must be a number above 0 and at most 1e+06, but is 0"),
        (number(0), "nan", "but is nan"),
        (number(0), "inf", "but is inf"),
        (number(0), "warm", "but is 'warm'"),
    ],
)
def test_numbers_have_a_range(kind, text, message):
    with pytest.raises(Exception) as error:
        kind(text)
    assert message in str(error.value)


OF_A_MODEL = ("--threads", "0"), ("--threads", "x")
OF_SSR = (
    ("--draft-budgets", "-1"),
    ("--draft-interval", "0"),
    ("--max-draft-length", "0"),
    ("--num-draft-tokens", "0"),
)
OF_TEXT = (
    ("--thinking-budget", "-1"),
    ("--max-new-tokens", "0"),
    ("--temperature", "-0.5"),
    ("--temperature", "0"),
    ("--top-p", "7"),
    ("--top-p", "-1"),
    ("--top-k", "-1"),
    ("--seed", "-1"),
    ("--seed", "10**23"),
    ("--seed", "100000000000000000000000"),
    ("--dtype", "foo"),
)
OF_BENCH = ("--limit", "0"), ("--repeats", "0"), ("--max-new-tokens", "0"), ("--temperature", "-1")
RANGES = [
    *(([command], *given) for command in ("hello", "chat") for given in (*OF_SSR, *OF_TEXT)),
    *((["bench"], *given) for given in (*OF_A_MODEL, *OF_BENCH, ("--thinking-budget", "-1"), ("--dtype", "foo"))),
    *((["probe"], *given) for given in (*OF_A_MODEL, ("--steps", "1"), ("--widths", "1"), ("--dtype", "foo"))),
    (["demo"], "--seed", "-1"),
    *((["bench", "--replay", __file__], *given) for given in (("--limit", "0"), ("--num-draft-tokens", "0"))),
    *((["whatif", "x"], *given) for given in (("--step", "0"), ("--step", "nan"))),
]


@pytest.mark.parametrize(("command", "option", "value"), RANGES)
def test_each_option_names_its_range_before_anything_is_loaded(command, option, value, monkeypatch, capsys):
    monkeypatch.setattr("importlib.import_module", lambda *_: pytest.fail("the command has begun"))
    with pytest.raises(SystemExit) as stop:
        main([*command, f"{option}={value}", *(["--sample"] if command[0] in ("hello", "chat") else [])])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith(f"hf-ssr: argument {option}: must be ")
    assert re.search(rf", but is '?{re.escape(value)}'?; see hf-ssr.* --help$", line)


def test_no_such_device(model, tokenizer, tmp_path, monkeypatch, capsys):
    """Before the model is loaded."""
    (tmp_path / "config.json").write_text("{}")
    for device in ("nothere", "cuda:77"):
        with pytest.raises(SystemExit):
            main(["hello", "--model", str(tmp_path), "--device", device])
        assert capsys.readouterr().err.startswith(f"hf-ssr: --device {device}: ")


@pytest.mark.parametrize(
    "call", [["hello", "--prediction"], ["bench", "--prompts"], ["bench", "--replay"], ["whatif", "x", "--curve"]]
)
def test_a_file_that_is_no_text(call, tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\x80\x04\xff\x00")
    with pytest.raises(SystemExit):
        main([*call, str(tmp_path / "binary")])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"argument {call[-1]}: must be a readable text in UTF-8, but " in line
