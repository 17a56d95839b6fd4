"""The source is held to the house style: sizes, and nothing without a test."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "polybus"
TESTS = ROOT / "tests"
MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60

MODULES = sorted(SOURCE.rglob("*.py"))
EVERYTHING = [*MODULES, *sorted(TESTS.rglob("*.py"))]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", EVERYTHING, ids=shown)
def test_a_module_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MODULE_LINES_MAX


@pytest.mark.parametrize("path", EVERYTHING, ids=shown)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    long = [
        f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert long == []


@pytest.mark.parametrize("path", [one for one in EVERYTHING if one != Path(__file__)], ids=shown)
def test_what_is_left_to_do_is_an_issue_and_not_a_comment(path: Path) -> None:
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", path.read_text())


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module begins with a docstring"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> set[str]:
    """Every module that a file may import: `from a import b` counts as a and as a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Verbs are named by text, `module:attribute`, and imported when they are used.
            names.add(node.value.partition(":")[0])
    return names


@functools.cache
def imported_by_tests() -> frozenset[str]:
    names: set[str] = set()
    for path in TESTS.rglob("*.py"):
        names |= imported_names(path)
    return frozenset(names)


@functools.cache
def reached_by_tests() -> frozenset[str]:
    """What tests import, and what that imports, and so on."""
    known = {module_name(path): path for path in MODULES}
    reached: set[str] = set()
    fresh = set(imported_by_tests()) & set(known)
    while fresh:
        reached |= fresh
        found = {name for module in fresh for name in imported_names(known[module])}
        # Importing a.b.c runs a.b too.
        found |= {name.rpartition(".")[0] for name in found | fresh}
        fresh = (found & set(known)) - reached
    return frozenset(reached)


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_no_module_is_dead(path: Path) -> None:
    """Every module is used by what tests use; what nothing reaches can go."""
    assert module_name(path) in reached_by_tests() or path.name == "__main__.py"


@pytest.mark.parametrize("path", sorted({path.parent for path in MODULES}), ids=shown)
def test_every_package_has_tests_of_its_own(path: Path) -> None:
    name = module_name(path / "__init__.py")
    assert any(f"{one}.".startswith(f"{name}.") for one in imported_by_tests())
