"""
Runs in a process of its own, started by `sandbox.py`: limits first, then what is not trusted.

Imports the standard library only, as a script in Python's isolated mode.
"""

import contextlib
import ctypes
import json
import os
import resource
import sys
import traceback
import types

FILE_BYTES = 16 * 2**20  # of each file that is written
OPEN_FILES = 64
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000

REFUSED = {
    *("os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.posix_spawn", "os.spawn", "os.system"),
    *("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.gethostbyaddr", "socket.gethostbyname"),
    *("socket.sendmsg", "socket.sendto", "subprocess.Popen"),
}


def limit(seconds: float, memory_mb: int, may_fork: bool) -> None:
    """Sets the limits of this process and of all that it starts, as far as the system lets it."""
    limits = {
        resource.RLIMIT_AS: memory_mb * 2**20,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
    }
    if not may_fork:
        limits[resource.RLIMIT_NPROC] = 0  # counts threads too; root is exempt
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))
    with contextlib.suppress(AttributeError, OSError):  # a network of its own, with nothing in it; Linux only
        ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)


def refuse(event: str, arguments: tuple) -> None:
    """An audit hook against new processes, signals and the network."""
    if event in REFUSED:
        raise PermissionError(f"{event} is not allowed here")


def run_python(files: list[str], proof: int) -> None:
    """Runs the files one after the other in one module, and hands back what stdin holds when all have ended."""
    token = sys.stdin.buffer.read()
    sources = []
    for file in files:  # before any of them could change the next
        with open(file, encoding="utf-8") as lines:
            sources.append(lines.read())
    write, leave = os.write, os._exit
    module = sys.modules["candidate"] = types.ModuleType("candidate")
    sys.argv = ["candidate"]
    sys.addaudithook(refuse)
    try:
        for file, source in zip(files, sources, strict=True):
            exec(compile(source, file, "exec"), module.__dict__)
    except BaseException:  # SystemExit too: whoever leaves early has not passed
        traceback.print_exc()
        leave(1)
    write(proof, token)
    leave(0)


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    limit(order["seconds"], order["memory_mb"], order["may_fork"])
    if order["program"] is not None:
        os.execv(order["program"][0], order["program"])
    run_python(order["files"], order["proof"])
