"""What a micro-batch of the standard pipeline costs around Spark's own run of it, as data grow.

One topic of many has new messages. No JVM is started: Spark calls the same functions. Only medians
count, because occasionally a call reads all topics again.

A long history is written without its messages: only the manifest of the topic, and the log of the
table, decide what a call has to look at. Their files are names for one small file.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from polybus import config
from polybus.batch import Batch
from polybus.bench.report import BenchFigure, quantiles
from polybus.lake.table import LakeTable
from polybus.log.files import FileLog
from polybus.log.history import manifest as manifests
from polybus.log.history.manifest import HistoryFile, Manifest
from polybus.log.layout import topic_folder
from polybus.log.topics import epoch_of
from polybus.spark.checkpoint import our_offset
from polybus.spark.pipelines.lag import LogEnds

TOPICS = (1, 100, 1000)
HISTORY = 100_000_000
"""The messages of the long history."""
FILES = 10_000
"""The hand-over makes larger files, and so fewer, unless a topic has few messages on each day."""
TABLE_FILES = 1_000
"""The files of a table with as many rows. Compaction makes larger ones."""
BATCHES = 50
NEW_MESSAGES = 10
LOOK = "look for messages, when there is none"
PLAN = "plan a batch with messages of one topic"
REPORT = "report positions and lag of a batch"
COMMIT = "write a batch and commit it to a table"
SETTLED_S = 1.1


def measure_planning(folder: Path, tell: Callable[[str], None]) -> list[BenchFigure]:
    """The time of each step, in a folder of its own for each size."""
    figures = []

    def add(who: str, samples: dict[str, list[float]]) -> None:
        for work, samples_us in samples.items():
            median, p99 = quantiles(samples_us)
            figures.append(BenchFigure(work=work, who=who, value=median, unit="µs", p99=p99))

    for count in TOPICS:
        tell(f"planning with {count:,} topics")
        add(f"{count:,} topics" if count > 1 else "1 topic", _samples(folder / str(count), count))
    tell(f"planning with {HISTORY:,} messages of history")
    add(f"{HISTORY:,} messages of history", _samples(folder / "history", 1, is_long=True))
    for files, who in ((1, "a new table"), (TABLE_FILES, f"{HISTORY:,} rows")):
        tell(f"committing to {who}")
        add(who, {COMMIT: _commits(folder / f"table-{files}", files)})
    return sorted(figures, key=lambda one: (LOOK, PLAN, REPORT, COMMIT).index(one.work))


def _samples(data: Path, count: int, *, is_long: bool = False) -> dict[str, list[float]]:
    from pyspark.sql.streaming.datasource import ReadMaxRows

    from polybus.spark.source.options import parse
    from polybus.spark.source.readers import PolybusStreamReader

    topics = [f"t{number}" for number in range(count)]
    options = {"data": str(data), "subscribePattern": ".*", "startingOffsets": "latest"}
    options |= {"failOnDataLoss": "false", "failOnDamage": "false", "stoppedIn": str(data)}
    limit, samples = ReadMaxRows(200_000), defaultdict[str, list[float]](list)

    @contextmanager
    def timed(work: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        samples[work].append((time.perf_counter() - begin) * 1e6)

    with closing(_log(data)) as log:
        for topic in topics:
            log.create_topic(topic)
    if is_long:
        _write_history(topic_folder(data, topics[0]))
    with closing(_log(data)) as log:
        for topic in topics:
            log.append(Batch.of(topic, [b"{}"]))
        log.sync()
        time.sleep(SETTLED_S)
        reader, ends = PolybusStreamReader(parse(options, streaming=True)), LogEnds(data)
        start = reader.initialOffset()
        ends.look(topics)
        for _ in range(BATCHES):
            with timed(LOOK):
                assert reader.latestOffset(start, limit) is start
            log.append(Batch.of("t0", [b"{}"] * NEW_MESSAGES))
            log.sync()
            with timed(PLAN):
                end = reader.latestOffset(start, limit)
                assert reader.partitions(start, end)
                reader.reportLatestOffset()
            text = json.dumps(end)
            with timed(REPORT):
                offset = our_offset(text)
                assert offset is not None
                ends.look(topics)
                behind = ends.behind({name: at.offset for name, at in offset.topics.items()})
            assert behind == 0
            start = end
    return samples


def _write_history(folder: Path) -> None:
    """A manifest as of a topic with many messages, which nobody reads."""
    rows = HISTORY // FILES
    path = folder / manifests.HISTORY / "bench.parquet"
    path.parent.mkdir()
    path.write_bytes(b"PAR1")
    files = tuple(
        HistoryFile(
            path=f"{manifests.HISTORY}/bench.parquet",
            first=first,
            last=first + rows - 1,
            min_timestamp_us=first,
            max_timestamp_us=first + rows - 1,
            rows=rows,
            bytes=path.stat().st_size,
            xxh3="",
        )
        for first in range(0, rows * FILES, rows)
    )
    epoch = epoch_of(folder)
    assert epoch is not None
    manifests.save(folder, Manifest(epoch=epoch, handed_over=rows * FILES, files=files))


def _commits(folder: Path, count: int) -> list[float]:
    """Microseconds of each commit of a small batch, in a table with this many files."""
    rows = pa.table({"offset": range(NEW_MESSAGES), "value": [b"{}"] * NEW_MESSAGES})
    table = LakeTable(folder)
    note = table.write(rows)
    notes = []
    for number in range(count):
        path = f"{number}.parquet"
        os.link(folder / note.file.path, folder / path)
        notes.append(replace(note, file=replace(note.file, path=path, uri=path)))
    table.commit(notes, writer="bench", batch_id=0)
    samples = []
    for batch_id in range(1, BATCHES + 1):
        begin = time.perf_counter()
        assert table.append(rows, writer="bench", batch_id=batch_id)
        samples.append((time.perf_counter() - begin) * 1e6)
    return samples


def _log(data: Path) -> FileLog:
    return FileLog(
        data,
        durability="fsync",
        journal=config.Journal(),
        retention=config.Retention(),
        clock=lambda: time.time_ns() // 1000,
        maintenance=False,
    )
