"""`hf-ssr chat`: a cache from turn to turn, earlier thoughts, commands, and Ctrl-C."""

import copy
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import types

import pytest
import torch
from conftest import build_once
from transformers import DynamicCache

from hf_ssr import SSRConfig
from hf_ssr.command.chat import messages
from hf_ssr.command.cli import main
from hf_ssr.command.conversation import Conversation
from hf_ssr.command.interrupts import Interrupts
from hf_ssr.command.session import HELP, TO_COPY, Session
from hf_ssr.command.streaming import ThoughtAndAnswer
from hf_ssr.command.turn_cache import TurnCache

DROPS_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)
KEEPS_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% if m.role != 'assistant' %}.{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
TURNS = ("what is a class?", "and now?", "say more of it", "why", "so be it")


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = DROPS_THOUGHTS
    return tokenizer


def conversation_of(model, tokenizer, **settings) -> Conversation:
    own = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": [], "thinking_budget": 14, "draft_budgets": [5]}
    return Conversation(model, tokenizer, SSRConfig(thinking_end="</think>", **{**own, **settings}))


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5", "lfm2", "mamba2"])
def test_turns_are_those_of_a_chat_that_is_read_anew(architecture, chat_tokenizer):
    """In float64, over layers of every kind; from the third turn on at the latest only what is new is read."""
    model = build_once(architecture)
    chat, anew = (conversation_of(model, chat_tokenizer) for _ in range(2))
    drafted = 0
    for turn, text in enumerate(TURNS):
        reply = chat.ask(text)
        anew._cache.clear()
        expected = anew.ask(text)
        assert (reply.thought, reply.answer) == (expected.thought, expected.answer)
        assert reply.answer and expected.cached_tokens == 0
        drafted += reply.metrics.draft_tokens
        assert chat.messages == anew.messages and reply.prompt_tokens == expected.prompt_tokens
        if architecture == "mamba2":  # generate of transformers does not see how long a cache of states alone is
            assert reply.cached_tokens == 0
        elif turn >= (
            1 if architecture == "qwen3" else 2
        ):  # the last message and its answer are new to the text without thoughts
            new = len(chat._ids(chat.messages)) - len(chat._ids(chat.messages[:-2], is_turn=False))
            assert reply.cached_tokens >= reply.prompt_tokens - new - len(chat._ids(chat.messages[-4:-2]))
            assert reply.cached_tokens > 0
    assert drafted > 0
    for _ in range(3):  # each goes back to the same place
        assert chat.undo() == TURNS[-1] and len(chat.messages) == 2 * len(TURNS) - 2
        again = chat.ask(TURNS[-1])
        assert (again.answer, again.cached_tokens > 0) == (reply.answer, architecture != "mamba2")
    for _ in range(3):  # to before the place
        chat.undo()
    anew.messages = list(chat.messages)
    anew._cache.clear()
    assert chat.ask("something else").answer == anew.ask("something else").answer


def test_a_template_that_keeps_thoughts(chat_tokenizer):
    """Then the next turn shares the thought too."""
    chat_tokenizer.chat_template = KEEPS_THOUGHTS
    model = build_once("qwen3_5")
    chat = conversation_of(model, chat_tokenizer, forced_close="</think>")
    first = next(reply for text in ("one", "two", "three", "four") if (reply := chat.ask(text)).thought)
    chat.messages = chat.messages[-2:]
    second = chat.ask("two")
    assert f"<think>{first.thought}</think>{first.answer}" in chat_tokenizer.decode(chat._ids(chat.messages))
    anew = conversation_of(model, chat_tokenizer, forced_close="</think>")
    anew.messages = chat.messages[:2]
    assert anew.ask("two").answer == second.answer


def test_copies_of_another_text_are_not_gone_back_to():
    """States tell nothing of the text that they are of."""
    model, kept = build_once("qwen3_5"), TurnCache()

    def read(ids: list[int]) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([ids]), cache=cache)
        return cache

    first, other = list(range(10, 20)), list(range(50, 65))
    kept.keep(read(first), first)
    assert kept.take([*first[:8], 99, 98]) == (None, 0) and kept.needs_copies
    kept.remember(read(first), 10)
    kept.keep(read([*first, 5]), [*first, 5])
    assert kept.take([*first, 6, 7])[1] == 10
    kept.keep(read([*first, 5]), [*first, 5])
    assert kept.take(other) == (None, 0)
    kept.keep(read(other), other)
    assert kept.take([*other[:12], 99]) == (None, 0)


def test_what_the_chat_does_not_take(chat_tokenizer, model):
    chat = conversation_of(model, chat_tokenizer)
    chat.restart("be brief")
    assert chat.messages == [{"role": "system", "content": "be brief"}]
    assert chat.undo() is None
    chat.config = SSRConfig(thinking_end="~~~~~", max_new_tokens=5, draft_budgets=[], eos_token_id=[])
    assert chat.ask("the thought is never over").answer == "" and len(chat.messages) == 1
    positions = model.config.max_position_embeddings
    chat.restart()
    with pytest.raises(ValueError, match=f"the model reads at most {positions}"):
        chat.ask("a " * positions)
    assert chat.messages == []
    chat_tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        conversation_of(model, chat_tokenizer)


def test_the_end_of_the_positions(chat_tokenizer, model, monkeypatch):
    chat = conversation_of(model, chat_tokenizer, max_new_tokens=None)
    prompt = len(chat._ids([{"role": "user", "content": "go on"}]))
    monkeypatch.setattr(model.config, "max_position_embeddings", prompt + 37)
    assert chat._config_for(prompt).max_new_tokens == 37
    chat.config.max_new_tokens = 20
    assert chat._config_for(prompt).max_new_tokens == 20


def press(monkeypatch, *places: int) -> None:
    """Ctrl-C when the stream has so many new tokens."""
    seen, put = [], ThoughtAndAnswer.put

    def counting(self, value):
        put(self, value)
        seen.extend(value.flatten().tolist() if seen else ["prompt"])
        for _ in range(places.count(len(seen) - 1)):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ThoughtAndAnswer, "put", counting)


@pytest.mark.parametrize(
    ("places", "thinking_tokens", "answer_tokens"),
    [((), 22, 38), ((6,), 7, 53), ((6, 12), 7, 6), ((30,), 22, 9), ((6, 6), 7, 0)],
    ids=["not", "once", "twice", "in the answer", "twice in the thought"],
)
def test_ctrl_c(chat_tokenizer, model, monkeypatch, capsys, places, thinking_tokens, answer_tokens):
    chat = conversation_of(model, chat_tokenizer, thinking_budget=21, forced_close="</think>", draft_budgets=[3])
    handler = signal.getsignal(signal.SIGINT)
    press(monkeypatch, *places)
    session = Session(chat, {})
    session.ask("hello")
    assert signal.getsignal(signal.SIGINT) is handler
    metrics = session.last.metrics
    assert (metrics.thinking_tokens, metrics.answer_tokens) == (thinking_tokens, answer_tokens)
    assert len(chat.messages) == (2 if answer_tokens else 0)
    monkeypatch.undo()
    session.ask("and the next")  # the chat goes on
    assert session.last.metrics.answer_tokens == 38
    error = capsys.readouterr().err
    assert ("stopped; what there is" in error) == (answer_tokens in (6, 9))
    assert ("not part of the chat" in error) == (answer_tokens == 0)


@pytest.mark.parametrize("places", [(30, 30), (30, 30, 30), (6, 12, 12)])
def test_ctrl_c_twice_in_an_answer_keeps_what_there_is(chat_tokenizer, model, monkeypatch, capsys, places):
    """It is the beginning of the answer that would have come, and the chat goes on from it."""
    settings = {"thinking_budget": 21, "forced_close": "</think>", "draft_budgets": [3]}
    press(monkeypatch, *places[:1] * (places[0] == 6))
    whole = Session(conversation_of(model, chat_tokenizer, **settings), {})
    whole.ask("hello")
    monkeypatch.undo()
    press(monkeypatch, *places)
    session = Session(conversation_of(model, chat_tokenizer, **settings), {})
    capsys.readouterr()
    session.ask("hello")
    (_, message), (_, expected) = session.conversation.messages, whole.conversation.messages
    assert expected["content"].startswith(message["content"]) and 0 < len(message["content"]) < len(expected["content"])
    assert message["reasoning_content"] == expected["reasoning_content"]
    written = capsys.readouterr()
    assert written.out.strip() == message["content"] and written.out.endswith("\n")
    assert "stopped; what there is of the answer is part of the chat" in written.err
    monkeypatch.undo()
    session.ask("and the next")
    assert len(session.conversation.messages) == 4 and session.last.cached_tokens == 0


@pytest.mark.parametrize("late", ["_texts", "_tell"])
def test_ctrl_c_when_the_answer_is_over_changes_nothing(chat_tokenizer, model, monkeypatch, late):
    """Who presses it twice is a moment late with the second."""
    chat = conversation_of(model, chat_tokenizer, thinking_budget=21)
    owner = Conversation if late == "_texts" else Session
    real = getattr(owner, late)

    def pressing(*args):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(owner, late, pressing)
    press(monkeypatch, 30)
    session = Session(chat, {})
    session.ask("hello")
    assert len(chat.messages) == 2 and session.last.metrics is not None


def test_ctrl_c_before_the_model_writes(chat_tokenizer, model, monkeypatch, capsys):
    chat = conversation_of(model, chat_tokenizer)
    take = TurnCache.take

    def pressing(*args):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return take(*args)

    monkeypatch.setattr(TurnCache, "take", pressing)
    session = Session(chat, {})
    session.ask("hello")
    assert chat.messages == [] and "stopped; the message is not part of the chat" in capsys.readouterr().err
    monkeypatch.undo()
    session.ask("hello")
    assert len(chat.messages) == 2


def test_a_third_ctrl_c_in_a_thought_leaves_no_answer(chat_tokenizer, model, monkeypatch, capsys):
    chat = conversation_of(model, chat_tokenizer)
    press(monkeypatch, 6, 6, 6)
    session = Session(chat, {})
    session.ask("hello")
    assert session.last is None and chat.messages == []
    assert "no answer, so the message is not part of the chat" in capsys.readouterr().err
    monkeypatch.undo()
    session.ask("hello")
    assert session.last.cached_tokens == 0 and len(chat.messages) == 2


def test_interrupts_without_a_thought():
    interrupts = Interrupts(lambda: False)
    interrupts.interrupt()
    assert interrupts.halt.is_set and not interrupts.stop.is_set
    with pytest.raises(KeyboardInterrupt):
        interrupts.interrupt()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    build_once("qwen3").save_pretrained(folder)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = DROPS_THOUGHTS
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    return folder


def chat(folder, monkeypatch, capsys, lines: list[str], *arguments: str) -> types.SimpleNamespace:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    options = ("--model", str(folder), "--thinking-budget", "14", "--max-new-tokens", "60")
    assert main(["chat", *options, *arguments]) == 0
    return types.SimpleNamespace(**capsys.readouterr()._asdict())


def test_commands(folder, monkeypatch, capsys, tmp_path):
    file, broken = tmp_path / "chat.json", tmp_path / "broken.json"
    broken.write_text('{"role": "user"}')
    lines = [
        "/help", "hello", "/stats", "/retry", "what is\\", "two lines", f"/save {file}", "/undo", "/set", "/set nope 1",
        "/set draft_budgets -1", "/set draft_budgets [4, 9]", "/set draft_budgets", "//help", "/thinking off",
        "/thinking maybe", "fast", "/template reasoning_effort high", "/template", "/nope", f"/load {broken}",
        f"/load {tmp_path}/none", "/load", "/save", f"/load {file}", "/new be brief", "/undo", "/retry",
        "/exit", "not read",
    ]  # fmt: skip
    seen = chat(folder, monkeypatch, capsys, lines, "--system", "be kind", "--draft-budgets", "4")
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[0]["content"] == "be kind" and saved[3]["content"] == "what is\ntwo lines"
    assert HELP in seen.err
    for text in (
        "acceptance rate",
        "5 messages written",
        "taken back: what is",
        "draft_budgets = [4]",
        "there is no setting 'nope': it must be one of draft_budgets,",
        "`draft_budgets` must be 'auto' or a list",
        "draft_budgets = [4, 9] from the next message on",
        "there is no command /nope: /help lists them",
        "/thinking must be on or off, but is 'maybe'.",
        "{'enable_thinking': False, 'reasoning_effort': 'high'}",
        "must be a list of messages",
        "No such file",
        "/load needs a file",
        "/save needs a file",
        "5 messages\n",
        "a new chat",
        "there is nothing to take back",
        "there is no message to ask again",
        "[0 tokens of thought and 60 of answer",
    ):
        assert text in seen.err, text
    assert "not read" not in seen.err
    # hello, its retry, two lines, //help and fast; the thought is not in the answer
    assert seen.err.count("tokens of the chat were in the cache]") == 5


def test_nothing_ends_the_chat(folder, monkeypatch, capsys):
    """Neither a setting of the wrong type, nor an error of the model or of the template."""
    lines = ["hello", "/set temperature hot", "/set max_new_tokens many", "/set do_sample 1", "/set top_p 7"]
    lines += ["/set temperature 1"]
    ask, calls = Conversation.ask, []

    def failing(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        return ask(self, *args)

    monkeypatch.setattr(Conversation, "ask", failing)
    seen = chat(folder, monkeypatch, capsys, [*lines, "and on", "still"])
    for text in (
        "`temperature` must be a number above 0 and at most 1e+06, but is 'hot'.",
        "`max_new_tokens` must be an integer of at least 1, but is 'many'.",
        "`do_sample` must be True or False, but is 1.",
        "`top_p` must be a number of at least 0 and at most 1, but is 7.",
        "temperature = 1 from the next message on",
        "hf-ssr: no memory",
    ):
        assert text in seen.err
    assert seen.err.count("tokens of the chat were in the cache]") == 2


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\xff",
        b"",
        b"{",
        b"[" * 100_000,
        b"3",
        b'{"role": "user", "content": "a"}',
        b'["a"]',
        b'[{"role": "user"}]',
        b'[{"role": "robot", "content": "a"}]',
        b'[{"role": "user", "content": ["a"]}]',
        b'[{"role": "assistant", "content": "a", "reasoning_content": 3}]',
    ],
)
def test_load_of_what_is_no_chat(content, chat_tokenizer, model, tmp_path):
    """It is called that, and the chat is as it was."""
    session = Session(conversation_of(model, chat_tokenizer), {})
    session.conversation.messages = [{"role": "user", "content": "hello"}]
    (tmp_path / "chat.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"chat\.json must be a list of messages with `role` and `content`, as /save"):
        session.handle(f"/load {tmp_path / 'chat.json'}")
    assert session.conversation.messages == [{"role": "user", "content": "hello"}]


def test_ctrl_c_at_the_prompt(monkeypatch, capsys):
    """Once, it takes back what was typed; twice in a row, it leaves; from a pipe it leaves at once."""
    typed = iter(["begun\\", KeyboardInterrupt, "whole", KeyboardInterrupt, KeyboardInterrupt])

    def typing(prompt):
        if (line := next(typed)) is KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("not interrupted")
        return line

    monkeypatch.setattr("builtins.input", typing)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    read = messages()
    assert next(read) == "whole"
    with pytest.raises(KeyboardInterrupt):
        next(read)
    assert capsys.readouterr().err.count("Ctrl-C once more leaves") == 2
    typed = iter([KeyboardInterrupt])
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: False))
    with pytest.raises(KeyboardInterrupt):
        next(messages())


def test_a_setting_that_needs_markers(folder, monkeypatch, capsys):
    seen = chat(folder, monkeypatch, capsys, ["/set thinking_end None", "/set max_new_tokens 5", "hello"])
    assert "max_new_tokens = 5 from the next message on" in seen.err


def test_an_end_of_input_within_a_message(folder, monkeypatch, capsys):
    seen = chat(folder, monkeypatch, capsys, ["hello\\"])
    assert seen.err.count("tokens of the chat were in the cache]") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminal")
def test_ctrl_c_on_a_terminal():
    """As it is typed: in a thought, twice in an answer, which is kept, and twice at the prompt, which leaves."""
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hf_ssr", "chat"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        seen = ""

        def wait_for(text: str) -> None:
            nonlocal seen
            while text not in seen:
                if not select.select([ours], [], [], 100)[0]:
                    process.kill()
                    pytest.fail(f"{text!r} does not come: {seen}")
                # without colours, of which a piece may hold half of one
                seen = re.sub(r"\x1b\[\??\d*[a-z]", "", seen + os.read(ours, 4096).decode(errors="replace"))
            seen = seen[seen.index(text) + len(text) :]

        def interrupt(times: int = 1) -> None:
            for _ in range(times):
                process.send_signal(signal.SIGINT)

        def interrupt_prompt() -> None:
            time.sleep(2)  # Python writes a prompt before it waits for keys: a signal in between waits for the next key
            interrupt()

        wait_for("/help lists")
        wait_for("> ")
        for text in (f"{TO_COPY}\n", "/retry\n"):
            os.write(ours, text.encode())
            if text.startswith("/"):
                wait_for("class Book:")  # of the answer: what was typed has a full stop there
                interrupt(2)
                wait_for("what there is of the answer is part of the chat")
            else:
                wait_for("Place 0, past start")
                interrupt()
                wait_for("[answer now]")
                wait_for("were in the cache]")
            wait_for("> ")
        interrupt_prompt()
        wait_for("once more leaves")
        wait_for("> ")
        interrupt_prompt()
        wait_for("hf-ssr: interrupted")
        assert process.wait(60) == 130 and "Traceback" not in seen
    os.close(ours)
