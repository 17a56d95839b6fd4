"""Typed columns of topics that declare a schema: the views `silver.<topic>`.

Silver keeps JSON as VARIANT, whatever a topic declares, so that a schema can change without a
column of the table changing. A view reads the declared columns out of it, with their types.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from polybus.lake import settings as pipeline_settings
from polybus.lake.table import open_table
from polybus.spark.native import read
from polybus.spark.pipelines.standard.decode import literal, schema_fields

PREFIX = "silver."
ABOUT = (
    *("epoch", "offset", "timestamp", "event_time", "late", "protocol", "sender", "key"),
    *("message_id", "properties"),
)


def register_typed(spark: Any, data: Path, names: Collection[str]) -> None:
    """Make the views among `names`: the declared columns, then all else in the struct `_message`.

    Raises:
        UsageError: `pipeline.schema`, a schema cannot be understood.
    """
    if not any(name.startswith(PREFIX) for name in names):
        return
    silver = open_table(data, "silver")
    for topic in pipeline_settings.read(data).topics:
        name = PREFIX + topic.name
        if topic.schema is not None and name in names and silver.exists:
            about = ", ".join(f"`{column}`" for column in ABOUT)
            rows = read(spark, silver).where(f"topic = {literal(topic.name)}")
            typed = rows.selectExpr(
                *typed_columns(topic.name, topic.schema), f"STRUCT({about}) AS _message"
            )
            typed.createOrReplaceTempView(f"`{name}`")


def typed_columns(topic: str, schema: str) -> list[str]:
    return [
        f"TRY_VARIANT_GET(payload, {literal(path_of(name))}, {literal(kind)}) AS `{name}`"
        for name, kind, _ in schema_fields(topic, schema)
    ]


def path_of(name: str) -> str:
    return f"$['{name}']"
