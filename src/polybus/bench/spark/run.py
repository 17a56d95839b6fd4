"""All of it in one run: one session for what reads, then the pipeline as `polybus up` runs it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polybus.bench.errors import BenchError
from polybus.bench.measure import Bench
from polybus.bench.spark.corpus import write_corpus
from polybus.bench.spark.delays import measure_delays
from polybus.bench.spark.figures import Figure
from polybus.bench.spark.following import measure_following
from polybus.bench.spark.reading import Corpus, measure_reading
from polybus.errors import PolybusError

STEPS = ("reading", "following", "delays")


@dataclass(frozen=True, slots=True)
class SparkBench:
    """What to measure: `steps` of STEPS, over so many messages."""

    plan: Bench
    messages: int
    steps: tuple[str, ...] = STEPS


def run_spark_bench(bench: SparkBench, tell: Callable[[str], None]) -> list[Figure]:
    """The figures of all steps.

    Raises:
        BenchError: PySpark or Java is missing, or something did not find every message.
    """
    figures: list[Figure] = []
    try:
        if {"reading", "following"} & set(bench.steps):
            figures += _on_one_session(bench, tell)
        if "delays" in bench.steps:
            # The last: it brings a session of its own, and two do not fit the machine.
            figures += measure_delays(bench.plan.data_root, tell)
    except PolybusError as error:
        raise BenchError(f"{error.code}: {error.text}") from error
    return figures


def _on_one_session(bench: SparkBench, tell: Callable[[str], None]) -> list[Figure]:
    from polybus.spark.session import session

    figures: list[Figure] = []
    tell("starting Spark")
    spark = session(app="polybus-bench")
    root = bench.plan.data_root
    try:
        with tempfile.TemporaryDirectory(prefix="polybus-bench-", dir=root) as folder:
            if "reading" in bench.steps:
                millions = f"of {bench.messages / 1e6:g} M messages"
                journal, history = write_corpus(
                    Path(folder),
                    bench.messages,
                    lambda count: tell(f"writing {count / 1e6:.1f} {millions}"),
                )
                corpus = Corpus(journal, history, bench.messages)
                figures += measure_reading(
                    spark, corpus, Path(folder), rounds=bench.plan.rounds, tell=tell
                )
        if "following" in bench.steps:
            figures += measure_following(spark, bench.plan, tell)
    finally:
        spark.stop()
    return figures
