"""One prompt of a task, the rows of a data file, and the code in an answer."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Item:
    """
    One prompt of a task.

    Args:
        task (`str`): that it belongs to.
        name (`str`): which of these.
        prompt (`str`): the user's message, for the chat template.
        data (`Any`, *optional*): what the task's `score` needs.
    """

    task: str
    name: str
    prompt: str
    data: Any = field(default=None, repr=False)


def folder_of(task: str, data: Path | None, file: str, source: str) -> Path:
    """
    The folder that `--data` names.

    Args:
        task (`str`): that reads it.
        data (`Path`, *optional*): the setting.
        file (`str`): what is looked for there, for the message.
        source (`str`): where that can be had, for the message.

    Raises:
        `ValueError`: if there is no such folder.
    """
    if data is None:
        raise ValueError(f"the task {task!r} needs `--data DIR`, a folder with {file}: {source}.")
    if not data.is_dir():
        raise ValueError(f"`--data` must be a folder with {file}, but {data} is none. For {task!r}: {source}.")
    return data


def read_rows(task: str, data: Path | None, file: str, source: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """
    The rows of a file of JSON lines, in its order.

    Args:
        task (`str`): that reads it.
        data (`Path`, *optional*): the setting `--data`.
        file (`str`): in that folder.
        source (`str`): where the file can be had, for the message.
        fields (`tuple[str, ...]`): that every row must have.

    Raises:
        `ValueError`: if the folder, the file or a field is missing, or a line is no JSON.
    """
    path = folder_of(task, data, file, source) / file
    if not path.is_file():
        raise ValueError(f"`--data` {data} has no {file}, which the task {task!r} reads: {source}.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"`--data`: {path}, line {number}, must be JSON: {error}. Get it again: {source}."
            ) from None
        missing = [name for name in fields if not isinstance(row, dict) or name not in row]
        if missing:
            raise ValueError(f"`--data`: {path}, line {number}, has no `{missing[0]}`. Get it again: {source}.")
        rows.append(row)
    return rows


def last_block(answer: str, languages: tuple[str, ...], having: str = "") -> str | None:
    """
    The last fenced block of an answer, `None` if it has none; a block that was cut off ends with the answer.

    Args:
        answer (`str`): Markdown.
        languages (`tuple[str, ...]`): what may stand behind the fence; `""` for nothing.
        having (`str`): a pattern. The last block that has it is preferred to later ones: examples of use come last.
    """
    fenced = re.findall(r"^[ \t]*```[ \t]*([\w+]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", answer, re.M | re.S)
    blocks = [block for language, block in fenced if language.lower() in languages]
    return next((block for block in reversed(blocks) if re.search(having, block, re.M)), blocks[-1] if blocks else None)
