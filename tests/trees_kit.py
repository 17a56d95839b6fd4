"""The syntax trees of files, for tests that look at many of them."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(path)))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Keep the trees while a file of tests looks at them.

    To look for garbage among these millions of nodes would take twice as long as to parse.
    """
    gc.disable()
    yield
    gc.enable()
    parsed.cache_clear()
    nodes.cache_clear()
