"""What is private in transformers is in one file, and one that has gone is named before the first token."""

import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.generation.utils import GenerationMixin

from hf_ssr import host

NAMES = [f"{member.holder}.{member.name}" for member in host.MEMBERS]


@pytest.mark.parametrize("member", host.MEMBERS, ids=NAMES)
def test_transformers_has_it(member):
    assert member.is_there, f"transformers {transformers.__version__} lacks `{member.holder}.{member.name}`"


def test_each_is_listed_once():
    assert len(set(NAMES)) == len(NAMES)


def without(monkeypatch, member: host.Member) -> None:
    """Renames a member, wherever transformers has it."""
    if hasattr(member.where, member.name):
        owner = next(each for each in member.where.__mro__ if member.name in vars(each))
        monkeypatch.setattr(owner, f"{member.name}_renamed", vars(owner)[member.name], raising=False)
        monkeypatch.delattr(owner, member.name)
    functions = vars(member.where).values() if isinstance(member.where, type) else [member.where]
    for function in functions:
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        code = getattr(function, "__code__", None)
        if code is not None and member.name in code.co_names + code.co_varnames:
            names, variables = (
                tuple(f"{name}_renamed" if name == member.name else name for name in names)
                for names in (code.co_names, code.co_varnames)
            )
            monkeypatch.setattr(function, "__code__", code.replace(co_names=names, co_varnames=variables))


@pytest.mark.parametrize("member", host.MEMBERS, ids=NAMES)
def test_one_that_was_renamed_is_named(member, monkeypatch):
    """It alone, and what it is for."""
    with monkeypatch.context() as patch:
        without(patch, member)
        with pytest.raises(ImportError) as raised:
            host.require_members()
    name = f"`{member.holder}.{member.name}` ({member.purpose})"
    assert str(raised.value) == (
        f"hf_ssr needs what transformers {transformers.__version__} lacks: {name}. Install an older transformers, or a "
        "newer hf_ssr."
    )
    host.require_members()


def test_a_generate_that_somebody_has_replaced_is_not_judged(monkeypatch):
    def generate(self, *words, **named):
        return original(self, *words, **named)

    original = GenerationMixin.generate
    assert all(
        member._replace(where=generate).is_there
        for member in host.MEMBERS
        if member.holder == "GenerationMixin.generate"
    )


LACKING = """
import sys
from transformers.generation.utils import GenerationMixin
GenerationMixin._make_prefill = GenerationMixin.__dict__["_prefill"]
del GenerationMixin._prefill
CALL
"""
MESSAGE = (
    f"hf_ssr needs what transformers {transformers.__version__} lacks: `GenerationMixin._prefill` (the forward over "
    "the prompt). Install an older transformers, or a newer hf_ssr."
)


@pytest.mark.parametrize(
    ("call", "begin", "status"),
    [
        ("import hf_ssr; hf_ssr.SSRConfig()", "ImportError", 1),
        ("import hf_ssr.generate", "ImportError", 1),
        ("from hf_ssr.__main__ import main; sys.argv = ['hf-ssr', 'demo']; sys.exit(main())", "hf-ssr", 2),
    ],
)
def test_it_is_said_at_the_door(call, begin, status):
    done = subprocess.run(
        [sys.executable, "-c", LACKING.replace("CALL", call)],
        cwd=Path(host.__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (status, f"{begin}: {MESSAGE}")
    assert begin == "ImportError" or "Traceback" not in done.stderr
