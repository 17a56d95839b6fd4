"""The compiled twin of a scanner module, which has no types of its own."""

from __future__ import annotations

import importlib
from types import ModuleType


def compiled(name: str) -> ModuleType:
    return importlib.import_module(f"polybus.scan._{name}")
