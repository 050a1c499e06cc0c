"""The small reasoning model that comes with the package: where it lies, and how a task is put to it."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = Path(__file__).parent.parent
FOLDERS = (PACKAGE / "tiny_reasoner", PACKAGE.parent / "model_cards" / "tiny-reasoner")


def reasoner_folder() -> Path:
    """
    The model's folder: beside the package where that is installed, else in the checkout.

    Raises:
        `ValueError`: if it is in neither place.
    """
    for folder in FOLDERS:
        if (folder / "model.safetensors").exists():
            return folder
    raise ValueError(f"the reasoner that comes with hf_ssr is in neither {FOLDERS[0]} nor {FOLDERS[1]}: install again.")


def load_reasoner(folder: Path | str | None = None):
    """The model, ready to generate, and its tokenizer."""
    folder = reasoner_folder() if folder is None else folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)
