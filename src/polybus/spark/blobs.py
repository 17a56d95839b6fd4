"""Large payloads in Spark: the reference in a message, and the bytes that it refers to.

    films = spark.read.format("polybus").option("subscribe", "films").load()
    rows = polybus.spark.with_reference(films)
    rows.select("offset", "reference.size", polybus.spark.blob("reference"))

The executors read the bytes: from the data folder, if it has the log and no account's token is
given, or over HTTP, where the bus checks permissions. Each block is verified as it is read. A blob
larger than `bytes_max` ends the query: a value in Spark is in memory as a whole.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from polybus import references
from polybus.errors import UsageError
from polybus.log.blobs import unknown_blob
from polybus.spark.location import BusLocation, find_location, retried
from polybus.spark.origin import opened_blob
from polybus.spark.source.options import REFERENCE, VALUE_BYTES_MAX, spark_schema

PATIENCE_S = 30.0
_KEY = references.HEADER


def with_reference(df: DataFrame) -> DataFrame:
    """The rows of a topic with the column `reference`: id, size, sha256 and type, or null.

    It needs the columns `value` and `headers`.
    """
    inside = T.StructType([T.StructField(REFERENCE, spark_schema([REFERENCE])[0].dataType)])
    parsed = F.from_json(F.col("value").cast("string"), inside)[REFERENCE]
    is_marked = F.coalesce(F.map_contains_key("headers", _KEY), F.lit(False))
    return df.withColumn(REFERENCE, F.when(is_marked, parsed))


def blob(
    column: Column | str,
    *,
    data: Path | None = None,
    url: str | None = None,
    token: str | None = None,
    bytes_max: int = VALUE_BYTES_MAX,
) -> Column:
    """The bytes that a column of references, or of ids, refers to; null for null.

    Without `data` (the data folder) and `url`, the bus is located as for the source.

    Raises, in the query:
        UsageError: `blob.unknown`; `spark.value-too-large`, the blob is over `bytes_max`.
        StorageError: `blob.damaged`.
    """
    given = {"data": data, "url": url, "token": token}
    where = find_location({name: str(one) for name, one in given.items() if one is not None})
    read = F.udf(_reader(where, bytes_max), T.BinaryType())
    return read(F.col(column) if isinstance(column, str) else column)


def _reader(where: BusLocation, bytes_max: int) -> Callable[[Any], bytes | None]:
    def read(found: Any) -> bytes | None:
        if found is None:
            return None
        blob_id = found if isinstance(found, str) else found["id"]
        if not references.is_blob_id(blob_id):
            raise unknown_blob()
        return read_blob(where, blob_id, bytes_max)

    return read


def read_blob(where: BusLocation, blob_id: str, bytes_max: int = VALUE_BYTES_MAX) -> bytes:
    """All bytes of a blob. Raises as `blob` does."""

    def read() -> bytes:
        with opened_blob(where, blob_id) as (size, pieces):
            _check(blob_id, size, bytes_max)
            return b"".join(pieces)

    return read() if where.is_local else retried(read, patience_s=PATIENCE_S)


def _check(blob_id: str, size: int, bytes_max: int) -> None:
    if size > bytes_max:
        text = f"blob {blob_id} has {size} bytes, over bytes_max ({bytes_max})"
        raise UsageError("spark.value-too-large", f"{text}; give Spark more memory and raise it")
