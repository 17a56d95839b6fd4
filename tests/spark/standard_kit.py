"""What tests of the standard pipeline share: messages made by hand, batches run one by one."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from polybus.config import Config, DeclaredTopic, Pipeline
from polybus.lake import settings as pipeline_settings
from polybus.lake.table import open_table
from polybus.spark.pipelines.standard import decode
from polybus.spark.pipelines.standard.batches import StandardBatches
from polybus.spark.pipelines.standard.planned import PlannedRows
from polybus.spark.source.options import COLUMNS, VALUE_BYTES, arrow_schema, spark_schema

EPOCH = 7
NOON = datetime.datetime(2026, 3, 1, 12, 0, tzinfo=datetime.UTC)


class Topics:
    """Makes messages as the source gives them; offsets of a topic ascend."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def message(
        self,
        topic: str,
        value: bytes | str,
        *,
        after_s: float = 0.0,
        headers: Mapping[str, bytes | str] | None = None,
        protocol: str = "goms",
        sender: str = "10.0.0.1:1",
    ) -> dict[str, Any]:
        offset = self._next.get(topic, 0)
        self._next[topic] = offset + 1
        return {
            "topic": topic,
            "partition": 0,
            "offset": offset,
            "timestamp": NOON + datetime.timedelta(seconds=after_s),
            "key": None,
            "value": _bytes(value),
            "headers": None if headers is None else [(k, _bytes(v)) for k, v in headers.items()],
            "protocol": protocol,
            "sender": sender,
            "epoch": EPOCH,
            "value_bytes": len(_bytes(value)),
        }


def _bytes(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else text


def frame_of(spark: Any, messages: Sequence[dict[str, Any]]) -> Any:
    """Messages as the pipeline's source gives them."""
    columns = (*COLUMNS, VALUE_BYTES)
    table = pa.Table.from_pylist(list(messages), schema=arrow_schema(columns))
    return spark.createDataFrame(table, schema=spark_schema(columns))


def make_decoding_raise(patched: pytest.MonkeyPatch) -> None:
    """Decoding raises for the values that begin with `poison`."""

    def columns(*given: Any) -> list[str]:
        text = "CAST(value AS STRING)"
        raises = f"IF({text} LIKE 'poison%', RAISE_ERROR('boom'), {text}) AS text"
        return [raises if one.endswith(" AS text") else one for one in real(*given)]

    real = decode.columns
    patched.setattr(decode, "columns", columns)


class KnownPlan:
    """The plan of a batch with this many messages or events, which are small or large."""

    def __init__(self, rows: int, *, is_small: bool) -> None:
        self._plan = PlannedRows(rows, rows, 0 if is_small else None)

    def synced(self, _: int) -> PlannedRows:
        return self._plan


class Pipe:
    """The standard pipeline's batches on a data folder, without a query around them."""

    is_small = True

    def __init__(self, spark: Any, data: Path, *topics: DeclaredTopic, **pipeline: Any) -> None:
        self.spark = spark
        self.data = data
        data.mkdir(parents=True, exist_ok=True)
        self.configure(*topics, **pipeline)
        self.restart()

    def configure(self, *topics: DeclaredTopic, **pipeline: Any) -> None:
        """Do what a bus with such a config does when it starts."""
        config = Config(data=str(self.data), topics=list(topics), pipeline=Pipeline(**pipeline))
        pipeline_settings.write(self.data, config)

    def restart(self, *, begun: int | None = None) -> None:
        """A new life of the flow, as after a crash."""
        self.batches = StandardBatches(self.data, "standard.decode:test", begun=begun)

    def run(self, batch_id: int, messages: Sequence[dict[str, Any]]) -> None:
        plan: Any = KnownPlan(len(messages), is_small=self.is_small)
        self.batches.plans = plan
        self.batches(frame_of(self.spark, messages), batch_id)

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """The table's rows by Arrow, sorted; empty if it is not there."""
        found = open_table(self.data, table)
        if not found.exists or not found.files():
            return []
        rows = found.read().select(list(columns)).to_pylist()
        return sorted((tuple(row[name] for name in columns) for row in rows), key=repr)

    def silver(self, *expressions: str) -> list[tuple[Any, ...]]:
        """Rows of silver by Spark, in the order of topic and offset."""
        from polybus.spark.tables import read

        frame = read(self.spark, open_table(self.data, "silver")).orderBy("topic", "offset")
        return [tuple(row) for row in frame.selectExpr(*expressions).collect()]
