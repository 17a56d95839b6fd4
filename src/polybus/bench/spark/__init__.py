"""The benchmark of the data pipeline: Polybus, Spark and DuckDB on the same messages, in one run.

reading     read and copy a topic, with our source and with others; follow the bus at full speed
planning    what a micro-batch costs before it runs, with few and with many topics
delays      from a publish to the row in silver, and to an alert on a WebSocket; cold start
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from polybus.bench import BenchError
from polybus.bench.measure import Bench
from polybus.bench.report import BenchFigure
from polybus.bench.spark.delays import measure_delays
from polybus.bench.spark.planning import measure_planning
from polybus.bench.spark.reading import measure_following, measure_reading, write_corpus
from polybus.errors import PolybusError


def run_spark_bench(
    bench: Bench, messages: int, steps: tuple[str, ...], tell: Callable[[str], None]
) -> list[BenchFigure]:
    """The figures of the steps. Raises BenchError, also if PySpark or Java is missing."""
    figures: list[BenchFigure] = []
    try:
        if {"reading", "following"} & set(steps):
            from polybus.spark.session import session

            tell("starting Spark")
            with (
                session(app="polybus-bench") as spark,
                tempfile.TemporaryDirectory(prefix="polybus-bench-", dir=bench.data_root) as path,
            ):
                if "reading" in steps:
                    corpus = write_corpus(Path(path), messages, tell)
                    figures += measure_reading(spark, corpus, rounds=bench.rounds, tell=tell)
                if "following" in steps:
                    figures += measure_following(spark, bench, tell)
        if "planning" in steps:
            with tempfile.TemporaryDirectory(prefix="polybus-bench-", dir=bench.data_root) as path:
                figures += measure_planning(Path(path), tell)
        if "delays" in steps:
            # Last, because it starts its own session and the machine has no memory for two.
            figures += measure_delays(bench.data_root, tell)
    except PolybusError as error:
        raise BenchError(f"{error.code}: {error.text}") from error
    return figures
