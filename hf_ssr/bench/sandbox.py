"""
Runs code that a model wrote in a process of its own, with limits.

A guard against accidents, not a jail: it stops endless loops, too much memory, files that grow, new processes and the
network, but the code runs as the same user, may read what that user may read, and code that is out to do harm can get
around it. For code you have reason to fear, use a container or a virtual machine.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, NamedTuple

CHILD = Path(__file__).parent / "sandbox_child.py"
SECONDS, MEMORY_MB = 10.0, 1024  # of a run, unless told otherwise
KEPT = 2_000  # bytes of stderr that are kept: the last


class Outcome(NamedTuple):
    """
    How a run ended.

    Args:
        status (`str`): `"passed"`, `"failed"` or `"timeout"`.
        stderr (`str`): its end.
        stdout (`str`): of `run_program`, whole.
    """

    status: str
    stderr: str
    stdout: str = ""


def run_python(candidate: str, tests: str, seconds: float = SECONDS, memory_mb: int = MEMORY_MB) -> Outcome:
    """
    Runs `candidate`, then `tests` in the same module, in an empty folder. Passed means that the tests ran to their
    end: the child proves it with a random token, so neither leaving early nor printing passes. New processes, signals
    and the network are refused.

    Args:
        candidate, tests (`str`): Python source; the tests raise where something is wrong.
        seconds (`float`): wall time, after which the run is stopped.
        memory_mb (`int`): address space of the process.
    """
    token = secrets.token_bytes(16)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        files = {"candidate.py": candidate, "tests.py": tests}
        for file, source in files.items():
            (folder / file).write_text(source, encoding="utf-8", errors="replace")
        (folder / "work").mkdir()
        reading, writing = os.pipe()
        left = {reading, writing}  # to be closed
        try:
            order = {"files": [str(folder / file) for file in files], "proof": writing}
            order |= {"program": None, "seconds": seconds, "memory_mb": memory_mb, "may_fork": True}
            with open(os.devnull, "wb") as nowhere:
                outcome = _run(order, token, nowhere, folder / "work", seconds)
            os.set_blocking(reading, False)  # a process that got away may still hold the other end
            os.close(writing)
            left.remove(writing)
            proof = b""
            with contextlib.suppress(BlockingIOError):
                proof = os.read(reading, 2 * len(token))
        finally:
            for end in left:
                os.close(end)
    return outcome._replace(status="failed") if outcome.status == "passed" and proof != token else outcome


def run_program(
    program: list[str],
    folder: Path,
    stdin: str = "",
    seconds: float = SECONDS,
    memory_mb: int = MEMORY_MB,
    may_fork: bool = False,
) -> Outcome:
    """
    Runs a program. Passed means that its exit status was 0.

    Args:
        program (`list[str]`): the path of the file to run, and its arguments.
        folder (`Path`): where it runs.
        stdin (`str`): what it reads.
        seconds (`float`): wall time, after which the run is stopped.
        memory_mb (`int`): address space of each process.
        may_fork (`bool`): whether it may start processes and threads. Root may in any case.
    """
    order = {"program": program, "seconds": seconds, "memory_mb": memory_mb, "may_fork": may_fork}
    with tempfile.TemporaryFile() as stdout:
        outcome = _run(order, stdin.encode(errors="replace"), stdout, folder, seconds)
        stdout.seek(0)
        return outcome._replace(stdout=stdout.read().decode(errors="replace"))


def _run(order: dict, stdin: bytes, stdout: IO[bytes], folder: Path, seconds: float) -> Outcome:
    home = str(folder)
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as stderr:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(CHILD), json.dumps(order)],
            stdin=given,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=environment,
            start_new_session=True,
            pass_fds=[order["proof"]] if "proof" in order else [],
        )
        try:
            status = "failed" if process.wait(seconds) else "passed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:  # also what it has left running, and at Ctrl-C
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status == "failed" and process.returncode == -signal.SIGXCPU:
            status = "timeout"
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - KEPT))
        return Outcome(status, stderr.read().decode(errors="replace"))
