"""kill -9 of driver, Python workers and bus, ten times under load: each message exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from docs_kit import undocumented_files
from driver_kit import RunningDriver, descendants, is_java, python_workers
from spark_kit import RunningBus, eventually

from polybus.client import connect
from polybus.errors import PolybusError
from polybus.lake.table import open_table
from polybus.log.reading.reader import LogReader

KILLS = ["driver", "java", "all", *["worker"] * 4, *["bus"] * 3]
"""`driver` is its Python process, `java` its JVM, and `all` both of them and their workers."""
LIFE_S_MAX = 1.5
JAVA_TIMEOUT_S = 20.0
TOPICS = ("red", "blue")
COPIES = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
dp.create_sink("copies", format="polybus", options={"topic": "copies"})


@dp.append_flow(target="copies")
def copy():
    red = spark.readStream.format("polybus").option("subscribe", "red")
    rows = red.option("startingOffsets", "earliest").load()
    return rows.selectExpr("CONCAT_WS(':', topic, epoch, offset) AS value")
"""


class Publisher(threading.Thread):
    """Publishes with receipts, whatever happens to the bus, until `end`."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.sent = 0
        self.receipts: list[tuple[str, str, str]] = []
        self._port = port
        self._ending = threading.Event()

    def run(self) -> None:
        asyncio.run(self._publish())

    def end(self) -> None:
        self._ending.set()
        self.join(30)
        assert not self.is_alive()

    async def _publish(self) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(PolybusError, TimeoutError, OSError):
                url = f"boson://127.0.0.1:{self._port}"
                async with connect(url, reconnect=False) as client:
                    while not self._ending.is_set():
                        await self._publish_some(client)

    async def _publish_some(self, client: Any) -> None:
        topic = TOPICS[self.sent % len(TOPICS)]
        # Every seventh cannot be decoded.
        value = f"{'{' if self.sent % 7 == 0 else ''}{self.sent}"
        self.sent += 1
        receipt = await client.publish(topic, value, receipt=True)
        self.receipts.append((topic, str(receipt), value))
        await asyncio.sleep(0.01)


class World:
    """The bus and the driver, each of which may be killed and comes back."""

    def __init__(self, folder: Path) -> None:
        self.bus = RunningBus(folder, [*TOPICS, "copies"], {})
        self.bus.start()
        self._pipelines = folder / "pipelines"
        self._pipelines.mkdir()
        (self._pipelines / "copies.py").write_text(COPIES)
        self.driver = self._start_driver()

    def _start_driver(self) -> RunningDriver:
        options = ("--pipelines", str(self._pipelines), "--memory", "768m")
        return RunningDriver(self.bus.data, *options)

    def kill(self, what: str, draw: random.Random) -> None:
        if what == "bus":
            self.bus.kill()
            time.sleep(draw.uniform(0, 0.5))
            self.bus.start()
        elif what in ("driver", "java", "all"):
            self._end_driver(what)
            self.driver = self._start_driver()
        else:
            eventually(lambda: python_workers(self.driver.process.pid), timeout_s=150)
            workers = python_workers(self.driver.process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(workers), signal.SIGKILL)

    def _end_driver(self, what: str) -> None:
        below = [] if what == "driver" else descendants(self.driver.process.pid)
        java = [pid for pid in below if is_java(pid)]
        for pid in java if what == "java" else below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if java and what == "java":
            # It ends by itself, soon, and says why.
            assert self.driver.process.wait(JAVA_TIMEOUT_S) != 0
        self.driver.kill()

    def troubles(self) -> list[dict[str, Any]]:
        """What did not come back by itself."""
        return [*self.driver.said("failed"), *self.driver.said("problem")]

    def close(self) -> None:
        if self.driver.process.poll() is None:
            self.driver.kill()
        self.bus.close()


def in_log(data: Path, topic: str) -> list[tuple[str, int, int, bytes]]:
    reader = LogReader(data)
    bounds = reader.bounds(topic)
    found = []
    for batch in reader.read(topic, bounds.start, bounds.stop, columns=["offset", "value"]):
        offsets, values = batch.column("offset").to_pylist(), batch.column("value").to_pylist()
        found += [(topic, bounds.epoch, *row) for row in zip(offsets, values, strict=True)]
    return found


def in_tables(data: Path) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    for name in ("silver", "quarantine"):
        table = open_table(data, name)
        if table.exists and table.files():
            rows = table.read()
            columns = [rows[column].to_pylist() for column in ("topic", "epoch", "offset")]
            found += zip(*columns, strict=True)
    return found


def caught_up(data: Path) -> bool:
    reader = LogReader(data)
    stops = {topic: reader.bounds(topic).stop for topic in (*TOPICS, "copies")}
    tables = [open_table(data, name) for name in ("silver", "quarantine")]
    # The copies are messages like any other, so they are in silver too.
    stored = sum(table.rows for table in tables if table.exists)
    return stops["copies"] >= stops["red"] and stored >= sum(stops.values())


@pytest.mark.timeout(900)
def test_ten_kills_leave_each_message_exactly_once(tmp_path: Path) -> None:
    seed = int(os.environ.get("KILL_SEED", random.randrange(1 << 32)))
    sys.stdout.write(f"play this again with KILL_SEED={seed} pytest {Path(__file__).name}\n")
    draw = random.Random(seed)
    world = World(tmp_path)
    publisher = Publisher(world.bus.port)
    try:
        world.driver.wait_for("ready")
        publisher.start()
        for what in draw.sample(KILLS, len(KILLS)):
            time.sleep(draw.uniform(0, LIFE_S_MAX))
            world.kill(what, draw)
        publisher.end()
        data = world.bus.data
        eventually(lambda: caught_up(data) or world.troubles(), timeout_s=240)
        assert world.troubles() == []
        assert world.driver.terminate() == 0
        world.bus.stop()
    finally:
        world.close()
    logged = {topic: in_log(data, topic) for topic in (*TOPICS, "copies")}
    everything = [row[:3] for rows in logged.values() for row in rows]
    assert Counter(in_tables(data)) == Counter(everything)
    assert undocumented_files(data) == []
    positions = [":".join(map(str, row[:3])).encode() for row in logged["red"]]
    assert Counter(row[3] for row in logged["copies"]) == Counter(positions)
    stored = {
        (topic, f"{epoch}:{offset}", value.decode())
        for rows in logged.values()
        for topic, epoch, offset, value in rows
    }
    assert set(publisher.receipts) <= stored
    assert len(publisher.receipts) > len(KILLS)
