"""If a document can be wrong, a test reads it."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest
from trees_kit import nodes
from trees_kit import trees as trees

from polybus import config
from polybus.cli import VERBS, main
from polybus.edges.node import RELOADED
from polybus.error_codes import CODES
from polybus.wire.goms_objects import Code

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "src" / "polybus").rglob("*.py"))
CODE = re.compile(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*")
# Strings of the same shape that are files.
FILES = re.compile(r".*\.(db|json|toml|lock|sock|py|md|c|exe)")


def test_the_reference_is_current() -> None:
    # In a process of its own: a command keeps the help option of the first context that asks.
    command = [sys.executable, "-m", "polybus.cli.reference", "--check", str(DOCS / "reference")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_documented_with_all_its_options(verb: str) -> None:
    page = (DOCS / "reference" / "cli.md").read_text()
    command = main.get_command(click.Context(main), verb)
    assert command is not None
    assert f"## polybus {verb}\n" in page
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert all(name in page for name in parameter.opts)


def settings_groups() -> list[type[config.Settings]]:
    return [
        value
        for value in vars(config).values()
        if isinstance(value, type)
        and issubclass(value, config.Settings)
        and value is not config.Settings
    ]


@pytest.mark.parametrize("group", settings_groups())
def test_every_setting_is_documented(group: type[config.Settings]) -> None:
    page = (DOCS / "reference" / "config.md").read_text()
    assert group is config.Config or f"## `{group.__name__}`, in " in page
    for field in msgspec.structs.fields(group):
        assert f"| `{field.encode_name}` |" in page


@pytest.mark.parametrize("page", ["reference/config.md", "howto/operate.md"])
def test_the_settings_that_sighup_reloads_are_documented(page: str) -> None:
    (said,) = [
        one for one in (DOCS / page).read_text().split("\n\n") if "SIGHUP" in one and "again" in one
    ]
    keys = [name.replace("_", "-") for name in RELOADED]
    assert [key for key in keys if f"`{key}`" not in said] == []


def test_the_guarantees_name_the_values_that_settings_have() -> None:
    text = (DOCS / "guarantees.md").read_text()
    units = {"ms": 1, "MiB": 1 << 20, "days": 86_400}
    numbers = {"seven": 7}
    named = re.findall(r"`([a-z-]+)`\s+\((\w+)\s+(ms|MiB|days)\)", text)
    groups = [config.Config(), config.Limits(), config.BusRetention(), config.Journal()]
    settings = {
        field.encode_name: getattr(group, field.name)
        for group in groups
        for field in msgspec.structs.fields(group)
    }
    assert len(named) >= 5
    for name, number, unit in named:
        value = numbers.get(number) or int(number)
        assert settings[name] == value * units[unit], name


def test_the_guarantees_name_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w./-]+)`", (DOCS / "guarantees.md").read_text())
    assert named and [path for path in named if not (DOCS.parent / path).exists()] == []


def test_every_error_code_is_documented() -> None:
    page = (DOCS / "reference" / "errors.md").read_text()
    assert [code for code in sorted(CODES) if f"| `{code}` |" not in page] == []


@functools.cache
def codes_in_source() -> dict[str, str]:
    """Every string in the source that has the shape of a code of a known kind, and where it is.

    Docstrings do not count, nor the table of codes itself.
    """
    kinds = {code.partition(".")[0] for code in CODES}
    found = {f"goms.{code}": "wire/goms_objects.py" for code in Code}
    for path in SOURCES:
        if path.name == "error_codes.py":
            continue
        for node in nodes(path):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            text = node.value
            if CODE.fullmatch(text) and not FILES.fullmatch(text) and text.split(".")[0] in kinds:
                found[text] = str(path.relative_to(ROOT))
    return found


# Verbs of the administrator's socket, the beginning of a family of codes, an event of ASGI, a
# setting and a file of Spark's.
NOT_CODES = {
    *("spark.master", "spark.log"),
    *("topics.list", "topics.create", "topics.delete", "topics.describe", "goms.001"),
    "http.disconnect",
}


def test_every_code_in_the_source_has_a_meaning() -> None:
    unknown = {
        code: place
        for code, place in codes_in_source().items()
        if code not in CODES and code not in NOT_CODES
    }
    assert unknown == {}, "add them to src/polybus/error_codes.py, then run `make reference`"


def test_every_code_with_a_meaning_is_in_the_source() -> None:
    assert set(CODES) - set(codes_in_source()) == set()


def raised_codes() -> list[tuple[str, str]]:
    """The first argument of every `...Error("code", ...)` in the source, and where it is."""
    raised = []
    for path in SOURCES:
        for node in nodes(path):
            if not isinstance(node, ast.Call) or len(node.args) < 2:
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            first = node.args[0]
            is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
            if name.endswith("Error") and is_text:
                assert isinstance(first, ast.Constant)
                raised.append((str(first.value), str(path.relative_to(ROOT))))
    return raised


def test_every_error_that_is_raised_has_a_known_code() -> None:
    assert [(code, place) for code, place in raised_codes() if code not in CODES] == []


def test_links_between_documents_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_home_of_the_site_leads_to_every_page() -> None:
    home = DOCS / "index.md"
    linked = {DOCS / target for target in re.findall(r"\]\(([^)#\s]+)", home.read_text())}
    # Decisions are linked from the architecture.
    pages = {page for page in DOCS.rglob("*.md") if page.parent.name != "decisions"}
    assert pages - linked == {home}


def test_python_in_documents_is_python() -> None:
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
