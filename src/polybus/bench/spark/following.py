"""A stream that follows the bus at full speed, and what each costs the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polybus.bench.brokers import all_brokers
from polybus.bench.errors import BenchError
from polybus.bench.measure import Bench, Outcome
from polybus.bench.scenarios import SCENARIOS
from polybus.bench.spark.figures import Figure

TOPIC = "bench.0000"
ROWS_PER_TRIGGER = 2_000_000
STARTED_S_MAX = 60.0
CAUGHT_UP_S_MAX = 120.0


def measure_following(spark: Any, plan: Bench, tell: Callable[[str], None]) -> list[Figure]:
    """The bus alone and followed by Spark, and the stream's own rate meanwhile."""
    scenario = next(one for one in SCENARIOS if one.name == "boson-1-1")
    broker = all_brokers(plan.program)["polybus"]
    outcome = Outcome(entry=scenario.entries[0], broker=broker)
    with plan.server(broker, scenario.load) as (server, folder):
        tell("the bus alone")
        alone = plan.generate(server, scenario, outcome, scenario.load)
        query = _follow(spark, folder)
        try:
            tell("the bus, followed by Spark")
            followed, rows, seconds = _while_following(
                query, lambda: plan.generate(server, scenario, outcome, scenario.load)
            )
        finally:
            query.stop()
    alone_rate = alone["delivered"] / alone["seconds"]
    followed_rate = followed["delivered"] / followed["seconds"]
    work = "Spark follows the bus at full speed"
    split = "2 cores for bus, generator and Spark together"
    return [
        Figure(work=work, who="the bus alone", value=alone_rate, unit="rows/s"),
        Figure(
            work=work,
            who="the bus, followed",
            value=followed_rate,
            unit="rows/s",
            ratio=followed_rate / alone_rate,
            at_least=0.5,
            note=split,
        ),
        Figure(work=work, who="the stream", value=rows / seconds, unit="rows/s", note=split),
    ]


def _follow(spark: Any, folder: Path) -> Any:
    stream = (
        spark.readStream.format("polybus")
        .option("data", str(folder / "data"))
        .option("subscribe", TOPIC)
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


def _while_following(
    query: Any, generate: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], int, float]:
    """What the generator found, and how many rows the stream took in how many seconds.

    The stream's clock runs until it has taken every message, also what it was behind.
    """
    results: list[dict[str, Any]] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(generate())
        except BenchError as error:
            failures.append(error)

    before = _rows(query)
    began = time.monotonic()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    published = int(results[0]["delivered"])
    while (rows := _rows(query) - before) < published:
        _check(query)
        if time.monotonic() - began > CAUGHT_UP_S_MAX:
            raise BenchError(f"the stream took {rows} of {published} messages")
        time.sleep(0.02)
    return results[0], rows, time.monotonic() - began


def _rows(query: Any) -> int:
    return sum(int(progress["numInputRows"]) for progress in query.recentProgress)


def _check(query: Any) -> None:
    if query.exception() is not None:
        raise BenchError(f"the stream failed: {str(query.exception()).splitlines()[0]}")
