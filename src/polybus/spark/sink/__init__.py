"""Results to topics, exactly once, all or nothing: `format("polybus")` and `foreachBatch`.

    stream.writeStream.outputMode("update").foreachBatch(
        polybus.spark.upsert("totals", producer="totals", key="customer")
    ).start()

`df.write` and `writeStream` with the format have two steps. `publish` and `upsert` are for
`foreachBatch`, in any output mode; each call is a `df.write`.

    task      write()    stages its rows: durable on disk, not yet visible
    driver    commit()   syncs the checkpoint's record of the batch, then asks the bus for one
                         commit with the key (producer, query id, batch id)

That is also the order of writes. A commit is idempotent: after a failure at any point Spark runs
the batch again, and the bus either has it already or commits it now. The id of a query is in its
checkpoint, so a query that starts from another checkpoint is another writer. The bus refuses it
under the same producer's name instead of publishing everything twice.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter
from pyspark.sql.types import StructType

from polybus.client.http.blocking import GONE
from polybus.errors import PolybusError, UsageError
from polybus.services.transactions.commits import ONCE
from polybus.services.transactions.staging import check_producer
from polybus.spark.checkpoint import Checkpoint, calling_query, local_checkpoint
from polybus.spark.internals import BATCH_ID, QUERY_ID, activate_in_thread
from polybus.spark.location import BusLocation, find_location
from polybus.spark.option_values import (
    boolean,
    checked_values,
    given_options,
    invalid,
    option,
    topic_name,
)
from polybus.spark.sink.any_node import commit_files, files_in, unstage
from polybus.spark.sink.staging import PATIENCE_S, StagedFile, sink_columns, stage

OUTSIDE = "publish"
"""The query id of transactions outside of streaming queries."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The checked options. Without a `producer` its name is the id of the query."""

    location: BusLocation
    topic: str | None = option("topic", topic_name, None)
    producer: str | None = option("producer", check_producer, None)
    take_over: bool = option("takeOver", boolean, False)
    # An option of Spark, and those that publish() sets.
    checkpoint: Checkpoint | None = option(
        "checkpointLocation", local_checkpoint, None, internal=True
    )
    query: str | None = option("polybusQuery", str, None, internal=True)
    batch: int = option("polybusBatch", int, 0, internal=True)


def parse(options: Mapping[str, str]) -> SinkOptions:
    """Raises UsageError `spark.option-unknown`, `-invalid`, `-conflict`, or `data.not-found`."""
    given = given_options(SinkOptions, options, ignored=("queryName", "path"))
    if "log" in given:
        raise invalid("log", "a node commits what a sink writes; name it with url or data instead")
    return SinkOptions(find_location(given), **checked_values(SinkOptions, given))


class PolybusWriter(DataSourceArrowWriter):
    """The writer of `df.write`: one transaction."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        """Check everything before a row is written. Raises UsageError."""
        self._options = parse(options)
        if overwrite:
            text = 'mode("overwrite"): messages of a topic cannot be replaced; use mode("append")'
            raise UsageError("sink.mode", text)
        self._columns = sink_columns(schema, self._options.topic)
        _check_topic(self._options)
        self._query = self._options.query or ONCE
        self._producer = self._options.producer or "batch"
        if self._options.producer is None or self._options.query is None:
            # Each write is a transaction of its own: under the bare name the second is a repeat.
            self._producer = f"{self._producer[:80]}-{uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedFile:
        options, writer = self._options, (self._producer, self._query)
        return stage(iterator, self._columns, options.location, writer, options.batch)

    def commit(self, messages: Sequence[Any]) -> None:
        commit(self._options, self._producer, self._query, self._options.batch, messages)

    def abort(self, messages: Sequence[Any]) -> None:
        unstage(self._options.location, messages)


class PolybusStreamWriter(DataSourceStreamArrowWriter):
    """The writer of `writeStream`, in append or complete mode: a transaction for each batch."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """Check what is known before the first batch. Raises UsageError."""
        self._options = parse(options)
        self._columns = sink_columns(schema, self._options.topic)
        try:
            _check_topic(self._options)
        except PolybusError as error:
            # A stream can wait for its bus.
            if error.code not in GONE:
                raise

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedFile:
        task = TaskContext.get()
        query = task and task.getLocalProperty(QUERY_ID)
        batch = task and task.getLocalProperty(BATCH_ID)
        if not query or not batch:
            text = "the task has no query id or batch id"
            raise UsageError("sink.mode", f"{text}; write from a streaming query")
        writer = (self._options.producer or query, query)
        return stage(iterator, self._columns, self._options.location, writer, int(batch))

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        # Spark runs at least one task, even for an empty batch.
        first = next(one for one in messages if one is not None)
        commit(self._options, first.producer, first.query, batchId, messages)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        # Only staged files: the batch may be committed without Spark's knowledge.
        unstage(self._options.location, messages)


def commit(
    options: SinkOptions, producer: str, query: str, batch: int, messages: Sequence[Any]
) -> None:
    """Commit the staged files of a batch. Idempotent.

    Raises:
        UsageError: the bus refuses, with its own code; nothing is published.
        StorageError: `sink.checkpoint`, the checkpoint cannot be synced; nothing is published.
        PolybusError: the bus is unavailable; the batch may or may not be published.
    """
    staged = files_in(messages)
    if options.checkpoint is not None:
        options.checkpoint.sync_batch(batch)
    body = {
        "producer": producer,
        "query": query,
        "batch": batch,
        "files": [one.name for one in staged],
        "take-over": options.take_over,
        # publish() may skip batches, a stream may not.
        "gaps": options.query is not None,
    }
    commit_files(options.location, body, staged, patience_s=PATIENCE_S)


def _check_topic(options: SinkOptions) -> None:
    """Report an unknown topic before an hour's work, not after it."""
    if options.topic is None:
        return
    try:
        options.location.call("GET", f"/v1/topics/{quote(options.topic, safe='')}")
    except PolybusError as error:
        if error.code != "topic.unknown":
            raise
        text = f"option topic: topic {options.topic!r} does not exist on the bus; create it first"
        raise UsageError("topic.unknown", text) from error


def publish(  # noqa: PLR0913 - all but the first named by the caller
    df: Any,
    *,
    producer: str,
    batch_id: int,
    topic: str | None = None,
    data: Path | None = None,
    url: str | None = None,
    token: str | None = None,
    take_over: bool = False,
) -> None:
    """Publish the rows of a DataFrame in one commit, exactly once per (producer, batch_id).

    The columns are those of the sink: `value`, and optionally `topic`, `key`, `headers`. Batch
    numbers must ascend and may have gaps. A batch that is already published is not computed again.
    Inside `foreachBatch` the query's id belongs to the key, so the bus refuses a query that starts
    from another checkpoint, unless `take_over` is set.

    Raises:
        UsageError: the bus refuses, nothing is published; code and text say why.
        PolybusError: the bus is unavailable.
    """
    query, checkpoint = calling_query(df, batch_id)
    given = {
        "producer": producer,
        "topic": topic,
        "data": data,
        "url": url,
        "token": token,
        "checkpointLocation": None if checkpoint is None else checkpoint.path,
        "takeOver": take_over,
        "polybusQuery": query or OUTSIDE,
        "polybusBatch": batch_id,
    }
    options = {name: str(value) for name, value in given.items() if value is not None}
    if not _is_done(parse(options)):
        activate_in_thread(df.sparkSession)
        df.write.format("polybus").mode("append").options(**options).save()


def upsert(  # noqa: PLR0913 - all but the first named by the caller
    topic: str,
    *,
    producer: str,
    key: str | Sequence[str] | None = None,
    data: Path | None = None,
    url: str | None = None,
    token: str | None = None,
    take_over: bool = False,
) -> Callable[[Any, int], None]:
    """The function for `foreachBatch` that publishes a stream's changes in `outputMode("update")`.

    Each changed row becomes a message, and its key says which row it is: the last message of a key
    is the row's state. Rows with a column `value` are published as they are. Otherwise the value
    is all columns as JSON, and the key consists of the columns named by `key`: the text of one
    column, or several as JSON.
    """
    keys = [key] if isinstance(key, str) else list(key or ())
    where: dict[str, Any] = {"topic": topic, "data": data, "url": url, "token": token}

    def each(df: Any, batch_id: int) -> None:
        rows = _as_messages(df, keys)
        publish(rows, producer=producer, batch_id=batch_id, take_over=take_over, **where)

    return each


def _as_messages(df: Any, keys: Sequence[str]) -> Any:
    if "value" in df.columns:
        return df
    missing = [name for name in keys if name not in df.columns]
    if missing or not keys:
        problem = f"key names column {missing[0]}, which does not exist" if missing else "no key"
        text = f"{problem}; name one or more of the columns {', '.join(df.columns)}"
        raise UsageError("sink.column", text)
    key = F.col(keys[0]).cast("string") if len(keys) == 1 else F.to_json(F.struct(*keys))
    return df.select(key.alias("key"), F.to_json(F.struct("*")).alias("value"))


def _is_done(options: SinkOptions) -> bool:
    """Whether the bus has the batch. False if it does not answer: the commit will find out."""
    with contextlib.suppress(PolybusError):
        last = options.location.call("GET", f"/v1/commits/{options.producer}")
        return bool(last["query"] == options.query and last["batch"] >= options.batch)
    return False
