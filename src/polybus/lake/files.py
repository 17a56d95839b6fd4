"""The Parquet files of a lake table: what a table records about one, and how one is written.

Columns, row count and statistics come from the footer of a file.

pyarrow writes a VARIANT as a struct of two binaries. Spark takes the type from the table's schema,
but DuckDB takes it from the file. Only one field of the footer is missing: the logical type in the
column's schema element. pyarrow can write a field id there, so the file is written with an id that
nobody else uses, and the id is then replaced by the logical type. Both are fields of a Thrift
struct in the compact protocol, whose first byte has the step from the field before and the type.

    SchemaElement { …, 4: name, 5: num_children, …, 9: field_id, 10: LogicalType }
    LogicalType { 16: VariantType { 1: specification_version } }
"""

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from polybus.errors import StorageError

ROW_GROUP_ROWS = 128 << 10
SPARK_TYPE = b"spark.type"
"""Field metadata: Spark's name of a column's type, for types that Arrow lacks (VARIANT)."""
_SPARK_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"
_EMPTY_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_TAIL_BYTES = 8  # The size of the footer, and the magic.
_FIELD_ID = 0x7AB0_7AB0
_ID = {b"PARQUET:field_id": b"%d" % _FIELD_ID}
# Field 9 after field 5, an i32: the id, zigzag-encoded in five groups of seven bits; struct end.
_BITS = [_FIELD_ID << 1 >> shift & 0x7F | 0x80 for shift in range(0, 35, 7)]
_MARK = bytes([(9 - 5) << 4 | 5, *_BITS[:-1], _BITS[-1] & 0x7F, 0])
# Field 10 after field 5, a struct; in it field 16 in the long form, a struct; in it field 1, a byte
# with value 1; three struct ends.
_VARIANT = bytes([(10 - 5) << 4 | 12, 12, 16 << 1, 1 << 4 | 3, 1, 0, 0, 0])


class TableFile(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A file of a table, as a version lists it.

    `ranges` are the smallest and the largest value of columns by which readers skip files:
    `offset`, and timestamps in microseconds since 1970.
    """

    path: str
    rows: int
    bytes: int
    ranges: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class FileNote:
    """A file in the table's folder that is not yet part of the table."""

    file: TableFile
    schema: pa.Schema


def note_of(
    folder: Path, path: str, partition_types: Mapping[str, pa.DataType] | None = None
) -> FileNote:
    """Describe the file `folder/path` by its footer.

    Columns in folder names (`topic=orders/`) are text unless `partition_types` has their type.

    Raises:
        StorageError: `lake.damaged`, it is not a complete Parquet file.
    """
    full = folder / path
    try:
        footer = pq.read_metadata(full)
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError("lake.damaged", f"{full}: {error}") from error
    schema = plain_schema(footer.schema.to_arrow_schema())
    for name in partition_values(path):
        schema = schema.append(pa.field(name, (partition_types or {}).get(name, pa.string())))
    file = TableFile(
        path=path, rows=footer.num_rows, bytes=full.stat().st_size, ranges=_ranges(footer)
    )
    return FileNote(file, schema)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The columns, all nullable, with no metadata but the type names of Spark."""
    known = json.loads((schema.metadata or {}).get(_SPARK_SCHEMA, b'{"fields": []}'))
    types = {field["name"]: field["type"] for field in known["fields"]}
    fields = []
    for field in schema:
        named = types.get(field.name)
        metadata = None if named is None else {SPARK_TYPE: json.dumps(named).encode()}
        # Keep a known type name: the schema of a version passes through here too.
        kept = {SPARK_TYPE: field.metadata[SPARK_TYPE]} if _has_spark_type(field) else None
        fields.append(pa.field(field.name, field.type, metadata=metadata or kept))
    return pa.schema(fields)


def _has_spark_type(field: Any) -> bool:
    return field.metadata is not None and SPARK_TYPE in field.metadata


def is_variant(field: Any) -> bool:
    """Whether a column is VARIANT, which in Arrow is a struct of two binaries."""
    return _has_spark_type(field) and field.metadata[SPARK_TYPE] == b'"variant"'


def partition_values(path: str) -> dict[str, str | None]:
    """The columns in the names of a file's folders: `date=2026-01-31/part.parquet`."""
    found: dict[str, str | None] = {}
    for part in Path(path).parent.parts:
        name, equals, value = part.partition("=")
        if equals:
            text = unquote(value)
            found[unquote(name)] = None if text == _EMPTY_PARTITION else text
    return found


def partition_folder(values: Mapping[str, object]) -> str:
    """The folders of a partition, as Spark names them: `topic=orders/date=2026-01-31`."""
    return "/".join(
        f"{quote(name, safe=' $-')}="
        + (_EMPTY_PARTITION if value is None else quote(str(value), safe=" $-"))
        for name, value in values.items()
    )


def new_path(values: Mapping[str, object] | None = None) -> str:
    """A unique path for a new file."""
    name = f"{uuid.uuid4().hex}.parquet"
    folder = partition_folder(values or {})
    return f"{folder}/{name}" if folder else name


def write_file(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a file with zstd compression; its folder must exist. The commit will fsync it.

    Columns that are VARIANT by the schema's metadata are VARIANT in the file. One row group is in
    memory at a time. A failure leaves no file.
    """
    held: list[pa.RecordBatch] = []
    held_rows = 0
    fields = [
        field.with_metadata(field.metadata | _ID) if is_variant(field) else field
        for field in schema
    ]
    marked = pa.schema(fields, schema.metadata)
    try:
        with pq.ParquetWriter(
            path, marked, compression="zstd", compression_level=3, write_page_checksum=True
        ) as writer:
            for batch in batches:
                held.append(batch)
                held_rows += batch.num_rows
                if held_rows >= ROW_GROUP_ROWS:
                    writer.write_table(pa.Table.from_batches(held, schema))
                    held, held_rows = [], 0
            if held:
                writer.write_table(pa.Table.from_batches(held, schema))
        _mark_variants(path, sum(map(is_variant, schema)))
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _mark_variants(path: Path, count: int) -> None:
    """Make the first columns with the mark VARIANT. No reader may use the file yet."""
    with path.open("r+b") as file:
        file.seek(-_TAIL_BYTES, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        magic = file.read(4)
        start = file.seek(-_TAIL_BYTES - size, os.SEEK_END)
        # The schema is first in a footer. Statistics, which have values of users, are after it.
        footer = file.read(size).replace(_MARK, _VARIANT, count)
        file.seek(start)
        file.write(footer + len(footer).to_bytes(4, "little") + magic)


def _ranges(footer: Any) -> dict[str, tuple[int, int]]:
    """The ranges of `offset` and timestamp columns that have statistics in every row group."""
    wanted = [
        index for index in range(footer.num_columns) if _worth_a_range(footer.schema.column(index))
    ]
    found: dict[str, tuple[int, int]] = {}
    for index in wanted:
        name = footer.schema.column(index).name
        ends = [
            _ends(footer.row_group(group).column(index), footer.schema.column(index))
            for group in range(footer.num_row_groups)
        ]
        known = [one for one in ends if one is not None]
        if known and len(known) == len(ends):
            found[name] = (min(low for low, _ in known), max(high for _, high in known))
    return found


def _worth_a_range(column: Any) -> bool:
    if column.path != column.name:
        return False  # Part of a list, map or struct.
    if column.name == "offset":
        return bool(column.physical_type == "INT64")
    return bool(column.logical_type.type == "TIMESTAMP")


def _ends(chunk: Any, column: Any) -> tuple[int, int] | None:
    """The smallest and the largest value; timestamps in microseconds, however far from today."""
    statistics = chunk.statistics
    if statistics is None or not statistics.has_min_max:
        return None
    # As numbers: Parquet and Spark have times that Python's datetime cannot hold.
    low, high = int(statistics.min_raw), int(statistics.max_raw)
    if column.name == "offset":
        return low, high
    kind = json.loads(column.logical_type.to_json())
    if not kind["isAdjustedToUTC"]:
        return None
    match kind["timeUnit"]:
        case "milliseconds":
            return low * 1000, high * 1000
        case "nanoseconds":
            return low // 1000, high // 1000
    return low, high
