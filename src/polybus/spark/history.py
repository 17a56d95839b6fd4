"""Which messages Spark's own Parquet reader reads, for `format("polybus")` and for `table`.

A Python source sends every column of every row to Java through a socket, because Spark does not
report which columns a query needs. The history of a topic is Parquet, so Spark reads that by
itself: only the columns and the row groups that the query needs, and with filters that belong to
one use of a DataFrame and not to all of them. The source reads the rest. Both parts meet at an
offset, so each message appears once, even while the bus hands over its journal: files that are read
natively are never replaced.

The source reads a file that may be replaced by a larger one (`settled_files`), or that has a row
group larger than the largest value that a session can hold: Java would read it completely.

The columns that have one value for a topic are constants of the plan. So a condition on `topic`
removes other topics from the plan before anything is read.
"""

import json
from collections.abc import Mapping
from functools import lru_cache, reduce
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F

from polybus.errors import PolybusError
from polybus.log.history.manifest import HISTORY, HistoryFile, Manifest
from polybus.log.layout import topic_folder
from polybus.spark.source.options import (
    COLUMNS,
    CONSTANT,
    PARTITION,
    VALUE_BYTES_MAX,
    SourceOptions,
    parse,
    spark_schema,
)
from polybus.spark.source.positions import TopicPositions
from polybus.spark.tables import read_files

SOURCE = "polybus"
TOPICS_MAX = 16
"""With more topics, the source reads everything: each topic would be a branch of the plan."""
_FOOTERS_MAX = 10_000
_STORED = [name for name in COLUMNS if name not in CONSTANT]
_STARTS = ("startingoffsets", "startingtimestamp", "startingoffsetsbytimestampstrategy")


def native_files(history: Manifest, folder: Path) -> tuple[HistoryFile, ...]:
    """The files of a topic that Spark may read by itself: all before some offset, or none."""
    settled = history.settled_files
    if any(largest_group(folder / file.path) > VALUE_BYTES_MAX for file in settled):
        return ()
    return settled


@lru_cache(_FOOTERS_MAX)  # a file never changes
def largest_group(path: Path) -> int:
    """The bytes of the largest row group of a file; too many if it cannot be read."""
    try:
        metadata = pq.read_metadata(path)
    except (OSError, pa.ArrowException):
        return VALUE_BYTES_MAX + 1
    groups = range(metadata.num_row_groups)
    return max((metadata.row_group(one).total_byte_size for one in groups), default=0)


def read_history(
    spark: SparkSession, data: Path, topic: str, epoch: int, files: tuple[HistoryFile, ...]
) -> DataFrame:
    """The messages of some files, with the columns of the source and `date`."""
    folder = topic_folder(data, topic).absolute()
    schema = spark_schema(_STORED).add("date", "date")
    rows = read_files(spark, schema, folder / HISTORY, [folder / file.path for file in files])
    constants: dict[str, Column] = {
        "topic": F.lit(topic),
        "partition": F.lit(PARTITION),
        "epoch": F.lit(epoch).cast("long"),
    }
    return rows.withColumns(constants).select(*COLUMNS, "date")


def load(spark: SparkSession, given: Mapping[str, str]) -> DataFrame | None:
    """The DataFrame of `format("polybus")` with these options; None if the source must read all.

    The source reports every mistake in the options, so that the error is the same everywhere.
    """
    try:
        options = parse(given, streaming=False)
        if not _fits(options):
            return None
        return _load(spark, options, given)
    except (PolybusError, AnalysisException):
        return None


def _fits(options: SourceOptions) -> bool:
    """Whether Spark's reader supports all given options."""
    is_default = not options.push_filters and options.fail_on_data_loss and options.headers
    has_tasks = options.min_partitions is not None or options.max_records is not None
    # A pattern also selects topics that are created later, and these need the time.
    is_open = options.pattern is not None and options.starting_us is not None
    return (
        options.location.has_log_files
        and is_default
        and options.value_bytes_max >= VALUE_BYTES_MAX
        and set(options.columns) <= set(COLUMNS)
        and not has_tasks
        and not is_open
    )


def _load(
    spark: SparkSession, options: SourceOptions, given: Mapping[str, str]
) -> DataFrame | None:
    positions, data = TopicPositions(options), options.location.data
    found = positions.matching(strict=True)
    if len(found) > TOPICS_MAX:
        return None
    parts, starts = [], {}
    for topic, bounds in found.items():
        begin, end = positions.begin(topic, bounds), positions.end(topic, bounds)
        history = positions.origin.history(topic)
        files = native_files(history, topic_folder(data, topic))
        stop = min(end, files[-1].last + 1) if files else begin
        files = tuple(file for file in files if file.last >= begin and file.first < stop)
        starts[topic] = max(begin, stop)
        if files and history.epoch == bounds.epoch:
            rows = read_history(spark, data, topic, history.epoch, files)
            if files[0].first < begin or files[-1].last >= stop:
                rows = rows.where((F.col("offset") >= begin) & (F.col("offset") < stop))
            parts.append(rows.select(*options.columns))
    if not parts:
        return None
    kept = {name: value for name, value in given.items() if name.lower() not in _STARTS}
    rest = DataFrameReader(spark).format(SOURCE).options(**kept, startingOffsets=json.dumps(starts))
    return reduce(DataFrame.unionAll, parts, rest.load())
