"""From the rows Spark writes to the rows the bus stages, a column at a time.

The columns are `value` (string or binary), and if wanted `topic` (string), `key` (string or
binary) and `headers` (a map, or Kafka's array of structs). The other columns that the source has
are passed over, so that one topic can be copied into another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types

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
"""About so much goes into one staged record batch; a single row may be larger."""
IGNORED = ("partition", "offset", "timestamp", "protocol", "sender", "epoch")
_HEADERS = SCHEMA.field("headers").type


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """What is written where: `topic` is the option, for all rows."""

    topic: str | None
    has_key: bool
    has_headers: bool

    def staged(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows as they are staged, each record batch of one topic and a bounded size.

        Raises:
            UsageError: `sink.column`, a topic or value is null; `topic.invalid`.
        """
        if not rows.num_rows:
            return
        value = rows.column("value").cast(pa.binary())
        if value.null_count:
            raise _column("value", "is null in a row; leave such rows out or fill them")
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
            raise _column("topic", "is null in a row; set it, or the option topic")
        codes = column.dictionary_encode()
        topics = codes.dictionary.to_pylist()
        if len(topics) == 1:
            yield topics[0], whole
            return
        # A stable sort: the rows of a topic keep their order.
        order = pc.array_sort_indices(codes.indices)
        ordered = whole.take(order)
        counts = {one["values"]: one["counts"] for one in codes.indices.value_counts().to_pylist()}
        first = 0
        for code, name in enumerate(topics):
            yield name, ordered.slice(first, counts[code])
            first += counts[code]


def sink_columns(schema: types.StructType, topic: str | None) -> SinkColumns:
    """Check what is to be written, before anything is.

    Raises:
        UsageError: `sink.column`, naming the column and what it should be.
    """
    found = {field.name.lower(): field.dataType for field in schema.fields}
    given = ", ".join(found)
    if "value" not in found:
        hint = "make one, for example with to_json(struct('*')) AS value"
        raise _column("value", f"is missing among {given}; {hint}")
    if topic is None and "topic" not in found:
        raise _column("topic", f"is missing among {given}; add it, or set the option topic")
    for name in found:
        if name not in (*SCHEMA.names, *IGNORED):
            text = f"is none of {', '.join(SCHEMA.names)}: put it into value, or leave it out"
            raise _column(name, text)
    text_or_bytes = (types.StringType, types.BinaryType)
    _check(found, "value", text_or_bytes, "string or binary; to_json or cast make it so")
    _check(found, "key", text_or_bytes, "string or binary")
    if topic is None:
        _check(found, "topic", (types.StringType,), "string")
    headers = found.get("headers")
    if headers is not None and not _are_headers(headers):
        text = f"is {headers.simpleString()}; it must be map<string,binary> or map<string,string>"
        raise _column("headers", text)
    return SinkColumns(topic, "key" in found, headers is not None)


def _check(
    found: dict[str, types.DataType], name: str, kinds: tuple[type, ...], wanted: str
) -> None:
    kind = found.get(name)
    if kind is not None and not isinstance(kind, kinds):
        raise _column(name, f"is {kind.simpleString()}; it must be {wanted}")


def _are_headers(kind: types.DataType) -> bool:
    text_or_bytes = (types.StringType, types.BinaryType)
    if isinstance(kind, types.MapType):
        is_named = isinstance(kind.keyType, types.StringType)
        return is_named and isinstance(kind.valueType, text_or_bytes)
    if not isinstance(kind, types.ArrayType) or not isinstance(kind.elementType, types.StructType):
        return False
    fields = kind.elementType.fields
    if [field.name.lower() for field in fields] != ["key", "value"]:
        return False
    return isinstance(fields[0].dataType, types.StringType) and isinstance(
        fields[1].dataType, text_or_bytes
    )


def _headers(column: pa.Array) -> pa.Array:
    """A map, of a map or of an array of structs of key and value."""
    if pa.types.is_map(column.type):
        keys, items = column.keys, column.items
    else:
        flat = column.values
        keys, items = flat.field(0), flat.field(1)
    if keys.null_count or items.null_count:
        raise _column("headers", "has a name or a value that is null")
    plain = pa.MapArray.from_arrays(column.offsets, keys.cast(pa.string()), items.cast(pa.binary()))
    if not column.null_count:
        return plain
    return pc.if_else(pc.is_valid(column), plain, pa.scalar(None, _HEADERS))


def _cut(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Pieces of about BATCH_BYTES, of one row at least."""
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
