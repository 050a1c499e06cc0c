"""What `hf-ssr bench` writes: a line of JSON for each run, and what ran."""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RUNS, SAMPLES, SETTINGS = "runs.jsonl", "samples.jsonl", "bench.json"
REQUIRED = ("model", "dtype", "machine", "prompts", "methods", "generation", "repeats", "parameters", "began")


@dataclass
class Result:
    """
    One run, a line of `runs.jsonl`.

    Args:
        task, prompt, method (`str`), repeat (`int`): what was run.
        tokens, thinking_tokens (`int`): new ones; of these, of the thought with its closing marker.
        same_tokens (`bool`): whether they are those of plain `generate`.
        first_difference (`int`, *optional*), margin (`float`, *optional*): the first token that is another one than in
            plain, and how far the model's scores of the two lie apart.
        loops (`bool`): whether the text ends in something that it says again and again, without an end.
        score (`float`, *optional*): of the answer, from 0 to 1, by the task's rule.
        forwards (`int`): of the model, the prefill among them.
        fed_tokens (`int`): places that these read, the prefill's not counted: work, where forwards are none.
        cost (`float`, *optional*): forwards after the prefill, each weighted by what its size took, in plain steps of
            this prompt, if plain was run.
        seconds, prefill_seconds (`float`): the whole call; its first forward.
        shapes (`dict[str, list]`): forwards after the prefill by rows x tokens: how many, and their seconds.
        overlaps (`list[list]`): of each draft: thinking tokens before the fork; the share of the answer that it gets
            right from the start on, and by the longest runs in common.
        peak_memory (`int`, *optional*): bytes that a GPU held at most, beyond those held before the run.
        metrics (`dict`, *optional*): of SSR.
        error (`str`, *optional*): why there is nothing else.
    """

    task: str
    prompt: str
    method: str
    repeat: int
    tokens: int = 0
    thinking_tokens: int = 0
    same_tokens: bool = True
    first_difference: int | None = None
    margin: float | None = None
    loops: bool = False
    score: float | None = None
    forwards: int = 0
    fed_tokens: int = 0
    cost: float | None = 0.0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    shapes: dict[str, list] = field(default_factory=dict, repr=False)
    overlaps: list[list] = field(default_factory=list, repr=False)
    peak_memory: int | None = None
    metrics: dict[str, Any] | None = field(default=None, repr=False)
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """What is run by every method."""
        return self.task, self.prompt, self.repeat


def read_results(path: Path) -> list[Result]:
    """The runs of a file; a last line that was cut off while it was written is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    results = []
    for number, line in enumerate(lines, 1):
        try:
            results.append(Result(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number < len(lines):
                raise ValueError(f"{path}: line {number} is no run of this version of hf-ssr bench: {error}") from None
    return results


def append_lines(path: Path, entries: Iterable[Any]) -> None:
    """
    Appends a line of JSON for each, all of them or none, and sees to it that they are on the disk.

    Raises:
        `OSError`: naming the file, and that what it held before is kept.
    """
    lines, before = _lines(entries).encode(), path.stat().st_size if path.exists() else 0
    try:
        with open(path, "ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.truncate(path, before)
        raise OSError(
            f"{path} cannot be written: {error.strerror}. What it held is kept, and `hf-ssr report` reads it: make "
            "room, then go on with --resume."
        ) from None


def write_text(path: Path, text: str) -> None:
    """
    Writes a file, or leaves the old one as it is.

    Raises:
        `OSError`: naming the file.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise OSError(f"{path} cannot be written: {error.strerror}. It is as it was before.") from None


def write_lines(path: Path, entries: Iterable[Any]) -> None:
    """Writes a file with a line of JSON for each, or leaves the old one as it is."""
    write_text(path, _lines(entries))


def _lines(entries: Iterable[Any]) -> str:
    return "".join(json.dumps(e if isinstance(e, dict) else asdict(e)) + "\n" for e in entries)


def parts_of(folder: Path, name: str) -> list[Path]:
    """The file of that name, and those of processes that were stopped before they were gathered."""
    return [folder / name, *sorted(folder.glob(f"*-{name}"))]


def whole_groups(results: Iterable[Result], methods: list[str]) -> list[Result]:
    """The runs on prompts that every method has run on, the last of each where there are two."""
    groups: dict[tuple, dict[str, Result]] = {}
    for result in results:
        groups.setdefault(result.key, {})[result.method] = result
    return [group[method] for group in groups.values() if set(methods) <= set(group) for method in methods]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a file of JSON lines; none if there is no file."""
    if not path.exists():
        return []
    entries = []
    for line in path.read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def read_bench(folder: Path) -> tuple[dict[str, Any], list[Result]]:
    """
    The settings and the runs of a bench, finished or not.

    Raises:
        `ValueError`: if the folder holds none.
    """
    check_folder(folder)
    results = [result for path in parts_of(folder, RUNS) for result in read_results(path)]
    if not results:
        raise ValueError(_NO_BENCH.format(folder))
    return _read_settings(folder), results


def samples_of(folder: Path) -> list[dict[str, Any]]:
    """The prompts of a bench that are written out."""
    return [entry for path in parts_of(folder, SAMPLES) for entry in read_lines(path)]


def check_folder(folder: Path) -> None:
    """
    Whether there is a bench to look at.

    Raises:
        `ValueError`: if there is none.
    """
    if not (folder / SETTINGS).exists() or not any(map(_holds_lines, parts_of(folder, RUNS))):
        raise ValueError(_NO_BENCH.format(folder))


def check_out(folder: Path, resume: bool, overwrite: bool) -> None:
    """
    Whether a bench may begin in a folder, or go on: none is lost unless that is asked for.

    Raises:
        `ValueError`: if not.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out must be a folder, but {folder} is a file: name another.")
    if resume and not (folder / SETTINGS).exists():
        raise ValueError(f"--resume: there is no bench in {folder}. Leave it out to begin one.")
    if not resume and not overwrite and any(map(_holds_lines, parts_of(folder, RUNS))):
        raise ValueError(
            f"--out {folder} holds the runs of an earlier bench: add --resume to go on with it, --overwrite to replace "
            "it, or name another --out."
        )


def _holds_lines(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


_NO_BENCH = "{} holds no results of `hf-ssr bench`: bench.json and runs.jsonl. Run it with --out."


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}. Run `hf-ssr bench` again.") from None
    missing = [name for name in REQUIRED if not isinstance(settings, dict) or name not in settings]
    if missing:
        raise ValueError(f"{path} has no `{missing[0]}`: it is not of this version. Run `hf-ssr bench` again.")
    return settings


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """
    Whether a bench may go on where it stopped.

    Raises:
        `ValueError`: if it began with other settings.
    """
    before = _read_settings(folder)
    way_out = "Ask for the same, or name another --out; --overwrite replaces what is there."
    for name in (name for name in settings if name not in ("began", "checksum", "commit")):
        if before.get(name) != settings[name]:
            raise ValueError(
                f"--resume: the bench in {folder} began with `{name}` {before.get(name)!r}, which is now "
                f"{settings[name]!r}. {way_out}"
            )
    if before.get("checksum") != settings["checksum"]:
        raise ValueError(f"--resume: the bench in {folder} began with other prompts of these tasks. {way_out}")
