"""The notebooks run from a clean kernel, and are committed as such a run leaves them."""

import re
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
README = (FOLDER.parent / "README.md").read_text()
NAMES = ["01_quickstart", "02_ssr_explained", "03_choosing_settings", "04_measuring"]
sys.path.insert(0, str(FOLDER))

from execute import METADATA, executed  # noqa: E402

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(cell) -> list[str]:
    """Kinds of what a cell shows; what other packages warn of while they load is not its own."""
    return [output.output_type for output in cell.outputs if output.get("name") != "stderr"]


def test_all_are_here_and_in_the_readme():
    assert [path.stem for path in NOTEBOOKS] == NAMES
    assert all(f"(notebooks/{path.name})" in README and f"/notebooks/{path.name})" in README for path in NOTEBOOKS)


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
def test_opens_in_colab_and_installs_what_is_missing(path):
    notebook = nbformat.read(path, as_version=4)
    (repository,) = re.findall(r'REPOSITORY = "https://github.com/(.*)"', code_cells(notebook)[0].source)
    badge = f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{path.name}"
    assert badge in notebook.cells[0].source and badge in README
    install = code_cells(notebook)[0].source
    assert "%pip install" in install and "torch" not in install


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
