"""Spark and DuckDB read a topic in each possible way, over the same messages; Spark follows a bus.

The messages are in a log as the bus writes it, once in the journal and once in history.
"""

import os
import shutil
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from polybus import config
from polybus.batch import Batch
from polybus.bench import BenchError
from polybus.bench.brokers import all_brokers
from polybus.bench.measure import Bench, EntryOutcome
from polybus.bench.report import BenchFigure, Target, medians, versus
from polybus.bench.scenarios import SCENARIOS
from polybus.log.files import FileLog
from polybus.log.history.handover import hand_over
from polybus.log.layout import index_path, topic_folder
from polybus.log.opening import open_reader

TOPIC = "bench.readings"
MESSAGE_BYTES = 100
BATCH_MESSAGES = 10_000
START_US = 1_760_000_000_000_000
STEP_US = 10_000
# Enough random bytes that nothing compresses, few enough that making them costs little.
BUFFERS = 64
# The columns that history files have too; the others have the same value in all rows.
COLUMNS = ("topic", "offset", "timestamp", "key", "value", "headers", "protocol", "sender")
SQL = f'SELECT count(*) AS n, sum(octet_length(value)) AS bytes FROM "{TOPIC}"'
ROWS_PER_TRIGGER = 2_000_000
STARTED_S_MAX = 60.0
CAUGHT_UP_S_MAX = 120.0
WORK = "Spark follows the bus at full speed"


# The messages.


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two data folders with the same messages, and a folder for temporary files."""

    journal: Path
    history: Path
    scratch: Path
    messages: int


def write_corpus(folder: Path, messages: int, tell: Callable[[str], None]) -> Corpus:
    """Write the messages to a journal, and a copy of it to history."""
    journal, history = folder / "journal", folder / "history"
    journal.mkdir(parents=True)
    _write_log(journal, messages, tell)
    shutil.copytree(journal, history)
    for segment in hand_over(history):
        segment.unlink()
        index_path(segment).unlink()
    return Corpus(journal, history, folder / "scratch", messages)


def _write_log(data: Path, messages: int, tell: Callable[[str], None]) -> None:
    now_us = START_US
    log = FileLog(
        data,
        durability="interval",
        journal=config.Journal(),
        retention=config.Retention(),
        clock=lambda: now_us,
        maintenance=False,
    )
    buffers = [os.urandom(BATCH_MESSAGES * MESSAGE_BYTES) for _ in range(BUFFERS)]
    with closing(log):
        log.create_topic(TOPIC)
        for number, first in enumerate(range(0, messages, BATCH_MESSAGES)):
            count = min(BATCH_MESSAGES, messages - first)
            batch = Batch(TOPIC, buffers[number % BUFFERS], _spans(count))
            batch.protocol, batch.sender = "boson-frames", "127.0.0.1:50000"
            now_us += STEP_US
            batch.timestamp_us = now_us
            log.append(batch)
            if number % 50 == 0:
                # Messages that are not written yet are in memory.
                log.sync()
                tell(f"writing {first / 1e6:.1f} of {messages / 1e6:g} M messages")
        log.sync()
        log.seal()


@cache
def _spans(count: int) -> Any:
    """Where each of some messages begins and ends."""
    starts = range(0, count * MESSAGE_BYTES, MESSAGE_BYTES)
    return array("i", [place for start in starts for place in (start, start + MESSAGE_BYTES)])


# Reading.


def measure_reading(
    spark: Any, corpus: Corpus, *, rounds: int, tell: Callable[[str], None]
) -> list[BenchFigure]:
    """Read and copy with our source and with Spark's Parquet reader, then SQL without a JVM."""
    native = ("Spark's Parquet reader, history", partial(_native, spark, corpus))
    # The same columns for both, so that both write the same amount.
    source = ("our source, journal", partial(_source, spark, corpus.journal, COLUMNS))
    reads = [
        ("our source, journal", partial(_source, spark, corpus.journal), 1.25),
        ("our source, history", partial(_source, spark, corpus.history), 1.25),
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
    files = open_reader(corpus.history).history(TOPIC).files
    return spark.read.parquet(*[str(folder / file.path) for file in files]).select(*COLUMNS)


def _table(spark: Any, data: Path) -> Any:
    from polybus.spark.views import table

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


# Following: a stream at full speed, and what bus and stream cost each other.


def measure_following(spark: Any, bench: Bench, tell: Callable[[str], None]) -> list[BenchFigure]:
    """The rate of the bus, alone and followed by Spark, and the rate of the stream."""
    scenario = next(one for one in SCENARIOS if one.name == "boson-1-1")
    broker = all_brokers(bench.program)["polybus"]
    outcome = EntryOutcome(scenario.entries[0], broker)
    with bench.server(broker, scenario.load) as (server, folder):
        tell("the bus alone")
        alone = bench.generate(server, scenario, outcome, scenario.load)
        query = _follow(spark, folder)
        try:
            tell("the bus, followed by Spark")
            before, began = _rows(query), time.monotonic()
            followed = bench.generate(server, scenario, outcome, scenario.load)
            # The stream's clock runs until it has read every message.
            rows = _await_rows(query, before, int(followed["delivered"]), began)
            seconds = time.monotonic() - began
        finally:
            query.stop()
    rates = [sample["delivered"] / sample["seconds"] for sample in (followed, alone)]
    bus = ("the bus, followed", rates[0]), ("the bus alone", rates[1])
    return [
        *versus(WORK, *bus, "rows/s", Target(value=0.5, at_least=True)),
        BenchFigure(
            work=WORK,
            who="the stream",
            value=rows / seconds,
            unit="rows/s",
            note="bus, generator and Spark share the cores",
        ),
    ]


def _follow(spark: Any, folder: Path) -> Any:
    stream = (
        spark.readStream.format("polybus")
        .option("data", str(folder / "data"))
        .option("subscribe", "bench.0000")
        .option("startingOffsets", "latest")
        .option("maxOffsetsPerTrigger", ROWS_PER_TRIGGER)
        .load()
    )
    query = (
        stream.writeStream.format("noop")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start()
    )
    deadline = time.monotonic() + STARTED_S_MAX
    while query.lastProgress is None:
        _check(query)
        if time.monotonic() > deadline:
            raise BenchError("the stream did not start")
        time.sleep(0.05)
    return query


def _await_rows(query: Any, before: int, published: int, began: float) -> int:
    """Wait until the stream has read what was published; return the rows."""
    while (rows := _rows(query) - before) < published:
        _check(query)
        if time.monotonic() - began > CAUGHT_UP_S_MAX:
            raise BenchError(f"the stream read {rows} of {published} messages")
        time.sleep(0.02)
    return rows


def _rows(query: Any) -> int:
    return sum(int(progress["numInputRows"]) for progress in query.recentProgress)


def _check(query: Any) -> None:
    if query.exception() is not None:
        raise BenchError(f"the stream failed: {str(query.exception()).splitlines()[0]}")
