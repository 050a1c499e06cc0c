"""The documents: every Python block runs, shell blocks are what CI runs, links lead somewhere, figures are measured."""

import argparse
import ast
import copy
import inspect
import io
import re
import runpy
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import build_once
from test_layout import LEVELS, PURE
from tiny_models import compatibility_table, ways_table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ssr
from hf_ssr.bench.arguments import add_bench_arguments
from hf_ssr.command.exporting import export
from hf_ssr.config import SETTINGS
from hf_ssr.families import FAMILIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TRIED_HERE = ("README.md", "docs/using.md")  # one after the other: later blocks use what earlier ones have made
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}
sys.path[:0] = [str(ROOT / "docs" / "measured"), str(ROOT / "docs")]

import measure  # noqa: E402


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_no_text_with_python_is_left_out():
    """Those named here are tried here, and the small reasoner's card; `ssr*` in `test_cards.py`, services in theirs."""
    folders = [path for name in ("docs", "model_cards") for path in (ROOT / name).rglob("*.md")]
    found = {path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *folders] if "```py" in path.read_text()}
    cards = {path.relative_to(ROOT) for path in ROOT.glob("model_cards/ssr*/README.md")}
    own = {*map(Path, TRIED_HERE), Path("model_cards/tiny-reasoner/README.md"), Path("docs/services.md")}
    assert found == {*own, *cards}


def test_python_blocks(tokenizer, capsys, monkeypatch):
    """One after another, with a tiny model in the place of the one that they load."""
    blocks = [block for name in TRIED_HERE for block in python_blocks(TEXTS[name])]
    assert len(blocks) == sum(TEXTS[name].count("```py") for name in TRIED_HERE) >= 4
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ messages[0]['content'] }}<think>"
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: build_once("qwen3"))
    names = {}
    for block in blocks:
        exec(block.replace("4096", "40"), names)
    assert "wasted draft tokens" in capsys.readouterr().out


def test_python_blocks_of_the_small_reasoners_card(monkeypatch):
    """With the model itself."""
    monkeypatch.chdir(ROOT / "model_cards")
    blocks = python_blocks((ROOT / "model_cards/tiny-reasoner/README.md").read_text())
    assert blocks
    for block in blocks:
        exec(block, {})


def test_python_blocks_of_the_package(tokenizer, tmp_path):
    """What `export` writes where no card is asked for, and the example of `help(SSRConfig)`."""
    export(tmp_path)
    (written,) = python_blocks((tmp_path / "README.md").read_text())
    assert "<this repository or folder>" in written
    (example,) = python_blocks(inspect.cleandoc(hf_ssr.SSRConfig.__doc__))
    inputs = tokenizer(["def f<think>"], return_tensors="pt", return_token_type_ids=False)
    model = build_once("qwen3")
    names = {"model": model, "tokenizer": tokenizer, "inputs": inputs}
    exec(written.replace("<this repository or folder>", str(tmp_path)).replace("4096", "40"), names)
    assert names["output"].tolist() == model.generate(**inputs, max_new_tokens=40).tolist()
    exec(example.replace("2048", "40"), names)


@pytest.mark.parametrize("name", ["how_it_works", "architecture"])
def test_picture_is_what_the_code_draws(name):
    """By its words: lines and letters are placed a little differently by each matplotlib."""
    code = runpy.run_path(str(ROOT / "docs" / f"{name}.py"))
    file = io.StringIO()
    code["write"](file)
    drawn, kept = (
        re.findall(r"<text[^>]*>([^<]+)</text>", text)
        for text in (file.getvalue(), (ROOT / "docs" / f"{name}.svg").read_text())
    )
    assert drawn == kept and len(kept) >= 20
    assert f"]({name}.svg)" in TEXTS[f"docs/{name}.md"]
    if name == "how_it_works":
        assert f"{len(code['PLAIN'])} forwards" in kept and f"{len(code['PARENT'])} forwards" in kept
        assert f"](docs/{name}.svg)" in README
    else:
        files = [word for text in kept for word in text.split(", ") if word.endswith(".py")]
        assert files and all(list((ROOT / "hf_ssr").glob(file)) for file in files)


def test_ci_runs_the_shell_blocks():
    named = re.findall(r"<!-- (.*?) -->\n```bash\n", README)
    script = (ROOT / ".ci" / "run").read_text()
    assert named == ["the main job", "the test command"]
    assert all(f"block '{name}'" in script for name in named)


def test_every_file_is_in_the_map():
    files = {path.name for path in (ROOT / "hf_ssr").glob("*.py")} - {"__init__.py", "version.py"}
    files |= {f"{path.parent.name}/" for path in (ROOT / "hf_ssr").glob("*/__init__.py")}
    assert all(f"`{name}`" in TEXTS["docs/architecture.md"] for name in files)


def layers() -> str:
    """Which file may import from which, from the table that the test of the layout reads."""
    levels = [", ".join(names) for names in LEVELS[1:]]
    return textwrap.fill(" > ".join([*levels, "the rest", ", ".join(PURE)]), 110, break_on_hyphens=False)


def test_layers_are_those_that_hold():
    assert f"<!-- layers -->\n```\n{layers()}\n```\n" in TEXTS["docs/architecture.md"]


def test_ways_are_those_that_are_tested():
    assert f"<!-- ways -->\n{ways_table()}\n\n" in TEXTS["docs/architecture.md"]


def test_compatibility_is_what_is_tested():
    assert f"<!-- compatibility -->\n{compatibility_table()}\n\n" in TEXTS["docs/compatibility.md"]


def families_table() -> str:
    """How each family marks its thoughts, from the table that finds them."""

    def shown(text: str) -> str:
        text = text.replace("\n", "\\n").replace("|", "\\|")
        return f"`{text}`"

    rows = ["| family | start | end | close, where it is forced | thinks again |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        markers = " | ".join(map(shown, (family.start, family.end, family.close)))
        rows.append(f"| {family.name} | {markers} | {'yes' if family.thinks_again else 'no'} |")
    return "\n".join(rows)


def test_families_are_what_is_looked_for():
    assert f"<!-- families -->\n{families_table()}\n\n" in TEXTS["docs/settings.md"]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_every_setting_is_in_the_table():
    table = TEXTS["docs/settings.md"].split("## Cost")[0]
    assert all(f"`{name}`" in table for name in SETTINGS)


def reasons() -> list[str]:
    """Why SSR does not apply: what the functions that say so return, without what they fill in."""
    found = []
    for module in ("applicability", "forking"):
        tree = ast.parse((ROOT / "hf_ssr" / f"{module}.py").read_text())
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            if function.name.startswith(("why_", "_why_", "unsupported_")):
                returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
                found += [value for value in returned if isinstance(value, (ast.Constant, ast.JoinedStr))]
    parts = [[value] if isinstance(value, ast.Constant) else value.values for value in found]
    texts = [[part.value for part in each if isinstance(part, ast.Constant) and part.value] for each in parts]
    return [max(each, key=len).strip(" `,") for each in texts if each]


def test_every_reason_is_explained():
    """And the way out is said; each by its own words."""
    assert len(reasons()) >= 18
    assert [reason for reason in reasons() if reason not in TEXTS["docs/troubleshooting.md"]] == []


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    text = re.sub(r"```.*?```", "", TEXTS[name], flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            assert target.startswith("https://arxiv.org/"), target
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), target


def test_figures_are_what_is_kept():
    """`python docs/measured/measure.py` changes nothing: no figure of these tables is typed."""
    for path in measure.DOCUMENTS:
        assert measure.written(path.read_text()) == path.read_text()
    assert set(re.findall(r"<!-- figures: (\w+) -->", TEXTS["docs/measured/README.md"])) == set(measure.MEASUREMENTS)
    for name in measure.MEASUREMENTS:
        settings, _ = measure.read(name)
        assert re.fullmatch(r"[0-9a-f]{7,}", settings["commit"]), f"{name} was not measured from a commit"
        assert not re.search(r"/(tmp|home|root|work)/", str(settings))


@pytest.mark.slow
def test_measure(tmp_path, monkeypatch):
    """From a run to the sums and the table, with two prompts of each task."""
    (tmp_path / "docs").mkdir()
    document = tmp_path / "README.md"
    document.write_text("# x\n<!-- figures: reasoner -->\nold\n<!-- end of figures -->\ny\n")
    monkeypatch.setattr(measure, "FOLDER", tmp_path / "docs")
    monkeypatch.setattr(measure, "DOCUMENTS", [document])
    small = measure.MEASUREMENTS["reasoner"]._replace(
        command=measure.MEASUREMENTS["reasoner"].command.replace("--limit 100 --repeats 3", "--limit 2 --repeats 1")
    )
    monkeypatch.setitem(measure.MEASUREMENTS, "reasoner", small)
    for _ in range(2):  # the second goes on with what is done
        assert measure.main(["--run", "reasoner", "--results", str(tmp_path / "results")]) == 0
    settings, kept = measure.read("reasoner")
    assert settings["commit"] and set(kept["tasks"]) == {"class", "ledger", "path"}
    text = document.read_text()
    assert text.startswith("# x\n") and text.endswith("-->\ny\n") and "old" not in text
    assert f"Commit {settings['commit']}" in text and "Same tokens in all 30 runs." in text
    assert "--limit 2" in text and (tmp_path / "docs" / "reasoner" / "README.md").exists()
    assert len((tmp_path / "docs" / "reasoner" / "summary.json").read_text()) < 20_000


def test_commands_of_measurements_are_commands():
    """Each is one that `bench`, or its module, takes."""
    for each in measure.MEASUREMENTS.values():
        program, *words = shlex.split(each.command)
        assert program == "hf-ssr" or words[:2] in (["-m", "hf_ssr.bench.rules"], ["-m", "hf_ssr.bench.overhead"])
        if words[0] == "bench":
            parser = argparse.ArgumentParser()
            add_bench_arguments(parser)
            parser.parse_args(words[1:])
