"""What need not wait for torch does not: `import hf_ssr`, help, and errors in what was typed. Names are the same."""

import ast
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import prompt_ids

import hf_ssr
from hf_ssr.command.cli import BATCHES, PROMPT, REPLAY, SUBCOMMANDS, Command

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "rich", "accelerate", "matplotlib", "numpy", "huggingface_hub"}
WATCHED = f"""
import sys
try:
    CALL
finally:
    print(sorted({HEAVY} & sys.modules.keys()), file=sys.stderr)
"""


def python(code: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)


def run_command(*arguments: str, **kwargs) -> subprocess.CompletedProcess:
    """`hf-ssr` with these arguments; the last line of stderr says what of `HEAVY` was imported."""
    call = f"sys.argv = ['hf-ssr', *{list(arguments)}]; from hf_ssr.__main__ import main; sys.exit(main())"
    return python(WATCHED.replace("CALL", call), **kwargs)


@pytest.mark.parametrize(
    "command",
    [[], *([name] for name in SUBCOMMANDS), ["bench", "--replay", __file__], ["bench", "--batch-size", "4"]],
    ids=str,
)
def test_help_imports_nothing_heavy(command):
    done = run_command(*command, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: hf-ssr")
    assert done.stderr.splitlines() == ["[]"]


def test_the_version_imports_nothing_heavy():
    done = run_command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"hf-ssr {hf_ssr.__version__}\n", "[]\n")


ERRORS = [
    [],
    ["hello", "--threads", "0"],
    ["hello", "--dtype", "foo"],
    ["hello", "--top-p", "7"],
    ["hello", "--temperature", "1"],
    ["hello", "--draft-budgets", "4", "--draft-interval", "4"],
    ["hello", "--prediction", "nowhere"],
    [" "],
    ["chat", "--seed", "-1"],
    ["chat", "--top-k", "5"],
    ["demo", "--seed", "x"],
    ["bench", "--limit", "0"],
    ["bench", "--tasks", "humaneval"],
    ["bench", "--resume", "--out", "nowhere"],
    ["bench", "--replay", "nowhere"],
    ["bench", "--batch-size", "4,1"],
    ["bench", "--batch-size", "4", "--limit", "3"],
    ["report", "nowhere"],
    ["whatif", "nowhere"],
    ["probe", "--widths", "4,1"],
    ["probe", "--int8", "--device", "cuda"],
    ["export"],
    ["export", "folder", "--card", "none"],
]


@pytest.mark.parametrize("arguments", ERRORS, ids=lambda arguments: " ".join(arguments) or "nothing")
def test_errors_in_arguments_import_nothing_heavy(arguments, tmp_path):
    done = run_command(*arguments, cwd=tmp_path)
    message, imported = done.stderr.splitlines()
    assert done.returncode == 2 and message.startswith("hf-ssr: ") and imported == "[]"


def test_what_the_small_reasoner_cannot_do_is_said_at_once():
    done = run_command("Write a Python class Book with title and author.")
    assert done.returncode == 2 and "One to copy:" in done.stderr and done.stderr.splitlines()[-1] == "[]"


def test_the_table_names_what_there_is():
    for command in (PROMPT, REPLAY, BATCHES, *SUBCOMMANDS.values()):
        assert isinstance(command, Command)
        module, _, function = command.run.partition(":")
        tree = ast.parse((ROOT / "hf_ssr" / f"{module.replace('.', '/')}.py").read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_import_alone_imports_nothing_heavy():
    done = python(WATCHED.replace("CALL", "import hf_ssr; hf_ssr.__version__; dir(hf_ssr)"))
    assert done.stderr.splitlines() == ["[]"]


def test_public_names():
    """What editors are told is what is found, and `dir` shows it."""
    tree = ast.parse((ROOT / "hf_ssr" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {alias.name: node.module for node in block.body for alias in node.names}
    assert told == hf_ssr._MODULES and {*told, "__version__"} == set(hf_ssr.__all__) <= set(dir(hf_ssr))
    for name, module in told.items():
        assert getattr(hf_ssr, name) is getattr(sys.modules[f"hf_ssr.{module}"], name)
    with pytest.raises(AttributeError, match="'hf_ssr' has no attribute 'nothing'"):
        hf_ssr.nothing  # noqa: B018
    assert not hasattr(hf_ssr, "__wrapped__")


@pytest.mark.parametrize("imported", ["import hf_ssr.generate", ""])
def test_modules_and_the_function_of_the_same_name(imported):
    """Whatever was imported first."""
    code = f"""
{imported}
import hf_ssr
assert hf_ssr.config.SSRConfig is hf_ssr.SSRConfig
assert hf_ssr.bench and hf_ssr.command
from hf_ssr import generate
import hf_ssr.generate
assert callable(hf_ssr.generate) and hf_ssr.generate is generate is sys.modules["hf_ssr.generate"].generate
"""
    done = python(f"import sys\n{code}")
    assert done.returncode == 0, done.stderr


def test_whoever_has_a_config_has_the_mode():
    """Also in a process that has got it from another one, and has imported no more than that takes."""
    pickled = pickle.dumps(hf_ssr.SSRConfig(thinking_end=[9], max_new_tokens=5, return_dict_in_generate=True))
    code = f"""
import pickle, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from tiny_models import build, prompt_ids
assert not any(name.startswith("hf_ssr") for name in sys.modules)
config = pickle.loads({pickled!r})
output = build("qwen3").generate(prompt_ids(), generation_config=config)
print(type(output).__name__, output.sequences.shape[1])
"""
    done = python(code)
    assert done.stdout.split() == ["SSROutput", str(prompt_ids().shape[1] + 5)], done.stderr


def interrupted(process: subprocess.Popen) -> tuple[int, str]:
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    return process.returncode, error


STALLED = """
import sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            print("there", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Finder())
sys.argv = ["hf-ssr", "demo"]
from hf_ssr.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "name", ["argparse", "hf_ssr.command.cli", "hf_ssr.bench.demo", "torch", "transformers.generation.utils"]
)
def test_ctrl_c_while_it_starts(name):
    """In an import, from the command's own first one on: one line, no traceback."""
    process = subprocess.Popen(
        [sys.executable, "-c", STALLED.format(name=name)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "there\n"
    assert interrupted(process) == (130, "\nhf-ssr: interrupted\n")


@pytest.mark.parametrize("seconds", [1.0, 2.5, 4.0, 6.0])
@pytest.mark.slow
def test_ctrl_c_at_any_moment(seconds, tmp_path):
    """Loading, generating, or at the end."""
    call = ["-m", "hf_ssr", "probe", "--steps", "400"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *call], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    time.sleep(seconds)
    status, error = interrupted(process)
    assert "Traceback" not in error and status in (0, 130)
    assert error.count("hf-ssr: interrupted") == (status == 130)


def test_an_ignored_interrupt_stays_ignored():
    """As of what a shell runs in the background."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from hf_ssr.__main__ import main; import sys; "
    code += "sys.argv = ['hf-ssr', '--version']\ntry: main()\nexcept SystemExit: pass\n"
    code += "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    assert python(code).returncode == 0
