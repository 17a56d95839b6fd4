"""Spark: topics as streams and tables, and results back to topics (PySpark).

The public names below are imported on first use, so that an executor that imports one module of
this package does not import all of them.
"""

import importlib
from typing import Any

_MODULES = {
    "blob": "polybus.spark.blobs",
    "publish": "polybus.spark.sink",
    "register_views": "polybus.spark.views",
    "session": "polybus.spark.session",
    "table": "polybus.spark.views",
    "upsert": "polybus.spark.sink",
    "with_reference": "polybus.spark.blobs",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
