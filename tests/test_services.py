"""`transformers serve` and `transformers chat` with model folders, tried with the OpenAI client on loopback."""

import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hf_ssr
from hf_ssr.bench.tasks import check
from hf_ssr.command.exporting import export

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from serving import COMMAND, SAMPLES, running, settings  # noqa: E402  it imports openai

pytestmark = pytest.mark.slow  # the server takes a while to start
ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs/services.md").read_text()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = tmp_path_factory.mktemp("folders")
    files = [path for path in (ROOT / "model_cards/tiny-reasoner").iterdir() if path.suffix not in (".py", ".md")]
    for name, own in {
        "plain": {},
        "ssr": {"max_overhead": "off"},  # what is drafted does not depend on the clock
        "settings": {"max_overhead": "off", "thinking_budget": 40},
    }.items():
        (folders / name).mkdir()
        for path in files:
            shutil.copy(path, folders / name)
        config = folders / name / "generation_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **own}))
        if name != "plain":
            export(folders / name)
    return folders


@pytest.fixture(scope="module")
def service(folders, tmp_path_factory):
    with running(folders, tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.mark.parametrize("task", SAMPLES)
@pytest.mark.parametrize("way", ["ask", "stream"])
def test_the_plain_folders_text_in_fewer_forwards(service, way, task):
    plain, ssr = getattr(service, way)("plain", task), getattr(service, way)("ssr", task)
    assert ssr.says_what(plain) and ssr.finish == "stop"
    assert check(SAMPLES[task], ssr.answer.strip())
    assert len(plain.forwards) == plain.tokens and max(plain.forwards[1:]) == 1
    assert len(ssr.forwards) < 0.65 * ssr.tokens and max(ssr.forwards[1:]) > 4


@pytest.mark.parametrize("way", ["ask", "stream"])
@pytest.mark.parametrize("limit", [1, 5, 40])
def test_max_tokens_inside_the_thought(service, way, limit):
    plain, ssr = (getattr(service, way)(name, max_tokens=limit) for name in ("plain", "ssr"))
    assert ssr.says_what(plain)
    assert (ssr.answer, ssr.finish, ssr.tokens) == ("", "length", limit)
    assert ssr.thought or limit == 1


def test_stop_strings(service):
    plain, ssr = (service.ask(name, stop=["self."]) for name in ("plain", "ssr"))
    assert ssr.says_what(plain) and ssr.answer.count("self.") == 1 and ssr.tokens < service.ask("ssr").tokens


def test_a_seed(service):
    def sampled(name):
        return service.stream(name, seed=3, temperature=2.0, **settings(do_sample=True))

    plain, ssr = sampled("plain"), sampled("ssr")
    assert ssr.says_what(plain) and ssr.thought != service.stream("plain").thought
    assert len(ssr.forwards) < len(plain.forwards)


def test_two_requests_at_once(service):
    alone = {task: service.stream("plain", task) for task in SAMPLES}
    with ThreadPoolExecutor(2) as pool:
        for task, reply in zip(SAMPLES, pool.map(lambda task: service.stream("ssr", task), SAMPLES), strict=True):
            assert reply.says_what(alone[task])


def test_clients_that_go(service):
    """In the thought, in the answer, and while they wait for another: their text ends there, and nothing is left."""
    expected = service.stream("ssr")
    threads = service.threads
    for chunks in (3, 60, 200):
        before = len(service.forwards)
        stream = service.client.chat.completions.create(**service.call("ssr", stream=True))
        for _ in range(chunks):
            next(stream)
        stream.close()
        assert service.forwards_when_idle() - before < len(expected.forwards) * (0.5 if chunks == 3 else 1)
        assert service.stream("ssr").says_what(expected)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(service.stream, "ssr")
        waiting = service.client.chat.completions.create(**service.call("ssr", stream=True))
        waiting.close()
        assert first.result().says_what(expected)
    assert service.stream("ssr").says_what(expected)
    assert service.threads <= threads + 1


@pytest.mark.parametrize("own, message", [({"draft_budgets": [-1]}, "`draft_budgets`"), ({"num_beams": 2}, "streamer")])
def test_a_refused_stream_is_an_error(service, own, message):
    """It is not sent as a text of no tokens that is complete."""
    with pytest.raises(openai.APIError) as error:
        service.stream("ssr", **settings(**own))
    assert message in str(error.value.body)
    assert service.stream("ssr").says_what(service.stream("plain"))


def test_settings(service):
    """Of the folder's `generation_config.json`, also where a request brings a config; the request's own win."""
    whole, short = service.ask("ssr"), service.ask("settings")
    assert short.tokens < whole.tokens and whole.thought.startswith(short.thought)
    assert service.ask("settings", **settings()).says_what(short)
    longer = service.ask("settings", **settings(thinking_budget=60))
    assert len(short.thought) < len(longer.thought) < len(whole.thought)
    drafted = service.ask("ssr", **settings(draft_budgets=[], sources=[]))
    assert drafted.says_what(whole) and len(drafted.forwards) == drafted.tokens


def test_other_endpoints(service):
    replies = []
    for name in ("plain", "ssr"):
        before = len(service.forwards)
        call = {"model": service.model(name), "input": SAMPLES["class"].prompt}
        response = service.client.responses.create(**call, stream=False)
        forwards = len(service.forwards) - before
        events = list(service.client.responses.create(**call, stream=True))
        assert events[-1].type == "response.completed"
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        prompt = f"<|im_start|>user\n{SAMPLES['class'].prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n"
        completion = service.client.completions.create(model=service.model(name), prompt=prompt, max_tokens=600)
        replies.append((response.output_text, text, completion.choices[0].text))
        assert (forwards < 0.65 * response.usage.output_tokens) == (name == "ssr")
    assert replies[0] == replies[1] and all("class Robot" in text for text in replies[0])


def test_chat(service):
    """The command of `docs/services.md`, its questions from a pipe. Offline mode would refuse loopback too."""
    question = "Write class Robot with rate, city."
    call = {"messages": [{"role": "user", "content": question}]}
    expected = service.client.chat.completions.create(**service.call("plain") | call)
    before = len(service.forwards)
    result = subprocess.run(
        [COMMAND, "chat", service.model("ssr"), f"{service.url}/v1", "do_sample=False", "max_new_tokens=1024"],
        input=f"{question}\n!exit\n",
        env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    tokens = expected.usage.completion_tokens
    assert "class Robot" in result.stdout and f"{tokens} tokens in" in result.stdout
    assert len(service.forwards) - before < tokens


def test_a_service_of_your_own(folders, monkeypatch):
    """The code of `docs/services.md`: the text, "answer now", a reader that goes, an error."""
    monkeypatch.chdir(folders)
    (folders / "model_folder").symlink_to("plain")
    code = DOCUMENT.split("<!-- a service of your own -->\n```python\n")[1].split("```")[0]
    names = {}
    exec(code.replace("max_new_tokens=4096", "max_new_tokens=1024").split("\n\nfor piece in")[0], names)
    messages = [{"role": "user", "content": SAMPLES["class"].prompt}]
    whole = "".join(names["answer"](messages, hf_ssr.StopThinking()))
    assert check(SAMPLES["class"], whole.split("</think>")[1].removesuffix("<|im_end|>").strip())
    stop, pieces = hf_ssr.StopThinking(), []
    for piece in names["answer"](messages, stop):
        pieces.append(piece)
        stop.set()
    thought, answer = "".join(pieces).split("</think>")
    assert len(thought) < len(whole.split("</think>")[0]) and "class Robot" in answer
    forwards = []
    names["model"].register_forward_hook(lambda *_: forwards.append(1))
    reader = names["answer"](messages, hf_ssr.StopThinking())
    next(reader)
    reader.close()
    assert len(forwards) < 60
    names["config"].prediction_ids = [10**6]
    with pytest.raises(ValueError, match="prediction_ids"):
        "".join(names["answer"](messages, hf_ssr.StopThinking()))


def test_the_documented_commands():
    """Are those that are tried here."""
    assert "transformers serve model_folder --trust-remote-code --host 127.0.0.1 --port 8000\n" in DOCUMENT
    assert "transformers chat model_folder http://127.0.0.1:8000/v1 do_sample=False max_new_tokens=4096\n" in DOCUMENT
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    assert len(blocks) == 3 and all(compile(block, "docs/services.md", "exec") for block in blocks)
