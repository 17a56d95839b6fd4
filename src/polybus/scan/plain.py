"""Runs modules that Cython compiles in pure Python: substitutes for their C functions.

With POLYBUS_PURE=1 in the environment, their source is loaded even if they are compiled.
"""

from __future__ import annotations

import importlib
import os
import sys
from array import array
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

compiled = False


def cclass(kind: Any) -> Any:
    """A decorator that only the compiler uses."""
    return kind


no_gc = cclass


def freelist(_count: int) -> Any:
    return cclass


def bytes_of(spans: array[int]) -> int:
    """The total size of the spans."""
    return sum(spans[1::2]) - sum(spans[0::2])


def count_of(spans: array[int]) -> int:
    """The number of spans."""
    return len(spans) // 2


def count_filled(spans: array[int]) -> int:
    """The number of spans that are not empty."""
    return sum(spans[at + 1] > spans[at] for at in range(0, len(spans) - 1, 2))


def append_long(numbers: array[int], number: int) -> None:
    numbers.append(number)


def field(part: tuple[Any, ...], index: int) -> Any:
    return part[index]


def add_entry(entries: array[int], part: tuple[Any, ...], position: int, size: int) -> None:
    """Add a commit to a topic's index; the time is the maximum so far: clocks may be set back."""
    _, _, _, first_offset, count, first_row, _, latest = part
    latest = max(latest, entries[-1]) if entries else latest
    entries.extend((first_offset, count, position, size, first_row, latest))


# These modules also run as plain Python source.
AS_THEY_ARE = (
    "polybus.scan.batch",
    "polybus.edges.http.sending",
    "polybus.edges.tcp.handling",
    "polybus.edges.tcp.outbox",
    "polybus.edges.tcp.pump",
    "polybus.edges.tcp.transport",
    "polybus.log.journal.message",
    "polybus.services.sessions.contents",
    "polybus.services.sessions.delivery",
    "polybus.services.sessions.sequence",
    "polybus.services.sessions.session",
    "polybus.services.tallies",
)


class SourceFinder(MetaPathFinder):
    """Finds the source of modules that have a compiled form."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in AS_THEY_ARE or not path:
            return None
        return spec_from_file_location(
            fullname, Path(path[0]) / f"{fullname.rpartition('.')[2]}.py"
        )


def from_source(name: str) -> ModuleType:
    """Load a compiled module's source as a new module."""
    package = importlib.import_module(name.rpartition(".")[0])
    spec = SourceFinder().find_spec(name, package.__path__)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PURE = os.environ.get("POLYBUS_PURE", "") not in ("", "0")
if PURE:
    sys.meta_path.insert(0, SourceFinder())
