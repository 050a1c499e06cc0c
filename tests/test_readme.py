"""Every Python block of the README runs, and its shell blocks are what CI runs."""

import copy
import re
from pathlib import Path

from conftest import build_once
from tiny_models import compatibility_table
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_blocks(tokenizer, capsys, monkeypatch):
    """One after another, with a tiny model in the place of the one that they load."""
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 3
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
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "model_cards/tiny-reasoner/README.md").read_text(), flags=re.DOTALL
    )
    assert blocks
    for block in blocks:
        exec(block, {})


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
