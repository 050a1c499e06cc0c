"""The pure layer is of use where torch and transformers are absent, or old: nothing is checked, nothing patched."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_layout import PURE

ROOT = Path(__file__).parent.parent
ABSENT = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "tokenizers", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
from importlib import metadata
def distribution(name, *words, found=metadata.distribution):
    if name in ("torch", "transformers"):
        raise metadata.PackageNotFoundError(name)
    return found(name, *words)
metadata.distribution = distribution
"""
OLD = """
sys.path.insert(0, FOLDER)
"""
# A tokenizer as another engine may have it: a token is a character, or one of the markers.
TOKENIZER = """
class Tokenizer:
    special = ["<think>", "</think>"]
    words = [*special, *map(chr, range(32, 127)), "\\n"]
    chat_template, eos_token_id = None, 1000
    added_tokens_decoder = dict(enumerate(special))
    def convert_tokens_to_ids(self, word):
        return self.words.index(word) if word in self.words else None
    def convert_ids_to_tokens(self, index):
        return self.words[index]
    def encode(self, text, add_special_tokens=True):
        for word in self.special:
            text = text.replace(word, chr(1000 + self.words.index(word)))
        return [ord(each) - 1000 if ord(each) >= 1000 else self.words.index(each) for each in text]
    def decode(self, ids, **kwargs):
        return "".join(self.words[index] for index in ids)
    def apply_chat_template(self, messages, tokenize=False):
        raise ValueError("there is none")
tokenizer = Tokenizer()
names = "thinking_start", "thinking_end", "forced_close", "thinks_again", "turn_ends", "eos_token_id"
settings = types.SimpleNamespace(**dict.fromkeys(names))
"""
USES = {
    "families": """
from hf_ssr.families import family_of, spellings_of
assert family_of(tokenizer).name == "think"
assert spellings_of(tokenizer, "</think>") == [(1,)]
""",
    "markers": """
from hf_ssr.markers import resolve_markers, resolved_settings
markers = resolve_markers(settings, tokenizer)
assert tokenizer.decode(markers.forced_close) == "\\n</think>\\n\\n"
assert resolved_settings(settings, tokenizer)["thinking_end"] == [1]
assert markers.progress_of_prompt(tokenizer.encode("One?<think>")) == "open"
""",
    "think_state": """
from hf_ssr.markers import require_markers
from hf_ssr.think_state import ThinkingState
state = ThinkingState(require_markers(settings, tokenizer), tokenizer.encode("One?"), thinking_budget=3)
for token in tokenizer.encode("<think>abc"):
    state.push(token)
while state.forced is not None:
    state.push(state.forced)
assert tokenizer.decode(state.tokens) == "<think>abc\\n</think>\\n\\n" and state.progress == "closed", state.tokens
""",
    "suffix_automaton": """
from hf_ssr.suffix_automaton import SuffixAutomaton, SuffixMatch
automaton = SuffixAutomaton([1, 2, 3, 1, 2])
assert automaton.longest_repeat() == (2, 2)
match = SuffixMatch(automaton)
match.advance(2)
assert match.continuation() == (1, 2)
""",
    "draft_records": """
from hf_ssr.draft_records import AcceptanceRecord
record = AcceptanceRecord()
before = record.chance("match 3")
record.note(types.SimpleNamespace(ids=[1, 2], kind="match 3"), 0)
assert record.chance("match 3") < before
""",
    "suffix_search": """
from hf_ssr.suffix_search import SuffixSearch
search = SuffixSearch(["draft", "answer"], 1, 8)
search.add_draft([1, 2, 3, 4, 2], owner="mine")
for token in (1, 9):
    search.observe(token)
found = search.propose(4)
assert (found.ids, found.source.owner, found.is_prefix) == ([3, 4, 9], "mine", False)
search.record.note(found, 3)
for token in (5, 6, 7, 5, 6):
    search.observe(token)
assert search.propose(2).ids[:1] == [7] and search.propose(2).source.name == "answer"
""",
}
UNTOUCHED = """
assert not [name for name in sys.modules if name.partition(".")[0] in ("torch", "transformers")]
assert {name for name in sys.modules if name.startswith("hf_ssr.")} - {"hf_ssr.version"} <= PURE_ONES
"""


def test_each_is_used():
    assert set(USES) == set(PURE)


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(params=["absent", "old"])
def environment(request, tmp_path) -> str:
    """What makes torch and transformers absent, or transformers one of version 4.0, which cannot be imported."""
    if request.param == "absent":
        return f"import sys, types\n{ABSENT}"
    folder = tmp_path / "transformers-4.0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: transformers\nVersion: 4.0.0\n")
    (tmp_path / "transformers.py").write_text("raise ImportError('cannot import name')\n")
    return f"import sys, types\n{OLD.replace('FOLDER', repr(str(tmp_path)))}"


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_is_of_use(module, environment):
    untouched = UNTOUCHED.replace("PURE_ONES", repr({f"hf_ssr.{each}" for each in PURE}))
    alone = f"import hf_ssr.{module}\nimport hf_ssr\nassert hf_ssr.{module} is sys.modules['hf_ssr.{module}']"
    done = run("\n".join([environment, alone, TOKENIZER, USES[module], untouched]))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_environment_lacks_them(environment):
    """Else the test above would say nothing: what needs transformers fails, and says so."""
    done = run(f"{environment}\nimport hf_ssr\nhf_ssr.SSRConfig")
    last = done.stderr.splitlines()[-1]
    assert "No module named 't" in last or "but 4.0.0 is installed" in last, done.stderr
