"""
Runs notebooks from a clean kernel, and saves them with their outputs and without what belongs to one machine:

    python notebooks/execute.py                      # all of them
    python notebooks/execute.py 02_ssr_explained.ipynb

Where the project is published, one command says where, without running them: their badges lead there, and their first
cell installs from there. Until then they need an installed `hf_ssr`, and load code from nowhere.

    python notebooks/execute.py --repository OWNER/NAME    # on GitHub; kept as `url` in setup.cfg
"""

import argparse
import configparser
import os
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SETUP = FOLDER.parent / "setup.cfg"
GITHUB = "https://github.com/"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SECONDS = 600  # of a cell, at most; a whole notebook takes about a minute

NEEDS = """\
import importlib.util
import warnings

missing = [name for name in ("hf_ssr", "matplotlib") if importlib.util.find_spec(name) is None]
if missing:
{way}
warnings.filterwarnings("ignore", message="IProgress")  # progress bars may be text"""
BY_HAND = """\
    raise ModuleNotFoundError(
        f"{' and '.join(missing)} cannot be imported here. In the folder of hf_ssr run: pip install '.[report]' "
        "(with a wheel: pip install 'PATH_OF_THE_WHEEL[report]'). Then restart this kernel."
    )"""
FROM_GITHUB = '    %pip install -q "hf_ssr[report] @ git+{address}"'
BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\([^)]*\)\n\n")


def repository() -> str | None:
    """Where the project is published, as `OWNER/NAME` on GitHub; `None` before that."""
    settings = configparser.ConfigParser()
    settings.read(SETUP)
    url = settings.get("metadata", "url", fallback=None)
    return None if url is None else url.removeprefix(GITHUB)


def set_repository(name: str) -> None:
    """
    Keeps it in `setup.cfg`.

    Raises:
        `ValueError`: if it is no `OWNER/NAME`.
    """
    if not re.fullmatch(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+", name):
        raise ValueError(f"--repository must be OWNER/NAME, but is {name!r}.")
    lines = [line for line in SETUP.read_text().splitlines(keepends=True) if not line.startswith("url = ")]
    lines.insert(lines.index("[metadata]\n") + 1, f"url = {GITHUB}{name}\n")
    SETUP.write_text("".join(lines))


def addressed(path: Path) -> nbformat.NotebookNode:
    """A notebook with the badge and the first cell of code that belong to where the project is published."""
    notebook, name = nbformat.read(path, as_version=4), repository()
    title, code = notebook.cells[0], next(cell for cell in notebook.cells if cell.cell_type == "code")
    title.source = BADGE.sub("", title.source)
    way = BY_HAND
    if name is not None:
        picture = "https://colab.research.google.com/assets/colab-badge.svg"
        page = f"https://colab.research.google.com/github/{name}/blob/main/notebooks/{path.name}"
        head, rest = title.source.split("\n\n", 1)
        title.source = f"{head}\n\n[![Open in Colab]({picture})]({page})\n\n{rest}"
        way = FROM_GITHUB.format(address=GITHUB + name)
    code.source = NEEDS.format(way=way)
    return notebook


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """
    A notebook, run in this interpreter's environment.

    Args:
        path (`Path`): of the notebook; it is not changed.
        folder (`Path`): where it runs, and where its files are left.
    """
    notebook = addressed(path)
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


def main(argv: list[str] | None = None) -> None:
    """Runs and saves, or says where the project is published."""
    parser = argparse.ArgumentParser(prog="python notebooks/execute.py")
    parser.add_argument("names", nargs="*", metavar="NOTEBOOK", help="default: all of them")
    parser.add_argument("--repository", metavar="OWNER/NAME", help="where they are published, on GitHub; runs nothing")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a large model is for readers
    paths = [FOLDER / Path(name).name for name in arguments.names] or sorted(FOLDER.glob("*.ipynb"))
    if arguments.repository is not None:
        try:
            set_repository(arguments.repository)
        except ValueError as error:
            parser.error(str(error))
        for path in paths:
            nbformat.write(addressed(path), path)
        return
    for path in paths:
        print(path.name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder)), path)


if __name__ == "__main__":
    main()
