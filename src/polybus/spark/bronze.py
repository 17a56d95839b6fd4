"""Bronze: a topic as a table, which is the log itself and not a copy of it.

Spark's own Parquet reader reads the history files of one manifest. Newer messages, and files that
may still be merged into larger ones, come through our source. Both parts meet at the same offset,
so each message appears once, even while the bus hands over its journal: files that are read
natively are never replaced. Retention may remove one before it is read. Then the query fails with
the name of the file, and works again with a new table.

A table has the columns of the source and `date`, the day of the message in UTC. History has a
folder for each day, so `WHERE date = '2026-01-31'` opens no file of another day. Conditions on
`offset` and `timestamp` skip what the statistics of the files exclude.
"""

import json
from pathlib import Path

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from polybus import names
from polybus.errors import StorageError
from polybus.log.history.manifest import Manifest
from polybus.log.history.parquet import HISTORY
from polybus.log.layout import topic_folder
from polybus.log.reading.reader import LogReader
from polybus.spark.location import find_location
from polybus.spark.source.schema import COLUMNS, spark_schema
from polybus.spark.tables import read_files

_ATTEMPTS_MAX = 3
DAY_US = 86_400_000_000
_STORED = [name for name in COLUMNS if name not in ("partition", "epoch")]


def table(
    spark: SparkSession, topic: str, data: Path | None = None, url: str | None = None
) -> DataFrame:
    """All messages of a topic, each once.

    The table has what the topic held when this was called, or a moment later. Call it again for
    newer messages. Without `data` (the data folder) and `url`, the log is located as by the source.
    With `url` all messages come over HTTP.

    Raises:
        UsageError: `topic.unknown`, `data.not-found`.
        StorageError: `log.damaged`, a file that the manifest names does not exist.
    """
    name = names.canonical(topic)
    if url is not None:
        return _source(spark, name, {"url": url})
    return history_and_rest(spark, LogReader(data_folder(data)), name)


def history_and_rest(spark: SparkSession, reader: LogReader, topic: str) -> DataFrame:
    """A topic by one snapshot of its manifest, and the messages after it; raises as `table`."""
    for _ in range(_ATTEMPTS_MAX):
        history = reader.history(topic)
        try:
            return _of_snapshot(spark, topic, history, reader.data)
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            # Retention has just removed it: the next manifest does not name it.
            missing = str(error.getMessageParameters().get("path"))
    text = f"topic {topic!r}: the manifest names {missing}, which does not exist"
    raise StorageError("log.damaged", text)


def _of_snapshot(spark: SparkSession, topic: str, history: Manifest, data: Path) -> DataFrame:
    settled = history.settled_files
    if not settled:
        return _source(spark, topic, {"data": str(data)})
    starting = json.dumps({topic: settled[-1].last + 1})
    rest = _source(spark, topic, {"data": str(data), "startingOffsets": starting})
    folder = topic_folder(data, topic).absolute()
    schema = spark_schema(_STORED).add("date", "date")
    rows = read_files(spark, schema, folder / HISTORY, [folder / file.path for file in settled])
    constants = {"partition": F.lit(0), "epoch": F.lit(history.epoch).cast("long")}
    return rows.withColumns(constants).select(*COLUMNS, "date").unionAll(rest)


def data_folder(data: Path | None) -> Path:
    """The given data folder, or the one that the source locates. Raises `data.not-found`."""
    return find_location({}).data if data is None else Path(data)


def _source(spark: SparkSession, topic: str, options: dict[str, str]) -> DataFrame:
    rows = spark.read.format("polybus").options(subscribe=topic, **options).load()
    # The day in UTC, as in the folders of history, whatever the session's time zone is.
    days = F.expr(f"CAST(unix_micros(timestamp) DIV {DAY_US} AS INT)")
    return rows.withColumn("date", F.date_from_unix_date(days))
