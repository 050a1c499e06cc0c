"""The layout holds: imports point down, what ships to the Hub is flat, files stay short."""

import ast
import re
import sys
from pathlib import Path

import pytest

import hf_ssr
from hf_ssr.command import exporting
from hf_ssr.host import MEMBERS

PACKAGE = Path(hf_ssr.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
FLAT = {name for name, path in MODULES.items() if path.parent == PACKAGE}
# Each may import from lower lines and, within "the rest" and within a room, from anything that does not import it back.
LEVELS = [
    ["__init__", "__main__"],
    ["command"],
    ["bench"],
    ["running"],
    ["generate"],
    ["decoding"],
    ["preparing"],
    ["applicability"],
    ["rounds"],
    ["stages"],
    ["child"],
    ["lanes"],
    ["scheduling", "draft_sources", "following"],
    ["choosing", "drafter_suffix", "target"],
    ["target_slots"],
    ["target_rows", "self_check"],
    ["self_trials"],
    ["forwards", "rows", "slot_masks"],
    ["places", "forking"],
    ["cache_slots", "cache_states"],
    ["drafting"],
]
# No torch, no transformers: other engines use these where neither is there (test_pure.py).
PURE = ("families", "markers", "think_state", "suffix_automaton", "draft_records", "suffix_search")
# Private, but our own on an object of theirs, of Python, or of torch.
ALLOWED = {"_tokenizer", "_exit", "_replace", "_asdict", "_fields"}
ALLOWED |= {"_schema", "_weight_int8pack_mm", "_python_dispatch", "_compiled_call_impl"}
NOT_SHIPPED = {"__init__", "__main__", "version"}


def level(module: str) -> int:
    room = module.split(".")[0]
    return next((i for i, names in enumerate(LEVELS) if room in names), len(LEVELS))


def imports_of(module: str) -> set[str]:
    """Modules, by their names in the package; of a folder, what is in it."""
    path = MODULES[module]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].relative_to(PACKAGE).parts
            source = ".".join((*folder, *filter(None, [node.module])))
            inside = {".".join(filter(None, [source, alias.name])) for alias in node.names}
            found |= inside & set(MODULES) or {source}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    for imported in imports_of(module):
        assert imported in MODULES
        is_room = module not in FLAT and imported not in FLAT
        is_level = level(imported) == level(module) and (is_room or level(module) == len(LEVELS))
        assert level(imported) > level(module) or is_level


def test_no_circles():
    seen: dict[str, bool] = {}

    def visit(module: str) -> None:
        assert seen.get(module) is not True, f"{module} imports itself"
        if module in seen:
            return
        seen[module] = True
        for imported in imports_of(module):
            visit(imported)
        seen[module] = False

    for module in MODULES:
        visit(module)


@pytest.mark.parametrize("module", PURE)
def test_the_pure_layer_imports_only_itself(module):
    """Inside of functions, too."""
    tree = ast.parse(MODULES[module].read_text())
    assert imports_of(module) <= set(PURE)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] in sys.stdlib_module_names for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module.split(".")[0] in sys.stdlib_module_names


def test_what_ships_is_what_is_exported():
    assert set(exporting._files()) == {f"{name}.py" for name in FLAT - NOT_SHIPPED} | {"requirements.txt"}


@pytest.mark.parametrize("module", sorted(FLAT - NOT_SHIPPED))
def test_what_ships_is_flat(module):
    """transformers' loader follows `from .module import name` only, and needs nothing but torch and transformers."""
    text = MODULES[module].read_text()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module and "." not in node.module
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            for name in names:
                top = name.split(".")[0]
                assert top in ("torch", "transformers") or top in sys.stdlib_module_names
    found = set(re.findall(r"^\s*from\s+\.(\S+)\s+import", text, flags=re.MULTILINE))
    assert found == imports_of(module)  # none in a docstring


FILES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def private_names_in(tree: ast.AST, function: str = "") -> set[str]:
    """Private names that some code reads of an object, or imports. An override may call what it overrides."""
    names = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Attribute):
            is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
            names |= set() if is_super and node.attr == function else {node.attr}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            names |= {each.value for each in node.args if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.ImportFrom):
            names |= {part for alias in node.names for part in [alias.name, *(node.module or "").split(".")]}
        elif isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
        names |= private_names_in(node, node.name if isinstance(node, ast.FunctionDef) else function)
    return set(filter(is_private, names))


def private_names_of(tree: ast.AST) -> set[str]:
    """Private names that some code gives to its own functions, classes and objects, or to a module."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in ast.walk(ast.Tuple(node.targets) if isinstance(node, ast.Assign) else node.target):
                is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "cls")
                names |= {target.attr} if is_own else {target.id} if isinstance(target, ast.Name) else set()
    return set(filter(is_private, names))


GIVEN = set().union(*map(private_names_of, FILES.values()))


@pytest.mark.parametrize("file", FILES)
def test_what_is_private_elsewhere_is_in_one_file(file):
    """`host.py` has all that is private in transformers; what is private in the others is our own."""
    members = {member.name for member in MEMBERS if is_private(member.name)}
    unknown = private_names_in(FILES[file]) - (GIVEN - members) - ALLOWED
    if file == "host.py":
        assert unknown | (members & GIVEN) == members | {"_getframe"}  # those that are given are overridden
    else:
        assert not unknown


@pytest.mark.parametrize(
    "code",
    [
        "model._prefill(ids)",
        "def prefill(self):\n    self._prefill()",
        "def sample(self):\n    super()._prefill()",
        "getattr(cache, '_is_user_defined', False)",
        "from transformers.generation.utils import _nothing",
        "import transformers._nothing",
        "sys._getframe(1)",
    ],
)
def test_which_private_names_are_seen(code):
    assert len(private_names_in(ast.parse(code)) - ALLOWED) == 1
    assert not private_names_in(ast.parse("class A(B):\n    def _prefill(self):\n        return super()._prefill()"))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 80, node.name


@pytest.mark.parametrize("name", hf_ssr.__all__)
def test_public_names_are_documented(name):
    if name != "__version__":
        assert getattr(hf_ssr, name).__doc__
