"""What Spark sees of a message: the columns, as Spark and as Arrow name their types.

Spark refuses a record batch whose schema is not exactly its own: this order, 32-bit binary and
string, everything nullable, microseconds in UTC.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_COLUMNS = {
    "topic": (StringType(), pa.string()),
    "partition": (IntegerType(), pa.int32()),
    "offset": (LongType(), pa.int64()),
    "timestamp": (TimestampType(), pa.timestamp("us", "UTC")),
    "key": (BinaryType(), pa.binary()),
    "value": (BinaryType(), pa.binary()),
    "headers": (MapType(StringType(), BinaryType()), pa.map_(pa.string(), pa.binary())),
    "protocol": (StringType(), pa.string()),
    "sender": (StringType(), pa.string()),
    "epoch": (LongType(), pa.int64()),
}
COLUMNS = tuple(_COLUMNS)
MADE = ("topic", "partition", "epoch")
"""The columns that have one value for all rows of a topic, and are not read from the log."""
PARTITION = 0
"""A topic of polybus has one order, so it is one partition."""


def spark_schema(columns: Sequence[str] = COLUMNS) -> StructType:
    return StructType([StructField(name, _COLUMNS[name][0], True) for name in columns])


def arrow_schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    return pa.schema([pa.field(name, _COLUMNS[name][1], True) for name in columns])


SPARK = spark_schema()
ARROW = arrow_schema()
