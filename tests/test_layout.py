"""The layout holds: imports point down, what ships to the Hub is flat, files stay short."""

import ast
import re
from pathlib import Path

import pytest

import hf_ssr
from hf_ssr.command import exporting

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
    ["running", "comparing"],
    ["generate"],
    ["decoding"],
    ["preparing"],
    ["applicability"],
    ["speculating"],
    ["state"],
    ["scheduling", "shared_prefix", "drafter_suffix", "child"],
    ["drafting"],
    ["target"],
]
NOT_SHIPPED = {"__init__", "__main__", "version", "comparing"}


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
        assert level(imported) > level(module) or is_level or (module, imported) == ("comparing", "running.comparing")


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
            import sys

            for name in names:
                top = name.split(".")[0]
                assert top in ("torch", "transformers") or top in sys.stdlib_module_names
    found = set(re.findall(r"^\s*from\s+\.(\S+)\s+import", text, flags=re.MULTILINE))
    assert found == imports_of(module)  # none in a docstring


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
