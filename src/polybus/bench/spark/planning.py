"""What a micro-batch of the standard pipeline costs before Spark runs it, by the number of topics.

One topic of many has new messages. No JVM is started: Spark calls the same functions. Only medians
count, because now and then a call looks at all topics again.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from polybus import config
from polybus.batch import Batch
from polybus.bench.report import BenchFigure, quantiles
from polybus.log.files import FileLog
from polybus.spark.checkpoint import our_offset
from polybus.spark.pipelines.lag import LogEnds

TOPICS = (1, 100, 1000)
BATCHES = 50
NEW_MESSAGES = 10
LOOK = "look for messages, when there is none"
PLAN = "plan a batch with messages of one topic"
REPORT = "report positions and lag of a batch"
SETTLED_S = 1.1


def measure_planning(folder: Path, tell: Callable[[str], None]) -> list[BenchFigure]:
    """The time of each step, in a folder of its own for each number of topics."""
    figures = []
    for count in TOPICS:
        tell(f"planning with {count:,} topics")
        for work, samples_us in _samples(folder / str(count), count).items():
            median, p99 = quantiles(samples_us)
            who = f"{count:,} topics" if count > 1 else "1 topic"
            figures.append(BenchFigure(work=work, who=who, value=median, unit="µs", p99=p99))
    return sorted(figures, key=lambda one: (LOOK, PLAN, REPORT).index(one.work))


def _samples(data: Path, count: int) -> dict[str, list[float]]:
    from pyspark.sql.streaming.datasource import ReadMaxRows

    from polybus.spark.source.options import parse
    from polybus.spark.source.readers import PolybusStreamReader

    topics = [f"t{number}" for number in range(count)]
    options = {"data": str(data), "subscribePattern": ".*", "startingOffsets": "earliest"}
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
            log.append(Batch.of(topic, [b"{}"]))
        log.sync()
        time.sleep(SETTLED_S)
        reader, ends = PolybusStreamReader(parse(options, streaming=True)), LogEnds(data)
        start = reader.latestOffset(reader.initialOffset(), limit)
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


def _log(data: Path) -> FileLog:
    return FileLog(
        data,
        durability="fsync",
        journal=config.Journal(),
        retention=config.Retention(),
        clock=lambda: time.time_ns() // 1000,
        maintenance=False,
    )
