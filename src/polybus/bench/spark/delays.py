"""From a publish to the row in silver and to an alert on a WebSocket; cold start; memory.

The bus and the driver of the pipeline are separate processes, as with `polybus up`.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import polybus
from polybus.bench import BenchError
from polybus.bench.brokers import HOST, bus, end, running
from polybus.bench.report import BenchFigure, Target, Unit, quantiles
from polybus.lake.table import LakeTable, open_table

TOPIC = "bench.orders"
READY_S_MAX = 120.0
ARRIVED_S_MAX = 60.0
WARM_MESSAGES = 20
MESSAGES = 100
EVERY_S = 0.2
SPIKES = 20
SPIKE_MESSAGES = 100
SPIKE_EVERY_S = 1.0
POLL_S = 0.01
COLD = Target(value=8.0, absolute=True)
SILVER = Target(value=350.0, absolute=True, p99_max=600.0)
ALERT = Target(value=350.0, absolute=True)
MEMORY = Target(value=1.2 * 1024, absolute=True)


def measure_delays(root: Path | None, tell: Callable[[str], None]) -> list[BenchFigure]:
    """The figures of a warm pipeline, and the time of a cold start."""
    spiky = [f"bench.spike.{number:02d}" for number in range(SPIKES)]
    # The rate of a topic is judged without waiting for its history.
    alerts = {"alert-history-s": 0.5, "alert-messages-min": SPIKE_MESSAGES}
    with (
        tempfile.TemporaryDirectory(prefix="polybus-bench-", dir=root) as folder,
        running(bus("polybus", pipeline=alerts), Path(folder), [TOPIC, *spiky]) as server,
    ):
        data = Path(folder) / "data"
        silver = open_table(data, "silver")
        asyncio.run(_publish(server.port, TOPIC, 1))
        tell("the first result of the pipeline, cold")
        with _driver(data) as (pid, began):
            cold_s = _await_row(silver) - began
            tell("publish to silver")
            delays_ms = asyncio.run(_silver_delays(server.port, silver))
            tell("publish to an alert on a WebSocket")
            alerts_ms = asyncio.run(_alert_delays(server.port, spiky))
            memory_mib = _memory_of(pid) / 2**20

    def figure(
        who: str, values: tuple[float, float | None], unit: Unit, at_most: Target, note: str = ""
    ) -> BenchFigure:
        return BenchFigure(
            work="the pipeline of `polybus up`",
            who=who,
            value=values[0],
            p99=values[1],
            unit=unit,
            target=at_most,
            note=note,
        )

    sent = f"{MESSAGES} messages, one every {EVERY_S:g} s"
    spikes = f"{SPIKES} spikes of {SPIKE_MESSAGES} messages"
    return [
        figure("first result, cold", (cold_s, None), "s", COLD),
        figure("Boson publish to the row in silver", quantiles(delays_ms), "ms", SILVER, sent),
        figure("Boson publish to an alert", quantiles(alerts_ms), "ms", ALERT, spikes),
        figure("memory of Java and Python", (memory_mib, None), "MiB", MEMORY, "PSS"),
    ]


@contextmanager
def _driver(data: Path) -> Iterator[tuple[int, float]]:
    """The process of the pipeline and its start time; it ends with the block, with its JVM."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "polybus.spark.pipelines.running.driver", "--data", str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process.pid, began
    finally:
        end(process, READY_S_MAX)


async def _publish(port: int, topic: str, count: int) -> None:
    async with polybus.connect(f"boson://{HOST}:{port}") as client:
        values = [msgspec.json.encode({"order": number}) for number in range(count)]
        await client.publish_many(topic, values, receipt=True)


async def _silver_delays(port: int, silver: LakeTable) -> list[float]:
    """Milliseconds from each publish until its row is in the table, which has no other rows."""
    known, count = silver.rows, WARM_MESSAGES + MESSAGES
    sent: list[float] = []
    seen: list[float] = []

    async def watch() -> None:
        while len(seen) < count:
            seen.extend([time.monotonic()] * (silver.rows - known - len(seen)))
            await asyncio.sleep(POLL_S)

    async with polybus.connect(f"boson://{HOST}:{port}") as client:
        watching = asyncio.create_task(watch())
        for number in range(count):
            sent.append(time.monotonic())
            value = msgspec.json.encode({"order": number, "total": number / 7})
            await client.publish(TOPIC, value, receipt=True)
            await asyncio.sleep(max(0.0, sent[-1] + EVERY_S - time.monotonic()))
        try:
            await asyncio.wait_for(watching, ARRIVED_S_MAX)
        except TimeoutError as error:
            raise BenchError(f"{count - len(seen)} messages did not reach silver") from error
    pairs = zip(sent, seen, strict=True)
    return [(arrived - began) * 1000 for began, arrived in pairs][WARM_MESSAGES:]


def _await_row(table: LakeTable) -> float:
    deadline = time.monotonic() + READY_S_MAX
    while not table.rows:
        if time.monotonic() > deadline:
            raise BenchError(f"no row in {table.name} after {READY_S_MAX:g} s")
        time.sleep(POLL_S)
    return time.monotonic()


async def _alert_delays(port: int, topics: list[str]) -> list[float]:
    """Milliseconds from the last message of each spike until its alert is on a WebSocket."""
    sent: dict[str, float] = {}
    came: dict[str, float] = {}
    async with (
        polybus.connect(f"ws://{HOST}:{port}") as browser,
        polybus.connect(f"boson://{HOST}:{port}") as client,
        browser.subscribe("$alerts") as alerts,
    ):

        async def listen() -> None:
            async for message in alerts:
                alert: dict[str, Any] = msgspec.json.decode(message.value)
                came.setdefault(alert["topic"], time.monotonic())
                if len(came) == len(topics):
                    return

        listening = asyncio.create_task(listen())
        for topic in topics:
            values = [msgspec.json.encode({"n": number}) for number in range(SPIKE_MESSAGES)]
            sent[topic] = time.monotonic()
            await client.publish_many(topic, values, receipt=True)
            await asyncio.sleep(SPIKE_EVERY_S)
        try:
            await asyncio.wait_for(listening, ARRIVED_S_MAX)
        except TimeoutError as error:
            raise BenchError(f"{len(topics) - len(came)} alerts did not come") from error
    return [(came[topic] - sent[topic]) * 1000 for topic in topics]


def _memory_of(pid: int) -> int:
    """The memory of a process and its descendants in bytes; shared pages count once (PSS)."""
    total = 0
    for one in [pid, *_below(pid)]:
        try:
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in rollup.splitlines() if "Pss:" in line)
    return total * 1024


def _below(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *_below(child)]
    return found
