"""A Hub repository, or any folder, from which transformers can load SSR with nothing installed."""

import argparse
import hashlib
import json
from pathlib import Path

from ..version import TRANSFORMERS_FLOOR

PACKAGE = Path(__file__).parent.parent
MANIFEST = "export.json"  # what an export has written, so that the next one replaces nothing else
CARD_FOLDERS = (PACKAGE / "cards", PACKAGE.parent / "model_cards")  # installed, in a checkout

_CARD = """---
library_name: transformers
tags:
- custom_generate
---

# SSR: Self-Speculation for Reasoning Models

```python
output = model.generate(
    **inputs,
    custom_generate="<this repository or folder>",
    trust_remote_code=True,
    tokenizer=tokenizer,
    max_new_tokens=4096,
)
```

The tokens are those of plain `generate`, sooner: the answer of a reasoning model is drafted while it still thinks
(arXiv 2608.20359). `return_dict_in_generate=True` adds `metrics` to the output. If there is a model in this folder too,
`from_pretrained("<folder>", trust_remote_code=True)` gives one whose `generate` is SSR.

Settings are keywords of the call, such as `draft_budgets=[256, 512]`; `custom_generate/config.py` documents them.
"""


def card_names() -> list[str]:
    """Names of the cards that [`export`] can write."""
    return sorted({path.parent.name for folder in CARD_FOLDERS for path in folder.glob("ssr*/README.md")})


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-ssr export` takes."""
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="new, or with a model in it: custom_generate/ is written, README.md added if there is none",
    )
    parser.add_argument("--card", metavar="NAME", help=f"its README.md: one of {', '.join(card_names())}")


def export_command(arguments: argparse.Namespace) -> int:
    """
    Writes SSR into the folder, and says how it is used. Returns the exit status.

    Raises:
        `ValueError`, `OSError`: see `export`.
    """
    folder = arguments.folder
    written = export(folder, arguments.card)
    print(f"{len(written)} files written to {folder}")
    if holds_model(Path(folder)):
        print(f"use: model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)")
        print("     then model.generate(**inputs, tokenizer=tokenizer) is SSR")
    else:
        print(f"use: model.generate(**inputs, custom_generate={folder!r}, trust_remote_code=True, tokenizer=tokenizer)")
    return 0


def holds_model(folder: Path) -> bool:
    """Whether `from_pretrained` can load a model from a folder."""
    weights = (path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
    return (folder / "config.json").is_file() and any(weights)


def export(folder: str | Path, card: str | None = None) -> list[Path]:
    """
    Writes `custom_generate/` into a folder: `generate.py`, the modules it imports, flat, `requirements.txt`, and
    `export.json`, by which a later export knows its own files.

    The folder serves as `custom_generate="<folder>"`; with a model in it, `from_pretrained(folder,
    trust_remote_code=True)` gives a model whose `generate` is SSR. A `README.md` with the `custom_generate` tag is
    added if there is none.

    Args:
        folder (`str` or `Path`): made if it is missing. What it holds stays; files of an earlier export are replaced.
        card (`str`, *optional*): one of [`card_names`], to be the `README.md` instead: what a model needs to know.

    Returns:
        `list[Path]`: the files that were written.

    Raises:
        `ValueError`: if `folder` is a file, no card has that name, a card is asked for where there is a `README.md`, or
            `custom_generate/` holds files that no export has written, or that were changed since.
    """
    if not str(folder).strip():
        raise ValueError("`folder` is empty: name a folder.")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`folder`={str(folder)!r} must be a folder, but is a file: name another.")
    readme = folder / "README.md"
    text = _CARD if card is None else _text_of_card(card, readme)
    target = folder / "custom_generate"
    files, earlier = _files(), _earlier(target)
    _refuse_to_replace(target, files, earlier)
    target.mkdir(parents=True, exist_ok=True)
    for path in filter(Path.is_file, target.iterdir()):
        if path.name not in (*files, MANIFEST):  # of another version
            path.unlink()
    files[MANIFEST] = json.dumps({name: _digest(content) for name, content in files.items()}, indent=1).encode()
    written = [target / name for name in files]
    for path, content in zip(written, files.values(), strict=True):
        path.write_bytes(content)
    if not readme.exists():
        readme.write_text(text, encoding="utf-8")
        written.append(readme)
    return written


def _files() -> dict[str, bytes]:
    """What `custom_generate/` is to hold: `generate.py`, the modules it imports, and what has to be installed."""
    from transformers.dynamic_module_utils import get_relative_import_files  # here, so that help need not wait for it

    door = PACKAGE / "generate.py"
    modules = sorted({door, *map(Path, get_relative_import_files(door))})
    files = {module.name: module.read_bytes() for module in modules}
    return {**files, "requirements.txt": f"transformers>={TRANSFORMERS_FLOOR}\n".encode()}


def _earlier(target: Path) -> dict[str, str]:
    """The files that an earlier export has written, and their digests then."""
    try:
        found = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _refuse_to_replace(target: Path, files: dict[str, bytes], earlier: dict[str, str]) -> None:
    """Whatever is there must be of an earlier export, or what this one writes."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{str(target)!r} is a file, which no export has written: move it away.")
    foreign = []
    for path in sorted(target.iterdir()) if target.exists() else ():
        if path.name in ("__pycache__", MANIFEST):
            continue
        digest = _digest(path.read_bytes()) if path.is_file() else None
        if digest is None or digest not in (earlier.get(path.name), _digest(files.get(path.name, b""))):
            foreign.append(path.name)
    if foreign:
        raise ValueError(
            f"{str(target)!r} holds what no export has written, or what was changed since: {', '.join(foreign)}. Move "
            "it away, or export to another folder."
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _text_of_card(card: str, readme: Path) -> str:
    """The text of a card that is to become `readme`."""
    if card not in card_names():
        raise ValueError(f"`--card`={card!r} is no card: choose one of {', '.join(card_names())}.")
    if readme.exists():
        raise ValueError(
            f"`--card`={card!r} would replace {str(readme)!r}, which is yours: move it away, or leave out `--card`."
        )
    return next(path for folder in CARD_FOLDERS if (path := folder / card / "README.md").exists()).read_text(
        encoding="utf-8"
    )
