"""Marks columns of a Parquet file as VARIANT, which pyarrow cannot do.

pyarrow writes a VARIANT as a struct of two binaries. Spark takes the type from the table's schema,
but DuckDB takes it from the file. Only one field of the footer is missing: the logical type in the
column's schema element. pyarrow can write a field id there, so the file is written with an id that
nobody else uses, and the id is then replaced by the logical type. Both are fields of a Thrift
struct in the compact protocol, whose first byte has the step from the field before and the type.

    SchemaElement { …, 4: name, 5: num_children, …, 9: field_id, 10: LogicalType }
    LogicalType { 16: VariantType { 1: specification_version } }
"""

import os
from pathlib import Path

import pyarrow as pa

_TAIL_BYTES = 8  # The size of the footer, and the magic.
_FIELD_ID = 0x7AB0_7AB0
# Field 9 after field 5, an i32: the id, zigzag-encoded in five groups of seven bits; struct end.
_BITS = [_FIELD_ID << 1 >> shift & 0x7F | 0x80 for shift in range(0, 35, 7)]
_MARK = bytes([(9 - 5) << 4 | 5, *_BITS[:-1], _BITS[-1] & 0x7F, 0])
# Field 10 after field 5, a struct; in it field 16 in the long form, a struct; in it field 1, a byte
# with value 1; three struct ends.
_VARIANT = bytes([(10 - 5) << 4 | 12, 12, 16 << 1, 1 << 4 | 3, 1, 0, 0, 0])


def with_mark(field: pa.Field) -> pa.Field:
    """The column as it must be written, so that `mark_variants` finds it."""
    return field.with_metadata({**(field.metadata or {}), b"PARQUET:field_id": b"%d" % _FIELD_ID})


def mark_variants(path: Path, count: int) -> None:
    """Make the columns of `with_mark` VARIANT in the footer. No reader may use the file yet."""
    with path.open("r+b") as file:
        file.seek(-_TAIL_BYTES, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        magic = file.read(4)
        start = file.seek(-_TAIL_BYTES - size, os.SEEK_END)
        # The schema is first in a footer. Statistics, which have values of users, are after it.
        footer = file.read(size).replace(_MARK, _VARIANT, count)
        file.seek(start)
        file.write(footer + len(footer).to_bytes(4, "little") + magic)
