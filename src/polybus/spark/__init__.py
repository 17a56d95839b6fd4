"""Spark: topics as streams and tables, and results back to topics (PySpark).

The names below are looked up when they are first used, so that importing one of this package's
modules on an executor imports that module and no more.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "publish": "polybus.spark.sink.publishing",
    "register_views": "polybus.spark.tables",
    "table": "polybus.spark.tables",
    "upsert": "polybus.spark.sink.publishing",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
