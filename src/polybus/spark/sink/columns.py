"""Which columns the sink accepts, and how they become the rows that the bus stages.

The columns are `value` (string or binary), and optionally `topic` (string), `key` (string or
binary) and `headers` (a map, or an array of structs as in Kafka). Other columns of the source are
ignored, so that one topic can be copied into another. All work is done a column at a time.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from polybus import names
from polybus.errors import UsageError
from polybus.services.transactions.staging import (
    HEADER_WEIGHT,
    KEY_WEIGHT,
    ROW_WEIGHT,
    SCHEMA,
    header_bytes,
    headers_in,
)

BATCH_BYTES = 1 << 20
"""The approximate size of a staged record batch; a single row may be larger."""
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
            yield from _cut(part.set_column(0, SCHEMA.field("topic"), named))

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


def _cut(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Pieces of about BATCH_BYTES and at least one row."""
    name_bytes = len(rows.column(0)[0].as_py().encode())
    lengths = pc.cast(pc.binary_length(rows.column(2)), pa.int64())
    sizes = pc.add(lengths, name_bytes + ROW_WEIGHT)
    keys, headers = rows.column(1), rows.column(3)
    if keys.null_count < rows.num_rows:
        lengths = pc.fill_null(pc.binary_length(keys), 0)
        sizes = pc.add(sizes, pc.cast(pc.add(lengths, KEY_WEIGHT), pa.int64()))
    if headers.null_count < rows.num_rows:
        weights = pc.multiply(pc.cast(headers_in(headers), pa.int64()), HEADER_WEIGHT)
        sizes = pc.add(sizes, pc.add(weights, header_bytes(headers)))
    sums = memoryview(pc.cumulative_sum(sizes).buffers()[1]).cast("B").cast("q")[: rows.num_rows]
    first = 0
    while first < rows.num_rows:
        before = sums[first - 1] if first else 0
        stop = max(first + 1, bisect_right(sums, before + BATCH_BYTES, first))
        yield rows.slice(first, stop - first)
        first = stop


def _column(name: str, text: str) -> UsageError:
    return UsageError("sink.column", f"column {name} {text}")
