"""`df.write` and `writeStream` with `format("polybus")`: exactly once, all or nothing.

    task      write()    stages its rows: durable on disk, not yet visible
    driver    commit()   syncs the checkpoint's record of the batch, then asks the bus for one
                         commit with the key (producer, query id, batch id)

That is also the order of writes. A commit is idempotent: after a failure at any point Spark runs
the batch again, and the bus either has it already or commits it now. The id of a query is in its
checkpoint, so a query that starts from another checkpoint is another writer. The bus refuses it
under the same producer's name instead of publishing everything twice.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter
from pyspark.sql.types import StructType

from polybus.client.http.blocking import GONE
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.services.transactions.commits import ONCE
from polybus.services.transactions.staging import check_producer
from polybus.spark.checkpoint import Checkpoint, local_checkpoint
from polybus.spark.location import BusLocation, find_location
from polybus.spark.option_values import boolean, checked_values, given_options, option, topic_name
from polybus.spark.sink.staging import PATIENCE_S, SinkColumns, StagedFile, sink_columns, stage

COMMIT_TIMEOUT_S = 900.0


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
    return SinkOptions(find_location(given), **checked_values(SinkOptions, given))


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceArrowWriter:
    """The writer of `df.write`. Raises UsageError."""
    parsed = parse(options)
    if overwrite:
        text = 'mode("overwrite"): messages of a topic cannot be replaced; use mode("append")'
        raise UsageError("sink.mode", text)
    columns = sink_columns(schema, parsed.topic)
    _check_topic(parsed)
    producer = parsed.producer
    if producer is None or parsed.query is None:
        # Each write is a transaction of its own: under the bare name the second would be a repeat.
        producer = f"{(producer or 'batch')[:80]}-{uuid4().hex}"
    return PolybusWriter(parsed, columns, producer)


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """The writer of `writeStream`, in append or complete mode. Raises UsageError."""
    parsed = parse(options)
    columns = sink_columns(schema, parsed.topic)
    try:
        _check_topic(parsed)
    except PolybusError as error:
        # A stream can wait for its bus.
        if error.code not in GONE:
            raise
    return PolybusStreamWriter(parsed, columns)


class PolybusWriter(DataSourceArrowWriter):
    """One transaction for one batch write."""

    def __init__(self, options: SinkOptions, columns: SinkColumns, producer: str) -> None:
        self._options = options
        self._columns = columns
        self._producer = producer
        self._query = options.query or ONCE

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedFile:
        options, producer = self._options, self._producer
        name = stage(iterator, self._columns, options.location, producer, options.batch)
        return StagedFile(name, producer, self._query)

    def commit(self, messages: Sequence[Any]) -> None:
        commit(self._options, self._producer, self._query, self._options.batch, messages)

    def abort(self, messages: Sequence[Any]) -> None:
        _unstage(self._options, messages)


class PolybusStreamWriter(DataSourceStreamArrowWriter):
    """One transaction for each micro-batch."""

    def __init__(self, options: SinkOptions, columns: SinkColumns) -> None:
        self._options = options
        self._columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedFile:
        task = TaskContext.get()
        query = task and task.getLocalProperty("sql.streaming.queryId")
        batch = task and task.getLocalProperty("streaming.sql.batchId")
        if not query or not batch:
            text = "Spark does not say to which query and batch a task belongs"
            raise UsageError("sink.mode", f"{text}; write from a streaming query")
        producer = self._options.producer or query
        name = stage(iterator, self._columns, self._options.location, producer, int(batch))
        return StagedFile(name, producer, query)

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        # Spark runs at least one task, even for an empty batch.
        first = next(one for one in messages if one is not None)
        commit(self._options, first.producer, first.query, batchId, messages)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        # Only staged files: the batch may be committed without Spark's knowledge.
        _unstage(self._options, messages)


def commit(
    options: SinkOptions, producer: str, query: str, batch: int, messages: Sequence[Any]
) -> None:
    """Commit the staged files of a batch. Idempotent.

    Raises:
        UsageError: the bus refuses, with its own code; nothing is published.
        StorageError: `sink.checkpoint`, the checkpoint cannot be synced; nothing is published.
        PolybusError: the bus is away; the batch may or may not be published.
    """
    if options.checkpoint is not None:
        try:
            options.checkpoint.sync_batch(batch)
        except OSError as error:
            text = f"option checkpointLocation: cannot sync batch {batch}: {error}"
            raise StorageError("sink.checkpoint", text) from error
    body = {
        "producer": producer,
        "query": query,
        "batch": batch,
        "files": [one.name for one in messages if one is not None and one.name is not None],
        "take-over": options.take_over,
        # publish() may skip batches, a stream may not.
        "gaps": options.query is not None,
    }
    options.location.call(
        "POST", "/v1/commits", body, patience_s=PATIENCE_S, timeout_s=COMMIT_TIMEOUT_S
    )


def _unstage(options: SinkOptions, messages: Sequence[Any]) -> None:
    """Ask the bus to remove staged files; it does not if they are committed.

    While the bus is away the files stay, and the bus removes them later.
    """
    for one in messages:
        if one is not None and one.name is not None:
            with contextlib.suppress(PolybusError):
                options.location.call("DELETE", f"/v1/staging/{one.producer}/{one.name}")


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
