"""A Hub repository, or any folder, from which transformers can load SSR with nothing installed."""

import shutil
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

TRANSFORMERS_FLOOR = "5.24"

_CARD = """---
library_name: transformers
tags:
- custom_generate
---

# SSR: Self-Speculation for Reasoning Models

```python
model.generate(**inputs, custom_generate="<this repository or folder>", trust_remote_code=True, tokenizer=tokenizer)
```

The tokens are those of plain `generate`, sooner: the answer of a reasoning model is drafted while it still thinks
(arXiv 2608.20359). `return_dict_in_generate=True` adds `metrics` to the output. If there is a model in this folder too,
`from_pretrained("<folder>", trust_remote_code=True)` gives one whose `generate` is SSR.

Settings are keywords of the call, such as `draft_budgets=[256, 512]`; `custom_generate/config.py` documents them.
"""


def export(folder: str | Path) -> list[Path]:
    """
    Writes `custom_generate/` into a folder: `generate.py`, the modules it imports, flat, and `requirements.txt`.

    The folder serves as `custom_generate="<folder>"`; with a model in it, `from_pretrained(folder,
    trust_remote_code=True)` gives a model whose `generate` is SSR. A `README.md` with the `custom_generate` tag is
    added if there is none.

    Args:
        folder (`str` or `Path`): made if it is missing. What it holds stays, but for `custom_generate/`, which is
            replaced.

    Returns:
        `list[Path]`: the files that were written.

    Raises:
        `ValueError`: if `folder` is a file.
    """
    if not str(folder).strip():
        raise ValueError("`folder` is empty: name a folder.")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`folder`={str(folder)!r} must be a folder, but is a file: name another.")
    target = folder / "custom_generate"
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    door = Path(__file__).parent / "generate.py"
    written = [
        Path(shutil.copyfile(module, target / module.name))
        for module in sorted({door, *map(Path, get_relative_import_files(door))})
    ]
    requirements = target / "requirements.txt"
    requirements.write_text(f"transformers>={TRANSFORMERS_FLOOR}\n")
    written.append(requirements)
    card = folder / "README.md"
    if not card.exists():
        card.write_text(_CARD)
        written.append(card)
    return written
