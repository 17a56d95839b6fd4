"""A Spark stream that follows the bus at full speed, and what each costs the other."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polybus.bench import BenchError
from polybus.bench.brokers import all_brokers
from polybus.bench.measure import Bench, EntryOutcome
from polybus.bench.report import BenchFigure, Target, versus
from polybus.bench.scenarios import SCENARIOS

TOPIC = "bench.0000"
ROWS_PER_TRIGGER = 2_000_000
STARTED_S_MAX = 60.0
CAUGHT_UP_S_MAX = 120.0
WORK = "Spark follows the bus at full speed"


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
