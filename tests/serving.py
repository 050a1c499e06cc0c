"""A `transformers serve` in a process of its own, and what its clients are told."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai

from hf_ssr.bench.tasks import HELD_OUT, draw

COMMAND = str(Path(sys.executable).parent / "transformers")
SAMPLES = {task: draw(task, HELD_OUT) for task in ("class", "ledger")}
# In the server's interpreter: a line in a file for each forward of a model.
COUNT_FORWARDS = """
import os
import torch
log = open(os.environ["FORWARD_LOG"], "a", buffering=1)
def note(module, args, kwargs, output):
    if type(module).__name__.endswith("ForCausalLM"):
        print(kwargs.get("input_ids", args[0] if args else None).shape[1], file=log)
torch.nn.modules.module.register_module_forward_hook(note, with_kwargs=True)
"""


@dataclass
class Reply:
    """What a client was told, and the tokens in each forward that it took."""

    thought: str
    answer: str
    finish: str | None
    tokens: int
    forwards: list[int]

    def says_what(self, other: "Reply") -> bool:
        return (self.thought, self.answer, self.finish, self.tokens) == (
            other.thought,
            other.answer,
            other.finish,
            other.tokens,
        )


@dataclass
class Service:
    """A running server, and the folders that it may be asked for: `plain`, `ssr`, `settings`."""

    folders: Path
    log: Path
    url: str
    pid: int

    @property
    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0)

    @property
    def forwards(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()]

    @property
    def threads(self) -> int:
        return int(re.search(r"Threads:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())[1])

    def forwards_when_idle(self) -> int:
        """How many there were once none has followed for a second."""
        count = -1
        while count < (count := len(self.forwards)):
            time.sleep(1)
        return count

    def model(self, name: str) -> str:
        return str(self.folders / name)

    def call(self, name: str, task: str = "class", **kwargs):
        """Keywords of a request."""
        return {"model": self.model(name), "messages": [{"role": "user", "content": SAMPLES[task].prompt}], **kwargs}

    def ask(self, name: str, task: str = "class", **kwargs) -> Reply:
        before = len(self.forwards)
        reply = self.client.chat.completions.create(**self.call(name, task, **kwargs))
        (choice,) = reply.choices
        thought = getattr(choice.message, "reasoning_content", None) or ""
        forwards = self.forwards[before:]
        return Reply(thought, choice.message.content, choice.finish_reason, reply.usage.completion_tokens, forwards)

    def stream(self, name: str, task: str = "class", **kwargs) -> Reply:
        before, reply = len(self.forwards), Reply("", "", None, 0, [])
        for chunk in self.client.chat.completions.create(**self.call(name, task, stream=True, **kwargs)):
            (choice,) = chunk.choices
            reply.thought += getattr(choice.delta, "reasoning_content", None) or ""
            reply.answer += choice.delta.content or ""
            reply.finish = choice.finish_reason
            if chunk.usage is not None:
                reply.tokens = chunk.usage.completion_tokens
        reply.forwards = self.forwards[before:]
        return reply


def settings(**kwargs) -> dict:
    return {"extra_body": {"generation_config": json.dumps({"max_new_tokens": 1024, **kwargs})}}


@contextmanager
def running(folders: Path, work: Path):
    """The command of `docs/services.md`, in a process of its own that ends with the block: a [`Service`]."""
    (work / "sitecustomize.py").write_text(COUNT_FORWARDS)
    (work / "forwards").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "PYTHONPATH": str(work),
        "FORWARD_LOG": str(work / "forwards"),
        "HF_MODULES_CACHE": str(work / "modules"),
        "OMP_NUM_THREADS": "1",
    }
    call = [COMMAND, "serve", "--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1", "--port", port]
    url = f"http://127.0.0.1:{port}"
    with (work / "output").open("w") as output:
        process = subprocess.Popen(call, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=work)
    try:
        wait_for(lambda: is_up(url, process), 240, lambda: (work / "output").read_text()[-2000:])
        yield Service(folders, work / "forwards", url, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_up(url: str, process) -> bool:
    assert process.poll() is None, "the server has ended"
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


def wait_for(condition, seconds: float, report=lambda: "") -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, report()
        time.sleep(0.2)
