"""Read a topic and copy it to Parquet, in each possible way, over the same messages."""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from polybus.bench import BenchError
from polybus.bench.report import BenchFigure, Target, medians, versus
from polybus.bench.spark.corpus import TOPIC, Corpus
from polybus.log.layout import topic_folder
from polybus.log.reading.reader import LogReader

# The columns that history files have too; the others have the same value in all rows.
COLUMNS = ("topic", "offset", "timestamp", "key", "value", "headers", "protocol", "sender")
SQL = f'SELECT count(*) AS n, sum(octet_length(value)) AS bytes FROM "{TOPIC}"'


def measure_reading(
    spark: Any, corpus: Corpus, *, rounds: int, tell: Callable[[str], None]
) -> list[BenchFigure]:
    """Read and copy with our source and with Spark's Parquet reader, then SQL without a JVM."""
    native = ("Spark's Parquet reader, history", partial(_native, spark, corpus))
    # The same columns for both, so that both write the same amount.
    source = ("our source, journal", partial(_source, spark, corpus.journal, COLUMNS))
    reads = [
        ("our source, journal", partial(_source, spark, corpus.journal), 2.5),
        ("our source, history", partial(_source, spark, corpus.history), 2.5),
        ("polybus.spark.table, history", partial(_table, spark, corpus.history), None),
    ]
    pairs: list[tuple[str, dict[str, Callable[[], int]], float | None]] = [
        (
            "read all columns",
            {name: partial(_read_all, make) for name, make in ((who, frame), native)},
            target,
        )
        for who, frame, target in reads
    ]
    copies = {name: partial(_copy, make, corpus.scratch) for name, make in (source, native)}
    pairs.append(("copy to Parquet (zstd)", {**copies}, 1.2))
    for data in (corpus.history, corpus.journal):
        queries = {
            f"polybus sql, {data.name}": partial(_polybus_sql, data),
            f"DuckDB alone, {data.name}": partial(_duckdb, data),
        }
        pairs.append(("SQL over one topic", {**queries}, 2.0))
    figures = []
    for work, contestants, target in pairs:
        runs = {who: partial(_seconds, who, run, corpus) for who, run in contestants.items()}
        ours, peer = medians(runs, rounds, tell, work=work, warm_up=True).items()
        goal = None if target is None else Target(value=target)
        figures += versus(work, ours, peer, "s", goal)
    return figures


def _seconds(who: str, run: Callable[[], int], corpus: Corpus) -> float:
    began = time.perf_counter()
    rows = run()
    if rows != corpus.messages:
        raise BenchError(f"{who}: {rows} rows of {corpus.messages}")
    return time.perf_counter() - began


# The contestants.


def _source(spark: Any, data: Path, columns: Sequence[str] = ()) -> Any:
    frame = spark.read.format("polybus").option("data", str(data)).option("subscribe", TOPIC)
    return (frame.option("columns", ",".join(columns)) if columns else frame).load()


def _native(spark: Any, corpus: Corpus) -> Any:
    folder = topic_folder(corpus.history, TOPIC)
    files = LogReader(corpus.history).history(TOPIC).files
    return spark.read.parquet(*[str(folder / file.path) for file in files]).select(*COLUMNS)


def _table(spark: Any, data: Path) -> Any:
    from polybus.spark.bronze import table

    return table(spark, TOPIC, data)


def _read_all(make: Callable[[], Any]) -> int:
    """Make Spark read every column of every row: a count would leave most columns unread."""
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
    """The query on an open engine, without the start of a process."""
    from polybus.lake import duck

    with duck.Engine(data) as engine:
        return int(engine.query(SQL).fetchall()[0][0])


def _duckdb(data: Path) -> int:
    """The query with DuckDB alone: its own Parquet reader, or streams of pyarrow."""
    import duckdb
    import pyarrow as pa

    with closing(duckdb.connect()) as connection:
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
