"""A Hub repository, or any folder, from which transformers can load SSR with nothing installed."""

import argparse
import shutil
from pathlib import Path

from .version import TRANSFORMERS_FLOOR

PACKAGE = Path(__file__).parent
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
        help="new, or with a model in it: custom_generate/ is written or replaced, README.md added if there is none",
    )
    parser.add_argument("--card", metavar="NAME", help=f"its README.md: one of {', '.join(card_names())}")


def export_command(arguments: argparse.Namespace) -> int:
    """
    Writes SSR into the folder, and says how it is used. Returns the exit status.

    Raises:
        `ValueError`, `OSError`: see `export`.
    """
    written = export(arguments.folder, arguments.card)
    print(f"{len(written)} files written to {arguments.folder}")
    print(
        f"use: model.generate(**inputs, custom_generate={arguments.folder!r}, trust_remote_code=True, "
        "tokenizer=tokenizer)"
    )
    return 0


def export(folder: str | Path, card: str | None = None) -> list[Path]:
    """
    Writes `custom_generate/` into a folder: `generate.py`, the modules it imports, flat, and `requirements.txt`.

    The folder serves as `custom_generate="<folder>"`; with a model in it, `from_pretrained(folder,
    trust_remote_code=True)` gives a model whose `generate` is SSR. A `README.md` with the `custom_generate` tag is
    added if there is none.

    Args:
        folder (`str` or `Path`): made if it is missing. What it holds stays, but for `custom_generate/`, which is
            replaced.
        card (`str`, *optional*): one of [`card_names`], to be the `README.md` instead: what a model needs to know.

    Returns:
        `list[Path]`: the files that were written.

    Raises:
        `ValueError`: if `folder` is a file, no card has that name, or a card is asked for where there is a `README.md`.
    """
    if not str(folder).strip():
        raise ValueError("`folder` is empty: name a folder.")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`folder`={str(folder)!r} must be a folder, but is a file: name another.")
    readme = folder / "README.md"
    text = _CARD if card is None else _text_of_card(card, readme)
    from transformers.dynamic_module_utils import get_relative_import_files  # here, so that help need not wait for it

    target = folder / "custom_generate"
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    door = PACKAGE / "generate.py"
    written = [
        Path(shutil.copyfile(module, target / module.name))
        for module in sorted({door, *map(Path, get_relative_import_files(door))})
    ]
    requirements = target / "requirements.txt"
    requirements.write_text(f"transformers>={TRANSFORMERS_FLOOR}\n")
    written.append(requirements)
    if not readme.exists():
        readme.write_text(text, encoding="utf-8")
        written.append(readme)
    return written


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
