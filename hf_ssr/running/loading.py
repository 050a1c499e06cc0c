"""
Which model a command runs, and how it is loaded.

torch and transformers are imported where they are needed: that a model is not there is said before.
"""

import argparse
import sys
from pathlib import Path

HUB_SECONDS = 3.0  # for the Hub to answer: transformers would try for half a minute


def check_model(arguments: argparse.Namespace) -> None:
    """
    Whether the model that was asked for is there. Sets `arguments.source`: where it is loaded from, `None` for the
    small reasoner.

    Raises:
        `ValueError`: if `--model` and `--gguf-file` name nothing, or do not fit each other.
    """
    arguments.source = None
    if arguments.model is None:
        return
    name, file, folder = arguments.model, arguments.gguf_file, Path(arguments.model)
    arguments.source = source_of("--model", name, file or "config.json")
    if not folder.is_dir():
        return
    if file is None and not (folder / "config.json").exists():
        found = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f": add --gguf-file {found[0]}" if found else ""
        raise ValueError(f"--model {name}: the folder has no config.json{hint}.")
    if file and not (folder / file).exists():
        raise ValueError(f"--gguf-file {file}: not in {name}.")


def source_of(option: str, name: str, file: str) -> str:
    """
    Where a model is loaded from.

    Args:
        option (`str`): that names it.
        name (`str`): a folder, or an id on the Hub.
        file (`str`): that it must have.

    Returns:
        `str`: `name`, or the folder it was downloaded to before, where the Hub cannot be reached.

    Raises:
        `ValueError`: if it is not to be had at all.
    """
    path = Path(name)
    if not name.strip():
        raise ValueError(f"{option} is empty: name a folder, or an id on the Hub.")
    if path.is_dir():
        return name
    if path.is_file():
        raise ValueError(f"{option} {name} is a file: give the folder it is in.")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"{option} {name}: there is no such folder.")
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except ValueError:
        raise ValueError(f"{option} {name}: there is no such folder, and an id on the Hub looks otherwise.") from None
    if not constants.HF_HUB_OFFLINE and reaches(constants.ENDPOINT):
        return name
    if not isinstance(found := try_to_load_from_cache(name, file), str):
        raise ValueError(
            f"{option} {name}: there is no such folder, it was not downloaded before, and the Hub "
            f"({constants.ENDPOINT}) cannot be reached: name a folder, or go online."
        )
    print(f"hf-ssr: the Hub cannot be reached: {name} is taken as it was downloaded before", file=sys.stderr)
    return str(Path(found).parents[len(Path(file).parts) - 1])


def reaches(endpoint: str) -> bool:
    """Whether the host of an address, or the proxy before it, takes a connection."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies, proxy_bypass

    hub, proxies = urlsplit(endpoint), getproxies()
    proxy = urlsplit(proxies.get(hub.scheme) or proxies.get("all") or "")
    address = hub if not proxy.hostname or proxy_bypass(hub.hostname or "") else proxy
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname, port), timeout=HUB_SECONDS).close()
    except OSError:
        return False
    return True


def load_tokenizer(arguments: argparse.Namespace):
    """
    The tokenizer of the model that was asked for, of the small reasoner if none was.

    Raises:
        `ValueError`: if there is none, or no such device as `--device`, for the model.
    """
    import torch

    try:
        torch.empty(0, device=arguments.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {arguments.device}: {str(error).splitlines()[0]}") from None
    return tokenizer_of("--model", _source(arguments), **_gguf(arguments))


def load_model(arguments: argparse.Namespace):
    """The model, ready to generate. GGUF weights become float32 unless `--dtype` says otherwise."""
    import torch
    from transformers import AutoModelForCausalLM

    if arguments.source is None and getattr(arguments, "threads", None) is None:
        torch.set_num_threads(1)  # the small reasoner is too small for more: on busy cores they wait for each other
    dtype = torch.float32 if arguments.gguf_file and arguments.dtype == "auto" else arguments.dtype
    model = AutoModelForCausalLM.from_pretrained(_source(arguments), dtype=dtype, **_gguf(arguments))
    return model.to(arguments.device).eval()


def tokenizer_of(option: str, name: str, **kwargs):
    """
    A tokenizer, by a folder or an id.

    Raises:
        `ValueError`: naming the option, if there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {name}: {error}") from None


def reasoner_notice(example: str) -> str:
    """What the small reasoner can do, said before it is tried with something else; `example` is to be copied."""
    return f"""\
hf-ssr: without --model the small reasoner answers, which can do three kinds of task and nothing else: write a class
with sorted fields, keep a ledger, find a path. They must be worded as it was trained. One to copy:

{example}

`hf-ssr demo` shows others. For anything else name a model: --model Qwen/Qwen3-0.6B is a small one on the Hub."""


def settle_markers(config, tokenizer) -> None:
    """
    Says in the command's own words that no thinking markers are known.

    Args:
        config ([`SSRConfig`]): its `draft_budgets` become `[]`, so that nothing else is said of it.
        tokenizer (`PreTrainedTokenizerBase`): that may tell them.

    Raises:
        `ValueError`: if a setting needs them.
    """
    from ..markers import resolve_markers

    if resolve_markers(config, tokenizer) is not None:
        return
    if config.thinking_budget is not None or config.forks_on_request:
        raise ValueError("the tokenizer does not tell how this model closes a thought: give --thinking-end.")
    if config.draft_budgets is None:
        print("hf-ssr: no thinking markers found, so nothing forks; --thinking-end sets them", file=sys.stderr)
        config.draft_budgets = []


def _source(arguments: argparse.Namespace) -> str:
    from .reasoner import reasoner_folder

    return arguments.source or str(reasoner_folder())


def _gguf(arguments: argparse.Namespace) -> dict[str, str]:
    return {"gguf_file": arguments.gguf_file} if arguments.gguf_file else {}
