"""The versions: our own, the commit it is of, and that of the oldest transformers that will do."""

import re
from pathlib import Path

__version__ = "0.1.0"
TRANSFORMERS_FLOOR = "5.24"  # older ones lack cache operations that roll a draft back


def check_transformers() -> None:
    """
    Looks at the version without importing transformers: an old one may break in ways that do not name it.

    Raises:
        `ImportError`: if the transformers that is installed is older than `TRANSFORMERS_FLOOR`.
    """
    from importlib import metadata  # takes longer than all else that `hf-ssr --help` needs

    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return  # none, which the import says itself, or one on the path without metadata
    if _numbers(installed) < _numbers(TRANSFORMERS_FLOOR):
        raise ImportError(
            f"hf_ssr needs transformers {TRANSFORMERS_FLOOR} or newer, but {installed} is installed: "
            f'pip install -U "transformers>={TRANSFORMERS_FLOOR}"'
        )


def commit() -> str | None:
    """
    Of the checkout that this package lies in, `"1a2b3c4"`, or `"1a2b3c4, dirty"` where the package was changed since;
    `None` where it is installed.
    """
    import subprocess

    package = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", package, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if git("rev-parse", "--show-prefix") != f"{package.name}/":  # somebody's repository with an environment in it
            return None
        return git("rev-parse", "--short", "HEAD") + ", dirty" * bool(git("status", "--porcelain", "."))
    except (OSError, subprocess.CalledProcessError):
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """`"5.24.0.dev0"` as `(5, 24)`: what a floor is compared with."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
