"""Every Python block of the README and beside it runs; its shell blocks are what CI runs."""

import copy
import inspect
import io
import re
import runpy
from pathlib import Path

from conftest import build_once
from tiny_models import compatibility_table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ssr
from hf_ssr.hub import export

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_no_text_with_python_is_left_out():
    """The README and the small reasoner's card are tried here, `ssr*` in `test_cards.py`, services in theirs."""
    folders = [path for name in ("docs", "model_cards") for path in (ROOT / name).rglob("*.md")]
    found = {path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *folders] if "```py" in path.read_text()}
    cards = {path.relative_to(ROOT) for path in ROOT.glob("model_cards/ssr*/README.md")}
    own = {Path("README.md"), Path("model_cards/tiny-reasoner/README.md"), Path("docs/services.md")}
    assert found == {*own, *cards}


def test_python_blocks(tokenizer, capsys, monkeypatch):
    """One after another, with a tiny model in the place of the one that they load."""
    blocks = python_blocks(README)
    assert len(blocks) == README.count("```py") >= 3
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ messages[0]['content'] }}<think>"
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: build_once("qwen3"))
    names = {}
    for block in blocks:
        exec(block.replace("4096", "40"), names)
    assert "wasted draft tokens" in capsys.readouterr().out


def test_python_blocks_of_the_small_reasoners_card(monkeypatch):
    """With the model itself."""
    monkeypatch.chdir(ROOT / "model_cards")
    blocks = python_blocks((ROOT / "model_cards/tiny-reasoner/README.md").read_text())
    assert blocks
    for block in blocks:
        exec(block, {})


def test_python_blocks_of_the_package(tokenizer, tmp_path):
    """What `export` writes where no card is asked for, and the example of `help(SSRConfig)`."""
    export(tmp_path)
    (written,) = python_blocks((tmp_path / "README.md").read_text())
    assert "<this repository or folder>" in written
    (example,) = python_blocks(inspect.cleandoc(hf_ssr.SSRConfig.__doc__))
    inputs = tokenizer(["def f<think>"], return_tensors="pt", return_token_type_ids=False)
    model = build_once("qwen3")
    names = {"model": model, "tokenizer": tokenizer, "inputs": inputs}
    exec(written.replace("<this repository or folder>", str(tmp_path)).replace("4096", "40"), names)
    assert names["output"].tolist() == model.generate(**inputs, max_new_tokens=40).tolist()
    exec(example.replace("2048", "40"), names)


def test_picture_is_what_the_code_draws():
    """By its words: lines and letters are placed a little differently by each matplotlib."""
    code = runpy.run_path(str(ROOT / "docs" / "how_it_works.py"))
    file = io.StringIO()
    code["write"](file)
    drawn, kept = (
        re.findall(r"<text[^>]*>([^<]+)</text>", text)
        for text in (file.getvalue(), (ROOT / "docs" / "how_it_works.svg").read_text())
    )
    assert drawn == kept and len(kept) > 20
    assert f"{len(code['PLAIN'])} forwards" in kept and f"{len(code['PARENT'])} forwards" in kept
    assert "](docs/how_it_works.svg)" in README


def test_ci_runs_the_shell_blocks():
    named = re.findall(r"<!-- (.*?) -->\n```bash\n", README)
    script = (ROOT / ".ci" / "run").read_text()
    assert named == ["the main job", "the test command"]
    assert all(f"block '{name}'" in script for name in named)


def test_every_file_is_in_the_map():
    files = {path.name for path in (ROOT / "hf_ssr").glob("*.py")} - {"__init__.py", "version.py"}
    assert all(f"`{name}`" in README for name in files)


def test_compatibility_is_what_is_tested():
    assert f"<!-- compatibility -->\n{compatibility_table()}\n\n" in README
