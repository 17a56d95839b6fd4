"""Bronze: a topic as a table, which is the log itself and not a copy of it.

History is read by Spark's own Parquet reader, from the files of one manifest; what is younger, or
may still be merged into a larger file, comes through our source. Both parts are bounded by the same
offset, so each message is there once, also while the bus hands its journal over: the files that are
read natively are never replaced. Retention may remove them; a query that meets this fails with the
file's name, and works when the table is made again.

A table has the columns of the source and `date`, the message's day in UTC: history lies in a folder
a day, so `WHERE date = '2026-01-31'` opens no file of another. Conditions on `offset` and
`timestamp` skip what the files' statistics exclude.
"""

from __future__ import annotations

import json
from pathlib import Path

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from polybus import names
from polybus.errors import StorageError
from polybus.log.history.manifest import Manifest
from polybus.log.history.parquet import HISTORY
from polybus.log.layout import topic_folder
from polybus.log.reading.reader import LogReader
from polybus.spark.location import find_location
from polybus.spark.native import read_files

_ATTEMPTS_MAX = 3
DAY_US = 86_400_000_000
COLUMNS = (
    *("topic", "partition", "offset", "timestamp", "key", "value", "headers"),
    *("protocol", "sender", "epoch", "date"),
)
_FILE_SCHEMA = T.StructType(
    [
        T.StructField("topic", T.StringType()),
        T.StructField("offset", T.LongType()),
        T.StructField("timestamp", T.TimestampType()),
        T.StructField("key", T.BinaryType()),
        T.StructField("value", T.BinaryType()),
        T.StructField("headers", T.MapType(T.StringType(), T.BinaryType())),
        T.StructField("protocol", T.StringType()),
        T.StructField("sender", T.StringType()),
        T.StructField("date", T.DateType()),
    ]
)


def table(
    spark: SparkSession, topic: str, data: Path | None = None, url: str | None = None
) -> DataFrame:
    """All messages of a topic, each once: history natively, the rest through our source.

    What is read is what the topic held when this was called, or a moment later: Spark plans the
    rest once. Call it again for what has come since.

    `data` is the log's folder; without it, and without `url`, it is found as the source finds it.
    With `url` everything comes over HTTP, through the source.

    Raises:
        UsageError: `topic.unknown`, `data.not-found`.
        StorageError: `log.damaged`, a file that the manifest names is not there.
    """
    name = names.canonical(topic)
    if url is not None:
        return _with_date(_source(spark, name, {"url": url}))
    folder = data_folder(data)
    return history_and_rest(spark, LogReader(folder), name)


def history_and_rest(spark: SparkSession, reader: LogReader, topic: str) -> DataFrame:
    """A topic by one snapshot of its manifest, and what came after it; raises as `table`."""
    for _ in range(_ATTEMPTS_MAX):
        history = reader.history(topic)
        try:
            return _of_snapshot(spark, topic, history, reader.data)
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            # Retention was quicker than we: the next manifest does not name the file.
            missing = str(error.getMessageParameters().get("path"))
    text = f"topic {topic!r}: {missing} is in the manifest and not in the folder"
    raise StorageError("log.damaged", text)


def _of_snapshot(spark: SparkSession, topic: str, history: Manifest, data: Path) -> DataFrame:
    settled = history.settled_files
    start = settled[-1].last + 1 if settled else history.start
    starting = json.dumps({topic: {"0": start}})
    options = {"data": str(data), "startingOffsets": starting if settled else "earliest"}
    rest = _with_date(_source(spark, topic, options))
    if not settled:
        return rest
    folder = topic_folder(data, topic).absolute()
    paths = [folder / file.path for file in settled]
    rows = read_files(spark, _FILE_SCHEMA, folder / HISTORY, paths)
    native = rows.withColumn("partition", F.lit(0)).withColumn(
        "epoch", F.lit(history.epoch).cast("long")
    )
    return native.select(*COLUMNS).unionAll(rest)


def data_folder(data: Path | None) -> Path:
    """The log's folder: the one named, else found as the source finds it.

    Raises:
        UsageError: `data.not-found`.
    """
    return find_location({}).data if data is None else Path(data)


def _source(spark: SparkSession, topic: str, options: dict[str, str]) -> DataFrame:
    reader = spark.read.format("polybus").option("subscribe", topic).option("includeHeaders", True)
    return reader.options(**options).load()


def _with_date(rows: DataFrame) -> DataFrame:
    # The day in UTC, as history's folders have it, whatever the session's time zone is.
    days = F.expr(f"CAST(unix_micros(timestamp) DIV {DAY_US} AS INT)")
    return rows.withColumn("date", F.date_from_unix_date(days)).select(*COLUMNS)
