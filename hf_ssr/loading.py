"""Which model a command runs, and how it is loaded."""

import argparse
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import validate_repo_id
from transformers import AutoModelForCausalLM, AutoTokenizer

from .bench.reasoner import reasoner_folder
from .config import SSRConfig
from .markers import resolve_markers

HUB_SECONDS = 3.0  # for the Hub to answer: transformers would try for half a minute


def load_tokenizer(arguments: argparse.Namespace):
    """
    The tokenizer of the model that was asked for, of the small reasoner if none was. `arguments.is_local` is set, for
    the model.

    Raises:
        `ValueError`: if `--model` and `--gguf-file` do not fit each other or name nothing, or there is no such device.
    """
    try:
        torch.empty(0, device=arguments.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {arguments.device}: {str(error).splitlines()[0]}") from None
    name = _name(arguments)
    folder, file = Path(name), arguments.gguf_file
    if folder.is_dir() and file is None and not (folder / "config.json").exists():
        found = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f": add --gguf-file {found[0]}" if found else ""
        raise ValueError(f"--model {name}: the folder has no config.json{hint}.")
    if folder.is_dir() and file and not (folder / file).exists():
        raise ValueError(f"--gguf-file {file}: not in {name}.")
    arguments.is_local = only_local("--model", name, file or "config.json")
    if arguments.is_local and not folder.is_dir():
        print(f"hf-ssr: the Hub cannot be reached: {name} is taken as it was downloaded before", file=sys.stderr)
    return tokenizer_of("--model", name, local_files_only=arguments.is_local, **_gguf(arguments))


def load_model(arguments: argparse.Namespace):
    """The model, after its tokenizer, ready to generate. GGUF weights become float32 unless `--dtype` is set."""
    dtype = torch.float32 if arguments.gguf_file and arguments.dtype == "auto" else arguments.dtype
    kwargs = {"dtype": dtype, "local_files_only": arguments.is_local, **_gguf(arguments)}
    model = AutoModelForCausalLM.from_pretrained(_name(arguments), **kwargs)
    return model.to(arguments.device).eval()


def tokenizer_of(option: str, name: str, **kwargs):
    """
    A tokenizer, by a folder or an id.

    Raises:
        `ValueError`: naming the option, if there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {name}: {error}") from None


def only_local(option: str, name: str, file: str) -> bool:
    """
    Whether a model is to be had from this machine alone, as the Hub cannot be reached.

    Args:
        option (`str`): that names it.
        name (`str`): a folder, or an id on the Hub.
        file (`str`): that it must have.

    Raises:
        `ValueError`: if it is not to be had at all.
    """
    path = Path(name)
    if path.is_dir():
        return True
    if path.is_file():
        raise ValueError(f"{option} {name} is a file: give the folder it is in.")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"{option} {name}: there is no such folder.")
    try:
        validate_repo_id(name)
    except ValueError:
        raise ValueError(f"{option} {name}: there is no such folder, and an id on the Hub looks otherwise.") from None
    if not constants.HF_HUB_OFFLINE and reaches_hub():
        return False
    if not isinstance(try_to_load_from_cache(name, file), str):
        raise ValueError(
            f"{option} {name}: there is no such folder, it was not downloaded before, and the Hub "
            f"({constants.ENDPOINT}) cannot be reached: name a folder, or go online."
        )
    return True


def reaches_hub() -> bool:
    """Whether the Hub, or the proxy before it, takes a connection."""
    hub, proxies = urlsplit(constants.ENDPOINT), getproxies()
    proxy = urlsplit(proxies.get(hub.scheme) or proxies.get("all") or "")
    address = hub if not proxy.hostname or proxy_bypass(hub.hostname) else proxy
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname, port), timeout=HUB_SECONDS).close()
    except OSError:
        return False
    return True


def settle_markers(config: SSRConfig, tokenizer) -> None:
    """
    Says in the command's own words that no thinking markers are known.

    Raises:
        `ValueError`: if a setting needs them.
    """
    if resolve_markers(config, tokenizer) is not None:
        return
    if config.thinking_budget is not None or config.forks_on_request:
        raise ValueError("the tokenizer does not tell how this model closes a thought: give --thinking-end.")
    if config.draft_budgets is None:
        print("hf-ssr: no thinking markers found, so nothing forks; --thinking-end sets them", file=sys.stderr)
        config.draft_budgets = []


def _name(arguments: argparse.Namespace) -> str:
    return arguments.model or str(reasoner_folder())


def _gguf(arguments: argparse.Namespace) -> dict[str, str]:
    return {"gguf_file": arguments.gguf_file} if arguments.gguf_file else {}
