"""Staging: the rows of a task, durable in a separate file, not yet visible.

The columns are `value` (string or binary), and optionally `topic` (string), `key` (string or
binary) and `headers` (a map, or an array of structs as in Kafka). Other columns of the source are
ignored, so that one topic can be copied into another. All work is done a column at a time.

If the data folder of the bus is on this machine, the file is written into it. Otherwise, or with
the token of an account, it is written to a temporary file and uploaded: with several nodes to two
of them, because a node commits only its own staged files, and only the task has the rows. The
driver's commit makes the rows visible.

Order of writes: the folders, the file, its rows; then fsyncs of the file and of every folder up to
the data folder, and only then the name is sent to the driver. No other process knows the name of a
file that a crash leaves unfinished, and the bus removes it after a day.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T
from pyspark.sql.datasource import WriterCommitMessage

from polybus import names
from polybus.errors import BusyError, PolybusError, UsageError
from polybus.log.disk import Disk, sync_path
from polybus.log.topics import storage_error
from polybus.services.transactions.staging import SCHEMA, cut, staging_folder
from polybus.spark.location import BusLocation, Retry
from polybus.spark.nodes import MOVES

PIECE_BYTES = 4 << 20
PATIENCE_S = 30.0
"""How long a task, or the driver, waits for an unavailable bus."""
COPIES = 2
"""If there are several nodes, rows are staged at two: one may die before the commit."""
_CREATE_ATTEMPTS = 5
IGNORED = ("partition", "offset", "timestamp", "protocol", "sender", "epoch")
TYPES = {
    "topic": ("string", "string"),
    "key": ("string|binary", "string or binary"),
    "value": ("string|binary", "string or binary; convert it with to_json or cast"),
    "headers": (
        r"map<string,(string|binary)>|array<struct<key:string,value:(string|binary)>>",
        "map<string,binary> or map<string,string>",
    ),
}
"""By column: the accepted types as a pattern, and in words."""
_HEADERS = SCHEMA.field("headers").type


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """The optional columns that rows have; `topic` is the option, which then counts for all."""

    topic: str | None
    has_key: bool
    has_headers: bool

    def staged(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows as they are staged: each record batch has one topic and a bounded size.

        Raises:
            UsageError: `sink.column`, a topic or value is null; `topic.invalid`.
        """
        if not rows.num_rows:
            return
        value = rows.column("value").cast(pa.binary())
        if value.null_count:
            raise _column("value", "is null in a row; filter such rows out, or set a value")
        key = pa.nulls(rows.num_rows, pa.binary())
        if self.has_key:
            key = rows.column("key").cast(pa.binary())
        headers = pa.nulls(rows.num_rows, _HEADERS)
        if self.has_headers:
            headers = _headers(rows.column("headers"))
        topic = pa.nulls(rows.num_rows, pa.string())
        whole = pa.record_batch([topic, key, value, headers], schema=SCHEMA)
        for name, part in self._by_topic(rows, whole):
            named = pa.repeat(pa.scalar(names.canonical(name), pa.string()), part.num_rows)
            yield from cut(part.set_column(0, SCHEMA.field("topic"), named))

    def _by_topic(
        self, rows: pa.RecordBatch, whole: pa.RecordBatch
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self.topic is not None:
            yield self.topic, whole
            return
        column = rows.column("topic").cast(pa.string())
        if column.null_count:
            raise _column("topic", "is null in a row; set it, or set option topic")
        codes = column.dictionary_encode()
        topics = codes.dictionary.to_pylist()
        if len(topics) > 1:
            # A stable sort: the rows of a topic keep their order.
            order = pc.array_sort_indices(codes.indices)
            whole, codes = whole.take(order), codes.take(order)
        runs = pc.run_end_encode(codes.indices)
        first = 0
        for code, stop in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            yield topics[code], whole.slice(first, stop - first)
            first = stop


def sink_columns(schema: T.StructType, topic: str | None) -> SinkColumns:
    """Check the columns before anything is written.

    Raises:
        UsageError: `sink.column`, naming the column and what it should be.
    """
    found = {field.name.lower(): field.dataType for field in schema.fields}
    given = ", ".join(found)
    if "value" not in found:
        hint = "create it, for example with to_json(struct('*')) AS value"
        raise _column("value", f"is missing among {given}; {hint}")
    if topic is None and "topic" not in found:
        raise _column("topic", f"is missing among {given}; add it, or set option topic")
    for name, kind in found.items():
        if name in IGNORED or (name == "topic" and topic is not None):
            continue
        if name not in TYPES:
            text = f"is not one of {', '.join(SCHEMA.names)}; put it into value, or remove it"
            raise _column(name, text)
        pattern, wanted = TYPES[name]
        plain = re.sub(r" collate \w+", "", kind.simpleString().lower())
        if not re.fullmatch(pattern, plain):
            raise _column(name, f"is {kind.simpleString()}; it must be {wanted}")
    return SinkColumns(topic, "key" in found, "headers" in found)


def _headers(column: pa.Array) -> pa.Array:
    """Headers as a map, from a map or from an array of structs of key and value."""
    if pa.types.is_map(column.type):
        keys, items = column.keys, column.items
    else:
        keys, items = column.values.field(0), column.values.field(1)
    if keys.null_count or items.null_count:
        raise _column("headers", "has a name or a value that is null; remove such headers")
    plain = pa.MapArray.from_arrays(column.offsets, keys.cast(pa.string()), items.cast(pa.binary()))
    if not column.null_count:
        return plain
    return pc.if_else(pc.is_valid(column), plain, pa.scalar(None, _HEADERS))


def _column(name: str, text: str) -> UsageError:
    return UsageError("sink.column", f"column {name} {text}")


@dataclass
class StagedFile(WriterCommitMessage):
    """The staged file of a task, or None if it had no rows; and the nodes that have it."""

    name: str | None
    producer: str
    query: str
    nodes: tuple[str, ...] = ()


def stage(
    rows: Iterator[pa.RecordBatch],
    columns: SinkColumns,
    location: BusLocation,
    writer: tuple[str, str],
    batch: int,
) -> StagedFile:
    """Stage all rows of a writer, which is a producer and a query.

    When this returns, the rows survive a power cut. If it raises, no file is left.

    Raises:
        UsageError: `sink.column`; `topic.invalid`; `data.not-found`.
        StorageError: the disk is full or fails; the text names the file.
        PolybusError: the bus is away.
    """
    producer = writer[0]
    name = f"{batch}-{uuid4().hex}.arrows"
    if not location.is_local:
        with tempfile.TemporaryFile() as file:
            if not _write(file, Path(tempfile.gettempdir()), rows, columns):
                return StagedFile(None, *writer)
            nodes = _upload_copies(file, location, f"/v1/staging/{producer}/{name}")
        return StagedFile(name, *writer, nodes)
    if not location.is_folder_here:
        text = f"{location.data} is not a data folder on this machine"
        advice = "if tasks run on other machines, set option url instead of data"
        raise UsageError("data.not-found", f"{text}; {advice}")
    folder = staging_folder(location.data) / producer
    path = folder / name
    try:
        with _created(path) as file:
            has_rows = _write(file, path, rows, columns)
            os.fsync(file.fileno())
        if not has_rows:
            path.unlink()
            return StagedFile(None, *writer)
        for one in (folder, folder.parent, location.data):
            sync_path(one)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_error(error, f"cannot stage {path}") from error
        raise
    return StagedFile(name, *writer)


def _created(path: Path) -> IO[bytes]:
    for _ in range(_CREATE_ATTEMPTS):
        Disk().make_folder(path.parent)
        # The bus removes the empty folder of a producer, perhaps at this moment.
        with contextlib.suppress(FileNotFoundError):
            return path.open("xb")
    return path.open("xb")


def _write(
    file: IO[bytes], path: Path, rows: Iterator[pa.RecordBatch], columns: SinkColumns
) -> bool:
    """Write the rows; return whether there were any."""
    has_rows = False
    try:
        with pa.ipc.new_stream(file, SCHEMA) as writer:
            for batch in rows:
                for part in columns.staged(batch):
                    writer.write_batch(part)
                    has_rows = True
        file.flush()
    except OSError as error:
        raise storage_error(error, f"cannot stage {path}") from error
    return has_rows


def _upload_copies(file: IO[bytes], location: BusLocation, path: str) -> tuple[str, ...]:
    """Upload the file; with several nodes to COPIES of those that answer, which are returned."""
    if not location.others:
        _upload(file, location, path, patience_s=PATIENCE_S)
        return ()
    retry = Retry(PATIENCE_S, others=location.others)
    while True:
        done: list[str] = []
        for node in location.each_node():
            url, _ = node.address()
            try:
                with location.leaving(url):
                    _upload(file, node, path, patience_s=0.0)
                done.append(url)
            except PolybusError as error:
                if error.code not in MOVES and not isinstance(error, BusyError):
                    raise
                last = error
            if len(done) == COPIES:
                break
        if done:
            return tuple(done)
        retry.wait(last)


def _upload(file: IO[bytes], location: BusLocation, path: str, *, patience_s: float) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    for position in range(0, size, PIECE_BYTES):
        piece = file.read(PIECE_BYTES)
        is_last = position + len(piece) == size
        query = f"?position={position}&end={'true' if is_last else 'false'}"
        # Idempotent: the bus ignores a piece that it has at that position.
        location.call("POST", path + query, piece, patience_s=patience_s)
