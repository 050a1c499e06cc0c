"""The sandbox that answers are run in."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_ssr.bench.sandbox import run_program, run_python

WRITES_TO_ALL = """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b"passed" * 9)
    except OSError:
        pass
os._exit(0)
"""
FORKS = """
import os
made = 0
for _ in range(20):
    try:
        if os.fork() == 0:
            os._exit(0)
        made += 1
    except PermissionError:
        pass
"""
THREADS = "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()"
STUBBORN = "while True:\n    try: print('x' * 10**6)\n    except BaseException: pass"


def test_it_passes_and_fails():
    assert run_python("x = 1", "assert x == 1").status == "passed"
    failed = run_python("x = 1", "assert x == 2, 'x is not two'")
    assert failed.status == "failed" and failed.stderr.strip().endswith("AssertionError: x is not two")
    assert run_python("x = ", "").status == run_python("x = '\0'", "").status == "failed"
    assert run_python("x = 'ä\ud800'", "assert x == 'ä?'").status == "passed"


@pytest.mark.parametrize(
    "candidate",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def f():\n    import os; os._exit(0)",
        "def f(): raise SystemExit(0)",
        "print('passed')\ndef f(): raise KeyboardInterrupt",
        "import atexit, os; atexit.register(lambda: os._exit(0))",
        "import sys; sys.stdin.read(); print('passed', file=sys.stderr)",
        WRITES_TO_ALL,
        "'''",
        "try:",
    ],
)
def test_to_leave_early_is_not_to_pass(candidate):
    assert run_python(candidate, "assert f() == 1").status == "failed"


def test_why_it_left_early_is_said():
    assert run_python("raise SystemExit(3)", "").stderr.strip().endswith("SystemExit: 3")


def test_endless_loops_end():
    begin = time.monotonic()
    for candidate in ("while True: pass", "import time; time.sleep(60)", STUBBORN):
        assert run_python(candidate, "", seconds=1.0).status == "timeout"
    assert time.monotonic() - begin < 30


def test_memory_is_limited():
    assert "MemoryError" in run_python("x = bytearray(2 * 10**9)", "").stderr
    assert run_python("x = bytearray(2 * 10**8)", "").status == "passed"


def test_no_processes():
    assert run_python(FORKS, "assert made == 0").status == "passed"
    refused = "import subprocess\ntry: subprocess.run(['true'])\nexcept PermissionError: ok = True"
    assert run_python(refused, "assert ok").status == "passed"
    parent = "import os\ntry: os.kill(os.getppid(), 0)\nexcept PermissionError: ok = True"
    assert run_python(parent, "assert ok").status == "passed"
    assert run_python(THREADS, "assert not t.is_alive()").status == "passed"


def test_what_a_program_leaves_running_is_stopped(tmp_path):
    leaves = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid, flush=True)"
    for rest, status in {"": "passed", "; import time; time.sleep(60)": "timeout"}.items():
        outcome = run_program([sys.executable, "-c", leaves + rest], tmp_path, seconds=5.0, may_fork=True)
        assert outcome.status == status
        until = time.monotonic() + 10
        while is_running(int(outcome.stdout)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_running(int(outcome.stdout))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_its_folder_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writes = "import os\nassert os.listdir('.') == []\nopen('here', 'w').write('x')\nwhere = os.getcwd()"
    assert run_python(writes, "assert open('here').read() == 'x'").status == "passed"
    assert not list(tmp_path.iterdir())
    told = run_python(writes, "raise ValueError(where)").stderr.strip().split("ValueError: ")[1]
    assert told != str(tmp_path) and not Path(told).exists()
    assert run_python("open('large', 'wb').write(bytes(10**8))", "").status == "failed"


def test_nothing_of_ours_is_seen(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    names = {"PATH", "HOME", "TMPDIR", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LC_CTYPE"}
    assert run_python("import os", f"assert set(os.environ) <= {names}, set(os.environ)").status == "passed"


def test_no_network():
    server = "import socket\ns = socket.socket()\n"
    for call in ("s.bind(('127.0.0.1', 0))", "s.connect(('127.0.0.1', 9))", "socket.getaddrinfo('localhost', 80)"):
        assert "not allowed here" in run_python(f"{server}{call}", "").stderr
    opened = "import urllib.request\ntry: urllib.request.urlopen('http://127.0.0.1')\nexcept OSError as e: why = str(e)"
    assert run_python(opened, "assert 'not allowed' in why").status == "passed"
    assert run_python("import asyncio\nasync def f(): return 1", "assert asyncio.run(f()) == 1").status == "passed"


def test_programs_have_no_network(tmp_path):
    own = shutil.which("unshare")
    if own is None or subprocess.run([own, "-Un", "true"], capture_output=True).returncode:
        pytest.skip("the system gives no process a network of its own")
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket; socket.create_connection({server.getsockname()!r}, timeout=5)"
        subprocess.run([sys.executable, "-c", connect], check=True)
        assert run_program([sys.executable, "-c", connect], tmp_path).status == "failed"


def test_output_is_cut():
    outcome = run_python("import sys\nsys.stderr.write('x' * 10**6 + 'end')\n", "")
    assert outcome.status == "passed" and len(outcome.stderr) == 2_000 and outcome.stderr.endswith("end")


def test_programs(tmp_path):
    echo = [sys.executable, "-c", "print(input())"]
    assert run_program(echo, tmp_path, "hello\n")[::2] == ("passed", "hello\n")
    assert run_program([sys.executable, "-c", "raise SystemExit(3)"], tmp_path).status == "failed"
    assert run_program([sys.executable, "-c", "while True: pass"], tmp_path, seconds=1.0).status == "timeout"
    assert run_program([str(tmp_path / "none")], tmp_path).status == "failed"
    endless = run_program([sys.executable, "-c", "while True: print('x' * 10**6)"], tmp_path)
    assert endless.status == "failed" and len(endless.stdout) <= 2**24
