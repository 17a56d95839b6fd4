"""`df.write` and `writeStream` with `format("polybus")`: exactly once, all or nothing.

    task      write()    stages its rows, safe on disk, visible to nobody
    driver    commit()   makes the checkpoint's own record of the batch safe, then asks the bus for
                         one commit, known by (producer, query id, batch id)

The bus does such a commit once. So whatever dies in between, Spark runs the batch again and the
bus either has it or does it: a task or a driver that is run twice adds nothing twice. The id of a
query lives in its checkpoint, so a query that is started anew from another checkpoint is another
writer; the bus refuses it under the same producer's name rather than publish twice.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter
from pyspark.sql.types import StructType

from polybus import names
from polybus.client.http.blocking import GONE, persist, request_json
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.services.transactions.commits import ONCE
from polybus.services.transactions.staging import check_producer
from polybus.spark.checkpoint import Checkpoint, local_checkpoint
from polybus.spark.sink.columns import SinkColumns, sink_columns
from polybus.spark.sink.staging import (
    PATIENCE_S,
    Staged,
    stage,
    token_of,
    unstage,
    url_of,
)
from polybus.spark.source.option_values import boolean, conflict, invalid
from polybus.spark.where import Where, where

NAMES = ("topic", "producer", "data", "url", "token", "takeOver")
# Spark's own, and those that publish() sets.
OTHERS = ("checkpointlocation", "queryname", "path", "polybusquery", "polybusbatch", "polybusgaps")
COMMIT_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options, checked. `producer` None means: as the query is called."""

    where: Where
    topic: str | None
    producer: str | None
    take_over: bool
    checkpoint: Checkpoint | None
    query: str | None
    batch: int
    gaps: bool


def parse(options: Mapping[str, str]) -> SinkOptions:
    """Raises UsageError `spark.option-unknown`, `-invalid`, `-conflict`, or `data.not-found`."""
    given = {name.lower(): str(value) for name, value in options.items()}
    proper = {name.lower(): name for name in NAMES}
    for name in given:
        if name not in proper and name not in OTHERS:
            near = difflib.get_close_matches(name, proper, 1, cutoff=0.5)
            hint = f"; did you mean {proper[near[0]]}?" if near else ""
            text = f"option {name} is unknown to the sink{hint} It knows: {', '.join(NAMES)}"
            raise UsageError("spark.option-unknown", text)
    if "data" in given and "url" in given:
        raise conflict("data", "url", "give one of the two")
    topic = given.get("topic")
    if topic is not None:
        try:
            topic = names.canonical(topic.strip())
        except UsageError as error:
            raise invalid("topic", error.text) from error
    producer = given.get("producer")
    if producer is not None:
        try:
            check_producer(producer)
        except UsageError as error:
            raise invalid("producer", error.text) from error
    return SinkOptions(
        where=where(given),
        topic=topic,
        producer=producer,
        take_over=boolean({"takeOver": given.get("takeover", "false")}, "takeOver", False),
        checkpoint=local_checkpoint(given.get("checkpointlocation")),
        query=given.get("polybusquery"),
        batch=int(given.get("polybusbatch", "0")),
        gaps=given.get("polybusgaps") == "true",
    )


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceArrowWriter:
    """The writer of `df.write`. Raises UsageError."""
    parsed = parse(options)
    if overwrite:
        text = 'mode("overwrite"): messages of a topic cannot be replaced; use mode("append")'
        raise UsageError("sink.mode", text)
    columns = sink_columns(schema, parsed.topic)
    _check_topic(parsed, wait=True)
    if parsed.query is not None and parsed.producer is not None:
        return PolybusWriter(parsed, columns, parsed.producer)
    # Each write is a transaction of its own: under the bare name the second would count as done.
    name = f"{(parsed.producer or 'batch')[:80]}-{uuid4().hex}"
    return PolybusWriter(parsed, columns, name)


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """The writer of `writeStream`, in append or complete mode. Raises UsageError."""
    parsed = parse(options)
    columns = sink_columns(schema, parsed.topic)
    _check_topic(parsed, wait=False)
    return PolybusStreamWriter(parsed, columns)


class PolybusWriter(DataSourceArrowWriter):
    """One transaction of one batch write."""

    def __init__(self, options: SinkOptions, columns: SinkColumns, producer: str) -> None:
        self._options = options
        self._columns = columns
        self._producer = producer
        self._query = options.query or ONCE

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        options = self._options
        file, count = stage(iterator, self._columns, options.where, self._producer, options.batch)
        return Staged(file, count, self._query, options.batch)

    def commit(self, messages: Sequence[Any]) -> None:
        if self._options.checkpoint is not None:
            sync_checkpoint(self._options.checkpoint, self._options.batch)
        commit(self._options, self._producer, self._query, self._options.batch, messages)

    def abort(self, messages: Sequence[Any]) -> None:
        _unstage_all(self._options, self._producer, messages)


class PolybusStreamWriter(DataSourceStreamArrowWriter):
    """One transaction for each micro-batch."""

    def __init__(self, options: SinkOptions, columns: SinkColumns) -> None:
        self._options = options
        self._columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        task = TaskContext.get()
        query = task and task.getLocalProperty("sql.streaming.queryId")
        batch = task and task.getLocalProperty("streaming.sql.batchId")
        if not query or not batch:
            text = "Spark does not say which query and batch a task belongs to"
            raise UsageError("sink.mode", text)
        producer = self._options.producer or query
        file, count = stage(iterator, self._columns, self._options.where, producer, int(batch))
        return Staged(file, count, query, int(batch))

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        query = self._query(messages)
        if self._options.checkpoint is not None:
            sync_checkpoint(self._options.checkpoint, batchId)
        commit(self._options, self._options.producer or query, query, batchId, messages)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        # Not a word about the batch: it may be committed, and Spark has not heard of it.
        known = [one for one in messages if one is not None]
        if known:
            query = self._query(known)
            _unstage_all(self._options, self._options.producer or query, known)

    def _query(self, messages: Sequence[Any]) -> str:
        # Spark runs one task at least, however little there is to write.
        return next(str(one.query) for one in messages if one is not None)


def commit(
    options: SinkOptions, producer: str, query: str, batch: int, messages: Sequence[Any]
) -> Any:
    """Ask the bus for the transaction; return its answer. It may be asked again and again.

    Raises:
        UsageError: the bus refuses it, with the bus's own code; nothing is published.
        PolybusError: the bus is away; whether it is published will be known when it is back.
    """
    body = {
        "producer": producer,
        "query": query,
        "batch": batch,
        "files": [one.file for one in messages if one is not None and one.file is not None],
        "take-over": options.take_over,
        "gaps": options.gaps,
    }

    def ask() -> Any:
        token = token_of(options.where)
        return request_json(
            url_of(options.where),
            "POST",
            "/v1/commits",
            body,
            token=token,
            timeout_s=COMMIT_TIMEOUT_S,
        )

    return persist(ask, timeout_s=PATIENCE_S)


def _unstage_all(options: SinkOptions, producer: str, messages: Sequence[Any]) -> None:
    for one in messages:
        if one is not None and one.file is not None:
            unstage(options.where, producer, one.file)


def _check_topic(options: SinkOptions, *, wait: bool) -> None:
    """Say at once, and not after an hour's work, that there is no such topic."""
    if options.topic is None:
        return
    path = f"/v1/topics/{quote(options.topic, safe='')}"
    try:
        request_json(url_of(options.where), "GET", path, token=token_of(options.where))
    except PolybusError as error:
        if error.code == "topic.unknown":
            text = f"option topic: there is no topic {options.topic!r} on the bus; create it first"
            raise UsageError("topic.unknown", text) from error
        # A stream waits for its bus with the data in hand; a batch write is better not begun.
        if error.code in GONE and not wait:
            return
        raise


def sync_checkpoint(checkpoint: Checkpoint, batch: int) -> None:
    """Make Spark's plan of the batch durable before the bus has the batch's messages.

    Raises:
        StorageError: `sink.checkpoint`; nothing is committed then.
    """
    try:
        checkpoint.sync_batch(batch)
    except OSError as error:
        text = f"option checkpointLocation: cannot sync the plan of batch {batch}: {error}"
        raise StorageError("sink.checkpoint", text) from error
