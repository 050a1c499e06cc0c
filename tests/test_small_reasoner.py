"""The small reasoner by itself: what it is asked, and what it says where it is asked something else."""

import io
import sys

import pytest

from hf_ssr.bench.tasks import EXAMPLE, HELD_OUT, TASKS, Sample, check, draw, split_of, task_of
from hf_ssr.command import answering
from hf_ssr.command.cli import main
from hf_ssr.command.session import TO_COPY

LEDGER = draw("ledger", HELD_OUT).prompt
OTHERS = [
    "Write a Python class Book with title and author.",
    "hello",
    "Write the Python class Book. Sort its fields by name.",
    'Write the Python class Book. Sort its fields by name.\n0 author: str = "red"\n1 year: int = 9',
    "Write the Python class Book. Sort its fields by name.\n0 year: int = 9\n1 year: int = 9",
    'Write the Python class Book. Sort its fields by name.\n0 title: str = "red"\n1 year: int = 90',
    f"Please. {EXAMPLE}",
    f"{EXAMPLE}\nThank you.",
    "Keep the ledger of Paula from 26.\n1 lunch: +10",
    LEDGER.replace("ledger", "books"),
    "Find the way from Paris, the goal is Rome.",
    "Find the way from Paris, the goal is Rome.\nParis 1: Rome by rocket in 2 h",
]


@pytest.mark.parametrize("task", TASKS)
def test_its_own_tasks_are_recognised(task):
    for seed in (*range(20), *range(HELD_OUT, HELD_OUT + 20)):
        assert task_of(draw(task, seed).prompt) == task


@pytest.mark.parametrize("prompt", OTHERS)
def test_other_prompts_are_not(prompt):
    assert task_of(prompt) is None


def test_a_ledger_beyond_two_digits_is_none_of_its_tasks():
    entries = "\n".join(f"{i} {name}: +33" for i, name in enumerate(("lunch", "pens", "shoes", "juice", "coffee"), 1))
    assert task_of(f"Keep the ledger of Paula from 26.\n{entries}") is None


def test_what_it_cannot_do_is_said_before_it_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(answering, "load_tokenizer", lambda _: pytest.fail("the reasoner is loaded"))
    with pytest.raises(SystemExit) as stop:
        main(["Write a Python class Book with title and author."])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert "three kinds of task" in err and f"\nhf-ssr '{EXAMPLE}'\n" in err and "--model Qwen/Qwen3-0.6B" in err


def right(answer: str) -> bool:
    fields = {"owner": ("str", '"pink"'), "title": ("str", '"white"'), "year": ("int", "9")}
    return check(Sample("class", EXAMPLE, "", "", ("Book", fields, False)), answer.rstrip("\n"))


def test_the_prompt_to_copy_is_answered_right(capfd):
    assert split_of(EXAMPLE) == "held-out"
    assert main([f"{EXAMPLE}\n"]) == 0
    out, err = capfd.readouterr()
    assert right(out) and "three kinds" not in err and "no --model, so the small reasoner answers" in err


def test_in_a_chat(monkeypatch, capfd):
    """The notice first, and for a message that is none of its tasks; each task is a chat of its own."""
    lines = ["hello", LEDGER.replace("\n", "\\\n"), TO_COPY, "/retry"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert main(["chat"]) == 0
    out, err = capfd.readouterr()
    assert err.count(TO_COPY) == 2 and err.index(TO_COPY) < err.index("/help")
    assert err.count("a new chat:") == 1 and err.count("were in the cache]") == 3
    ledger, *books = out.split("class Book")
    assert check(draw("ledger", HELD_OUT), ledger.rstrip("\n"))
    assert len(books) == 2 and all(right(f"class Book{book}") for book in books)
    with pytest.raises(SystemExit):
        main(["chat", "--system", "Be brief."])
    assert "--system: the small reasoner was trained without a system prompt" in capfd.readouterr().err
