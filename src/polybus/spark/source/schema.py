"""The columns of a message, with their types in Spark and in Arrow.

Spark refuses a record batch whose schema is not exactly its own: this order, 32-bit binary and
string, everything nullable, microseconds in UTC.
"""

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import types as T

_COLUMNS = {
    "topic": (T.StringType(), pa.string()),
    "partition": (T.IntegerType(), pa.int32()),
    "offset": (T.LongType(), pa.int64()),
    "timestamp": (T.TimestampType(), pa.timestamp("us", "UTC")),
    "key": (T.BinaryType(), pa.binary()),
    "value": (T.BinaryType(), pa.binary()),
    "headers": (T.MapType(T.StringType(), T.BinaryType()), pa.map_(pa.string(), pa.binary())),
    "protocol": (T.StringType(), pa.string()),
    "sender": (T.StringType(), pa.string()),
    "epoch": (T.LongType(), pa.int64()),
}
COLUMNS = tuple(_COLUMNS)
CONSTANT = ("topic", "partition", "epoch")
"""The columns that have one value for all rows of a topic, and are not read from the log."""
PARTITION = 0
"""A topic has one order of messages, so it has one partition."""


def spark_schema(columns: Sequence[str] = COLUMNS) -> T.StructType:
    return T.StructType([T.StructField(name, _COLUMNS[name][0], True) for name in columns])


def arrow_schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    return pa.schema([pa.field(name, _COLUMNS[name][1], True) for name in columns])
