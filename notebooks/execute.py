"""
Runs notebooks from a clean kernel, and saves them with their outputs and without what belongs to one machine:

    python notebooks/execute.py                      # all of them
    python notebooks/execute.py 02_ssr_explained.ipynb
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SECONDS = 600  # of a cell, at most; a whole notebook takes about a minute


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """
    A notebook, run in this interpreter's environment.

    Args:
        path (`Path`): of the notebook; it is not changed.
        folder (`Path`): where it runs, and where its files are left.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def main(names: list[str]) -> None:
    """Runs and saves."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a large model is for readers
    for path in [FOLDER / Path(name).name for name in names] or sorted(FOLDER.glob("*.ipynb")):
        print(path.name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
