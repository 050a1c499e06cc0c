"""The cards of `model_cards`: their code runs, settings, markers and figures are true; `export` writes them."""

import ast
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from card_models import CASES, LIMIT, Stand, tokenizer_of
from huggingface_hub import ModelCard
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.generation.utils import GenerationMixin

import hf_ssr
from hf_ssr.command import exporting
from hf_ssr.config import DEFAULTS, SETTINGS
from hf_ssr.markers import decode, resolve_markers

FOLDER = Path(__file__).parent.parent / "model_cards"
CARDS = {path.parent.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("ssr*/README.md"))}
MODELS = [name for name in CARDS if name != "ssr"]
SECTIONS_OF_A_MODEL = ["Use", "Settings", "Thinking markers", "Cache", "Memory", "Sampling", "What has been run"]
SECTIONS_OF_SSR = ["What it does", "The guarantee", "Use", "Settings", "Caches", "Limits", "What has been run"]


def section(name: str, title: str) -> str:
    return CARDS[name].split(f"\n## {title}\n")[1].split("\n## ")[0]


def one_line(name: str, title: str) -> str:
    return " ".join(section(name, title).split())


def table(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without their heads."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip().replace("\\|", "|") for cell in row] for row in rows]
    rules = [place for place, row in enumerate(rows) if all(set(cell) == {"-"} for cell in row)]
    return [row for place, row in enumerate(rows) if place not in rules and place + 1 not in rules]


def settings_in_table(name: str, title: str) -> dict:
    return {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in table(section(name, title))}


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", CARDS[name], flags=re.DOTALL)


def settings_in_code(block: str) -> dict:
    """The keywords of `generate` that say how to decode."""
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    call = next(node for node in calls if ast.unparse(node.func) == "model.generate")
    given = {k.arg: k.value.value if isinstance(k.value, ast.Constant) else k.value for k in call.keywords if k.arg}
    route = {"custom_generate", "trust_remote_code", "tokenizer", "return_dict_in_generate"}
    return {k: ast.literal_eval(v) if isinstance(v, ast.AST) else v for k, v in given.items() if k not in route}


def markers_on(name: str) -> dict[str, str]:
    rows = table(section("ssr-qwen3-8b" if name == "ssr" else name, "Thinking markers"))
    return {row[0].strip("`"): row[1].strip("`").replace("\\n", "\n") for row in rows}


@pytest.fixture
def installed(monkeypatch):
    """The package itself in the place of its copy in the folder: the copy would measure what forwards cost."""
    monkeypatch.setattr(GenerationMixin, "load_custom_generate", lambda *_, **__: hf_ssr.generate)


def test_every_card_is_tried():
    assert set(CARDS) == set(CASES) == set(exporting.card_names()) and len(CARDS) == 9
    tried = dict.fromkeys(CARDS, 1) | {"ssr-phi-4-mini-reasoning": 2}  # blocks of Python
    assert {name: len(blocks(name)) for name in CARDS} == tried


@pytest.mark.parametrize("name", CARDS)
def test_code(name, installed, monkeypatch, capsys):
    """Gives the tokens of plain `generate`; SSR applies, and forks in the way that the card says."""
    stand, names = Stand(name, markers_on(name), monkeypatch), {}
    stand.run(names, blocks(name)[0])
    kwargs, output = stand.calls[0]
    assert torch.equal(output.sequences, stand.plain(0))
    assert kwargs["custom_generate"] == name and kwargs["trust_remote_code"]
    assert stand.loaded == [names["name"]] * 2 and names["name"] == (
        ModelCard(CARDS[name]).data.base_model or "Qwen/Qwen3-8B"
    )
    metrics = output.metrics
    assert metrics.plain_reason is None and metrics.stages and metrics.thinking_tokens >= 100
    assert "wasted draft tokens" in capsys.readouterr().out
    if name in MODELS:
        is_row = "the child is a row of its own" in one_line(name, "Cache").split("under another")[0]
        rows = {int(shape.split("x")[0]) for shapes in metrics.shapes.values() for shape in shapes}
        assert rows == ({1, 2} if is_row else {1})
        kinds = {DynamicLayer: "full", DynamicSlidingWindowLayer: "sliding", LinearAttentionLayer: "recurrent"}
        found = {kinds[type(layer)] for layer in output.cache.layers if type(layer) in kinds}
        assert found == {layer.kind for layer in layers_of(name)} | ({"recurrent"} if state_of(name) else set())


def test_code_from_the_folder(monkeypatch, tmp_path):
    """As its readers run it: with the folder that `export` writes."""
    exporting.export(tmp_path / "ssr-qwen3-8b", card="ssr-qwen3-8b")
    monkeypatch.chdir(tmp_path)
    stand = Stand("ssr-qwen3-8b", markers_on("ssr-qwen3-8b"), monkeypatch)
    stand.run({}, blocks("ssr-qwen3-8b")[0])
    output = stand.calls[0][1]
    assert torch.equal(output.sequences, stand.plain(0))
    assert output.metrics.plain_reason is None and type(output.metrics) is not hf_ssr.SSRMetrics


def test_where_phi_runs_plain(installed, monkeypatch, capsys):
    name = "ssr-phi-4-mini-reasoning"
    stand, names = Stand(name, markers_on(name), monkeypatch), {}
    stand.run(names, blocks(name)[0])
    with pytest.warns(UserWarning, match="SSR does not apply"):
        stand.run(names, blocks(name)[1])
    output = stand.calls[1][1]
    assert f"change where a text passes {LIMIT} tokens" in output.metrics.plain_reason
    assert torch.equal(output.sequences, stand.plain(1))
    assert output.metrics.plain_reason in capsys.readouterr().out


@pytest.mark.parametrize("name", MODELS)
def test_settings(name):
    """Those of the tables are those of the code, all of them."""
    tables = settings_in_table(name, "Settings") | settings_in_table(name, "Sampling")
    assert settings_in_code(blocks(name)[0]) == tables
    for block in blocks(name)[1:]:
        rest = settings_in_code(block)
        assert rest.pop("max_new_tokens") == 32768 and rest.items() <= tables.items()


def test_defaults():
    rows = settings_in_table("ssr", "Settings")
    assert set(rows) <= set(SETTINGS)
    assert rows == {name: DEFAULTS.get(name) for name in rows}


@pytest.mark.parametrize("name", MODELS)
def test_markers(name):
    """Those of the card are found with the model's tokenizer and the card's settings."""
    tokenizer, settings = tokenizer_of(name), settings_in_table(name, "Settings")
    config = hf_ssr.SSRConfig(**{key: value for key, value in settings.items() if key.startswith("thinking_")})
    found = resolve_markers(config, tokenizer)
    texts = {"thinking_start": found.start, "thinking_end": found.end}
    texts = {key: marker.text or decode(tokenizer, marker.spellings[0]) for key, marker in texts.items()}
    assert texts | {"forced_close": decode(tokenizer, found.forced_close)} == markers_on(name)
    if config.thinking_end is not None:
        assert resolve_markers(hf_ssr.SSRConfig(), tokenizer) is None  # the card says that they have to be given


class Layers(NamedTuple):
    kind: str
    count: int
    heads: int
    head_dim: int
    places: int | None


def layers_of(name: str) -> list[Layers]:
    rows = [row for row in table(section(name, "Memory")) if row[0] in ("full", "sliding")]
    return [Layers(row[0], *map(number, row[1:4]), None if row[4] == "all" else number(row[4])) for row in rows]


def number(text: str) -> int:
    return int(text.replace(",", ""))


def state_of(name: str) -> int:
    """Bytes of all recurrent states."""
    found = re.search(r"of (\d+) layers:\s+`(.*?)`", section(name, "Memory"))
    one = re.search(r"recurrent layer takes\s+`(.*?)` bytes.*?`(.*?)`", section(name, "Memory"), flags=re.DOTALL)
    if found is None:
        return 0
    assert worked_out(found[2]) == int(found[1]) * (worked_out(one[1]) + worked_out(one[2]))
    return worked_out(found[2])


def worked_out(text: str) -> int:
    assert re.fullmatch(r"[\d,+×() ]+", text)
    return eval(text.replace(",", "").replace("×", "*"))


def mib(count: float) -> int:
    return int(count / 2**20 + 0.5)


@pytest.mark.parametrize("name", MODELS)
def test_memory(name):
    """Each figure follows from the layers that the card names, and each piece of arithmetic comes out."""
    text, layers, state = section(name, "Memory"), layers_of(name), state_of(name)
    for expression, result in re.findall(r"`([^`]+)`\s+=\s+([\d,]+) MiB", text):
        assert mib(worked_out(expression)) == number(result)
    rows = [row for row in table(text) if row[0] in ("8,192", "32,768")]
    assert len(rows) == 2
    assert all(x.places is None or f"a window of {x.places + 1:,} tokens" in one_line(name, "Cache") for x in layers)
    for row in rows:
        tokens = number(row[0])

        def size(count: float, kinds=("full", "sliding")) -> float:
            each = [(x, count if x.places is None else min(count, x.places)) for x in layers if x.kind in kinds]
            return sum(x.count * x.heads * x.head_dim * 2 * 2 * places for x, places in each)

        def room(count: float, kind: str) -> float:
            """To grow by: a quarter of what is held, at least 64 places of a window."""
            each = [(x, count if x.places is None else min(count, x.places)) for x in layers if x.kind == kind]
            least = 64 if kind == "sliding" else 0
            return sum(x.count * x.heads * x.head_dim * 2 * 2 * max(least, places / 4) for x, places in each)

        is_row = row[2].startswith("the same again")
        whole = size(tokens) + state
        child = whole if is_row else size(1024, ("full",)) + size(tokens + 1024, ("sliding",))
        assert worked_out(re.findall("`(.*?)`", row[1])[0]) == whole
        assert is_row or worked_out(re.findall("`(.*?)`", row[2])[0]) == child
        if is_row:
            spare = 2 * room(tokens, "full")
        else:  # a child's slots double, or are copies of a window with room of their own
            spare = room(tokens, "full") + size(1024, ("full",))
            spare += room(tokens, "sliding") + room(tokens + 1024, "sliding")
        figures = [number(re.findall(r"([\d,]+) MiB", cell)[0]) for cell in row[1:]]
        assert figures == [mib(whole), mib(child), mib(spare), sum(map(mib, (whole, child, spare)))]


@pytest.mark.parametrize("name", CARDS)
def test_form(name):
    card = ModelCard(CARDS[name])
    assert card.data.library_name == "transformers" and card.data.license == "apache-2.0"
    assert "custom_generate" in card.data.tags
    needed = SECTIONS_OF_SSR if name == "ssr" else SECTIONS_OF_A_MODEL
    titles = re.findall(r"^## (.*)$", CARDS[name], flags=re.MULTILINE)
    assert [title for title in titles if title in needed] == needed
    assert "on a GPU" in section(name, "What has been run") or "Not run: a GPU" in section(name, "What has been run")
    assert all(len(line) <= 120 or line.startswith("|") for line in CARDS[name].splitlines())
    if name in MODELS:
        assert f"https://huggingface.co/{card.data.base_model}" in CARDS[name]
        assert not re.search(r"\d(\.\d+)?x\b", CARDS[name])  # no speed-up: nothing was measured


@pytest.mark.parametrize("name", ["ssr", "ssr-gemma-4-e4b-it"])
def test_export(name, tmp_path):
    written = exporting.export(tmp_path / "new", card=name)
    assert (tmp_path / "new" / "README.md").read_text(encoding="utf-8") == CARDS[name]
    assert tmp_path / "new" / "README.md" in written and tmp_path / "new" / "custom_generate" / "generate.py" in written
    exporting.export(tmp_path / "new")  # again, without: the card stays
    assert (tmp_path / "new" / "README.md").read_text(encoding="utf-8") == CARDS[name]


def test_export_touches_nothing_that_is_there(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ValueError, match=r"`--card`='ssr' would replace .*README.md"):
        exporting.export(tmp_path, card="ssr")
    for unknown in ("tiny-reasoner", "ssr-none", "", "../ssr"):
        with pytest.raises(ValueError, match=r"`--card`=.* is no card: choose one of ssr, ssr-deepseek"):
            exporting.export(tmp_path, card=unknown)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_export_where_the_package_is_installed(tmp_path, monkeypatch):
    """A wheel has the cards beside its modules."""
    shutil.copytree(FOLDER / "ssr", tmp_path / "cards" / "ssr")
    monkeypatch.setattr(exporting, "CARD_FOLDERS", (tmp_path / "cards", tmp_path / "nowhere"))
    assert exporting.card_names() == ["ssr"]
    exporting.export(tmp_path / "new", card="ssr")
    assert (tmp_path / "new" / "README.md").read_text(encoding="utf-8") == CARDS["ssr"]
    setup = (FOLDER.parent / "setup.cfg").read_text()
    assert "hf_ssr.cards = model_cards\n" in setup and "hf_ssr.cards = ssr*/README.md\n" in setup
