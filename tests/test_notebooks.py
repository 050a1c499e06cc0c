"""The notebooks run from a clean kernel, and are committed as such a run leaves them."""

import configparser
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
README = (FOLDER.parent / "README.md").read_text()
NAMES = ["01_quickstart", "02_ssr_explained", "03_choosing_settings", "04_measuring"]
sys.path.insert(0, str(FOLDER))

import execute  # noqa: E402
from execute import METADATA, addressed, executed  # noqa: E402

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(cell) -> list[str]:
    """Kinds of what a cell shows; what other packages warn of while they load is not its own."""
    return [output.output_type for output in cell.outputs if output.get("name") != "stderr"]


def test_all_are_here_and_in_the_readme():
    assert [path.stem for path in NOTEBOOKS] == NAMES
    assert all(f"(notebooks/{path.name})" in README for path in NOTEBOOKS)


@notebooks
def test_committed_as_a_clean_run_left_them(path):
    """In order from 1 on, with outputs, without errors and without what belongs to one machine."""
    text = path.read_text()
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert len(outputs) >= 5 and any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert notebook.metadata == METADATA and not any(cell.metadata for cell in notebook.cells)
    shown = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=outputs)]))
    assert not re.search(r"/(tmp|home|root|Users|work|mnt|opt|usr)/|site-packages", shown)
    assert len(text.encode()) < 500_000


@notebooks
def test_the_first_cell_is_the_commands(path):
    """Badge and first cell of code are what `execute.py` writes: by hand nothing is said there."""
    assert nbformat.read(path, as_version=4) == addressed(path)


def test_the_first_cell_says_what_it_needs(monkeypatch):
    """Nothing is fetched from anywhere: where something is missing, the cell says how to install it."""
    monkeypatch.setattr(execute, "repository", lambda: None)
    cell = code_cells(addressed(NOTEBOOKS[0]))[0].source
    exec(cell, {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"hf_ssr and matplotlib .* pip install '\.\[report\]'"):
        exec(cell, {})


def test_where_the_project_is_published(tmp_path):
    """One command writes badges and first cells; again with another name, it leaves nothing of the first."""
    shutil.copytree(FOLDER, tmp_path / "notebooks")
    shutil.copy(FOLDER.parent / "setup.cfg", tmp_path)

    def written(name: str) -> dict[str, str]:
        command = [sys.executable, tmp_path / "notebooks" / "execute.py", "--repository", name]
        assert subprocess.run(command, capture_output=True).returncode == 0
        return {path.name: path.read_text() for path in (tmp_path / "notebooks").glob("*.ipynb")}

    first, second = written("one/first"), written("an-other/second.name")
    for name, text in second.items():
        notebook = nbformat.reads(text, as_version=4)
        badge = f"https://colab.research.google.com/github/an-other/second.name/blob/main/notebooks/{name}"
        assert notebook.cells[0].source.count("Open in Colab") == 1 and f"]({badge})\n\n" in notebook.cells[0].source
        install = '    %pip install -q "hf_ssr[report] @ git+https://github.com/an-other/second.name"\n'
        assert install in code_cells(notebook)[0].source and "raise" not in code_cells(notebook)[0].source
        assert "one/first" in first[name] and "one/first" not in text
        outputs = [cell.outputs for cell in code_cells(notebook)]
        assert outputs == [cell.outputs for cell in code_cells(nbformat.read(FOLDER / name, 4))]
    assert written("one/first") == first
    settings = configparser.ConfigParser()
    settings.read(tmp_path / "setup.cfg")
    assert settings["metadata"]["url"] == "https://github.com/one/first" and settings["metadata"]["name"] == "hf_ssr"
    command = [sys.executable, tmp_path / "notebooks" / "execute.py", "--repository", "https://github.com/one/first"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2 and "--repository must be OWNER/NAME" in refused.stderr


def texts_of_the_project() -> dict[str, str]:
    """What git keeps, but for pictures and weights; and this file, which is about addresses."""
    root = FOLDER.parent
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("not a checkout")
    paths = [root / name for name in names.stdout.splitlines()]
    kinds = (".py", ".md", ".ipynb", ".cfg", ".toml", ".txt", ".json", ".jinja", "run")
    return {str(p.relative_to(root)): p.read_text() for p in paths if p.name.endswith(kinds) and p.exists()}


def test_no_address_that_is_not_ours():
    """Whoever registers a name that we only thought of would run code on our users' machines."""
    own = execute.repository()
    sources = {  # where the data of public benchmarks is from: other people's, and not of code that is run
        "hemingkx/Spec-Bench",
        "princeton-pli/LongProc",
        "openai/human-eval",
        "openai/grade-school-math",
        "FudanSELab/ClassEval",
    }
    for name, text in texts_of_the_project().items():
        if name in ("tests/test_notebooks.py", "notebooks/execute.py"):
            continue
        for found in re.findall(r"github(?:\.com|usercontent\.com)?/([\w.-]+/[\w-]+(?:\.[\w-]+)*)", text):
            assert found in sources | {own}, f"{name}: {found}"
        for found in re.findall(r"git\+\S+", text):
            assert own is not None and own in found, f"{name}: {found}"
        for line in re.findall(r"pip install[^\n]*", text):  # by name, from an index that anyone may fill
            by_name = r"(?<![\w./-])hf[_-]ssr(?=[\s'\"\[<>=~]|$)(?!\[report\] @ git\+)"
            assert not re.search(by_name, line), f"{name}: {line}"
        for found in re.findall(r"custom_generate=\\?[\"']([^\"'\\]+)", text):
            assert "/" not in found or found.startswith("{"), f"{name}: {found}"  # a folder, not somebody's repository


@pytest.mark.slow
@notebooks
def test_runs_from_a_clean_kernel(path, tmp_path, monkeypatch):
    """In this interpreter, in an empty folder, and without the Hub; each `same tokens` that it prints is a yes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cells = code_cells(executed(path, tmp_path))
    assert all(output.output_type != "error" for cell in cells for output in cell.outputs)
    printed = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    told = re.findall(r"same tokens[^:\n]*: (\w+)", printed)
    assert set(told) <= {"True"} and (told or path.stem == NAMES[3])
    committed = code_cells(nbformat.read(path, 4))
    assert [outputs_of(cell) for cell in cells] == [outputs_of(cell) for cell in committed]
