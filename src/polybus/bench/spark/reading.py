"""A topic to a count and to Parquet, by each way there is, over the same messages."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from polybus.bench.errors import BenchError
from polybus.bench.spark.corpus import TOPIC
from polybus.bench.spark.figures import Figure
from polybus.log.layout import topic_folder
from polybus.log.reading.reader import LogReader

# The columns that history files have too: the others are the same in all rows.
COLUMNS = ("topic", "offset", "timestamp", "key", "value", "headers", "protocol", "sender")
SQL = f'SELECT count(*) AS n, sum(octet_length(value)) AS bytes FROM "{TOPIC}"'

Pair = tuple[tuple[str, float], tuple[str, float]]
"""Two contestants, ours first, and their seconds."""
Work = Callable[[], int]
"""Does the work once and returns how many rows it found."""


@dataclass(frozen=True, slots=True)
class Corpus:
    journal: Path
    history: Path
    messages: int


def measure_reading(
    spark: Any, corpus: Corpus, scratch: Path, *, rounds: int, tell: Callable[[str], None]
) -> list[Figure]:
    """Count and copy by our source and by Spark's own reader, then SQL without a JVM."""
    figures = []
    native = ("Spark's own Parquet reader, history", partial(_native, spark, corpus))
    for who, frame, bar in (
        ("our source, journal", partial(_source, spark, corpus.journal), 2.5),
        ("our source, history", partial(_source, spark, corpus.history), 2.5),
        ("polybus.spark.table, history", partial(_table, spark, corpus.history), None),
    ):
        works = {name: partial(_read_all, make) for name, make in ((who, frame), native)}
        pair = _paired(works, corpus, rounds, tell)
        figures += _against("read all columns", pair, corpus, at_most=bar)
    # The same columns for both, or one would have more to write.
    source = ("our source, journal", partial(_source, spark, corpus.journal, COLUMNS))
    works = {name: partial(_copy, make, scratch) for name, make in (source, native)}
    pair = _paired(works, corpus, rounds, tell)
    figures += _against("copy to Parquet (zstd)", pair, corpus, at_most=1.2)
    for data in (corpus.history, corpus.journal):
        works = {
            f"polybus sql, {data.name}": partial(_polybus_sql, data),
            f"DuckDB alone, {data.name}": partial(_duckdb, data),
        }
        pair = _paired(works, corpus, rounds, tell)
        figures += _against("SQL over one topic", pair, corpus, at_most=2.0)
    return figures


# The ways


def _source(spark: Any, data: Path, columns: Sequence[str] = ()) -> Any:
    frame = spark.read.format("polybus").option("data", str(data)).option("subscribe", TOPIC)
    return (frame.option("columns", ",".join(columns)) if columns else frame).load()


def _native(spark: Any, corpus: Corpus) -> Any:
    folder = topic_folder(corpus.history, TOPIC)
    files = LogReader(corpus.history).history(TOPIC).files
    return spark.read.parquet(*[str(folder / file.path) for file in files]).select(*COLUMNS)


def _table(spark: Any, data: Path) -> Any:
    from polybus.spark.tables import table

    return table(spark, TOPIC, data)


def _read_all(make: Callable[[], Any]) -> int:
    """Make Spark look at every column of every row: a mere count would leave most unread."""
    frame, seen = _counted(make())
    frame.write.format("noop").mode("overwrite").save()
    return int(seen.get["rows"])


def _copy(make: Callable[[], Any], scratch: Path) -> int:
    target = scratch / "copy"
    shutil.rmtree(target, ignore_errors=True)
    frame, seen = _counted(make())
    frame.write.option("compression", "zstd").parquet(str(target))
    return int(seen.get["rows"])


def _counted(frame: Any) -> tuple[Any, Any]:
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    seen = Observation()
    return frame.observe(seen, F.count(F.lit(1)).alias("rows")), seen


def _polybus_sql(data: Path) -> int:
    """The query on an open engine: how long a process takes to start is another question."""
    from polybus.lake import duck

    with duck.connect(data) as engine:
        return int(engine.query(SQL).fetchall()[0][0])


def _duckdb(data: Path) -> int:
    """The query by DuckDB with nothing of ours: its own Parquet reader, or pyarrow's streams."""
    import duckdb
    import pyarrow as pa

    connection = duckdb.connect()
    with _opened(connection):
        files = sorted(str(path) for path in data.glob("accounts/*/topics/*/history/*/*.parquet"))
        if files:
            names = ", ".join(f"'{name}'" for name in files)
            source = f"read_parquet([{names}])"
            return int(connection.sql(SQL.replace(f'"{TOPIC}"', source)).fetchall()[0][0])
        total = 0
        for segment in sorted(data.glob("journal/*.arrows")):
            with pa.memory_map(str(segment)) as file:
                connection.register("segment", pa.ipc.open_stream(file))
                sql = SQL.replace(f'"{TOPIC}"', "segment")
                total += int(connection.sql(sql).fetchall()[0][0])
                connection.unregister("segment")
        return total


@contextmanager
def _opened(connection: Any) -> Iterator[None]:
    try:
        yield
    finally:
        connection.close()


# Measuring


def _paired(
    works: Mapping[str, Work], corpus: Corpus, rounds: int, tell: Callable[[str], None]
) -> Pair:
    """The median seconds of both, the contestants in turn; each must find every message."""
    seconds: dict[str, list[float]] = {who: [] for who in works}
    for number in range(rounds + 1):
        for who, work in works.items():
            tell(f"{who}, round {number}" if number else f"{who}, warming up")
            began = time.perf_counter()
            rows = work()
            taken = time.perf_counter() - began
            if rows != corpus.messages:
                raise BenchError(f"{who}: {rows} rows of {corpus.messages}")
            if number:
                seconds[who].append(taken)
    ours, native = [(who, median(taken)) for who, taken in seconds.items()]
    return ours, native


def _against(
    work: str, pair: Pair, corpus: Corpus, *, at_most: float | None = None
) -> list[Figure]:
    def figure(who: str, seconds: float, ratio: float | None) -> Figure:
        return Figure(
            work=work,
            who=who,
            value=seconds,
            unit="s",
            ratio=ratio,
            at_most=None if ratio is None else at_most,
            note=f"{corpus.messages / seconds / 1e6:.2f} M rows/s",
        )

    ours, native = pair
    return [figure(*ours, ours[1] / native[1]), figure(*native, None)]
