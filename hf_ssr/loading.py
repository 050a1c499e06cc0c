"""Which model a command runs, and how it is loaded."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .bench.reasoner import reasoner_folder


def add_model_arguments(parser) -> None:
    """How the model is loaded; `--model` is the command's own."""
    parser.add_argument("--gguf-file", metavar="F", help="GGUF file in the model's folder or repository")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16; auto = as stored (default)")
    parser.add_argument("--device", default="cpu", help="where the model runs, e.g. cuda (default cpu)")


def load_tokenizer(arguments: argparse.Namespace):
    """
    The tokenizer of the model that was asked for, of the small reasoner if none was.

    Raises:
        `ValueError`, `OSError`: if `--model`, `--gguf-file` and `--dtype` do not fit each other, or name nothing.
    """
    name = _name(arguments)
    folder = Path(name)
    is_path = folder.is_absolute() or name.startswith(".") or name.count("/") > 1
    if is_path and not folder.is_dir():
        raise ValueError(f"--model {name}: there is no such folder.")
    if arguments.gguf_file is None and folder.is_dir() and not (folder / "config.json").exists():
        found = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f": add --gguf-file {found[0]}" if found else ""
        raise ValueError(f"--model {name}: the folder has no config.json{hint}.")
    if arguments.gguf_file and folder.is_dir() and not (folder / arguments.gguf_file).exists():
        raise ValueError(f"--gguf-file {arguments.gguf_file}: not in {name}.")
    if arguments.dtype != "auto" and not isinstance(getattr(torch, arguments.dtype, None), torch.dtype):
        raise ValueError(f"--dtype must be a torch dtype such as float32, but is {arguments.dtype!r}.")
    return AutoTokenizer.from_pretrained(name, **_gguf(arguments))


def load_model(arguments: argparse.Namespace):
    """
    The model, ready to generate. GGUF weights become float32 unless `--dtype` says otherwise.

    Raises:
        `ValueError`: if there is no such device.
    """
    dtype = torch.float32 if arguments.gguf_file and arguments.dtype == "auto" else arguments.dtype
    model = AutoModelForCausalLM.from_pretrained(_name(arguments), dtype=dtype, **_gguf(arguments))
    try:
        return model.to(arguments.device).eval()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {arguments.device}: {str(error).splitlines()[0]}") from None


def _name(arguments: argparse.Namespace) -> str:
    return arguments.model or str(reasoner_folder())


def _gguf(arguments: argparse.Namespace) -> dict[str, str]:
    return {"gguf_file": arguments.gguf_file} if arguments.gguf_file else {}
