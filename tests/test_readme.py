"""Every Python block of the README runs, and its shell blocks are what CI runs."""

import re
from pathlib import Path

import pytest
from conftest import build_once

import hf_ssr

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
def test_python_block(block, tokenizer, capsys):
    block = block.replace("max_new_tokens=4096", "max_new_tokens=40")
    inputs = tokenizer("what is it?<think>", return_tensors="pt", return_token_type_ids=False)
    exec(block, {"model": build_once("qwen3"), "tokenizer": tokenizer, "inputs": inputs, "hf_ssr": hf_ssr})
    if "print" in block:
        assert "acceptance rate" in capsys.readouterr().out


def test_ci_runs_the_shell_blocks():
    named = re.findall(r"<!-- (.*?) -->\n```bash\n", README)
    script = (ROOT / ".ci" / "run").read_text()
    assert named == ["the main job", "the test command"]
    assert all(f"block '{name}'" in script for name in named)


def test_every_file_is_in_the_map():
    files = {path.name for path in (ROOT / "hf_ssr").glob("*.py")} - {"__init__.py", "version.py"}
    assert all(f"`{name}`" in README for name in files)
