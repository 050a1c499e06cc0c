"""The layout holds: imports point down, what ships to the Hub is flat, files stay short."""

import ast
import re
from pathlib import Path

import pytest

import hf_ssr

PACKAGE = Path(hf_ssr.__file__).parent
MODULES = {path.stem: path for path in PACKAGE.glob("*.py")}
COMMAND = ("cli", "answering", "chat", "conversation", "options", "loading", "comparing", "terminal")
TOP = ("__init__", "__main__", "hub", *COMMAND)
# Each may import from lower lines and, within "the rest", from anything that does not import it back.
LEVELS = [
    [*TOP, "bench"],
    ["generate"],
    ["decoding"],
    ["preparing"],
    ["applicability"],
    ["speculating"],
    ["state"],
    ["scheduling", "drafter_suffix", "child"],
    ["target"],
    ["target_slots"],
    ["target_rows", "self_check"],
    ["forwards", "rows", "slot_masks"],
    ["places", "cache_slots", "forking"],
    ["drafting"],
]
NOT_SHIPPED = {*TOP, "version"}


def level(module: str) -> int:
    return next((i for i, names in enumerate(LEVELS) if module in names), len(LEVELS))


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 1 and n.module}
    return {module.split(".")[0] for module in modules}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    for imported in imports_of(MODULES[module]):
        assert imported in MODULES or imported == "bench"
        is_top = level(module) == 0
        assert level(imported) > level(module) or level(imported) == len(LEVELS) or (is_top and imported != "__init__")


def test_no_circles():
    seen: dict[str, bool] = {}

    def visit(module: str) -> None:
        assert seen.get(module) is not True, f"{module} imports itself"
        if module in seen or module == "bench":  # nothing below the top imports it
            return
        seen[module] = True
        for imported in imports_of(MODULES[module]):
            visit(imported)
        seen[module] = False

    for module in MODULES:
        visit(module)


@pytest.mark.parametrize("module", sorted(set(MODULES) - NOT_SHIPPED))
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
    assert found == imports_of(MODULES[module])  # none in a docstring


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
