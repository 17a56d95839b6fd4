"""The pipeline's process: it starts and stops, waits for its bus, and goes on where it was."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driver_kit import RunningDriver, running_driver
from spark_kit import RunningBus, environment, eventually, running_bus

from polybus.client import connect
from polybus.errors import UsageError
from polybus.lake.table import open_table
from polybus.spark import service
from polybus.spark.driver import only_one
from polybus.spark.pipelines.flows import FlowRunner
from polybus.spark.pipelines.standard import flows, plans

# Any minute of 20 messages is an alert, for a topic without a history too.
ALERTING = {"pipeline": {"alert-history-s": 0.5, "alert-messages-min": 20, "alert-pause-s": 600}}


def silver_offsets(data: Path) -> list[int]:
    table = open_table(data, "silver")
    return sorted(table.read()["offset"].to_pylist()) if table.exists else []


def await_rows(bus: RunningBus, count: int) -> None:
    table = open_table(bus.data, "silver")
    eventually(lambda: table.exists and table.rows >= count, timeout_s=120)
    assert silver_offsets(bus.data) == list(range(count))


async def first_alert(port: int, driver: RunningDriver, bus: RunningBus) -> dict[str, Any]:
    """What a browser sees: subscribed to $alerts before there is anything to see."""
    async with connect(f"ws://127.0.0.1:{port}") as client:
        subscription = client.subscribe("$alerts")
        async with asyncio.timeout(120):
            seen = asyncio.ensure_future(anext(aiter(subscription)))
            await asyncio.sleep(0)
            await asyncio.to_thread(bus.publish, "t", [f"burst {n}" for n in range(60)])
            message = await seen
        value: dict[str, Any] = message.json()
        return value


def test_the_pipeline_survives_restarts_in_any_order_and_alerts_reach_a_websocket(
    tmp_path: Path,
) -> None:
    bus = RunningBus(tmp_path, ["t"], ALERTING)
    with running_driver(bus.data) as driver:
        driver.wait_for("waiting")
        bus.start()
        try:
            driver.wait_for("ready")
            bus.publish("t", ["one", "two"])
            await_rows(bus, 2)
            alert = asyncio.run(first_alert(bus.port, driver, bus))
            assert (alert["kind"], alert["topic"]) == ("spike", "t")
            await_rows(bus, 62)

            note = service.running(bus.data)
            assert note is not None and note.pid == driver.process.pid
            table, head = service.query(note, "SELECT count(*) AS n FROM silver")
            assert table.to_pylist() == [{"n": 62}] and head["truncated"] is False
            counted = "SELECT sum(messages) AS n FROM traffic"
            eventually(lambda: service.query(note, counted)[0].to_pylist() == [{"n": 62}])
            table, _ = service.query(note, "SELECT text(value) AS v FROM t ORDER BY offset LIMIT 1")
            assert table["v"].to_pylist() == ["one"]

            bus.restart()
            bus.publish("t", ["after the bus"])
            await_rows(bus, 63)
            assert driver.close() == 0, driver.events
            assert driver.said("stopped")
            assert service.running(bus.data) is None

            bus.publish("t", ["between"])
            with running_driver(bus.data) as second:
                await_rows(bus, 64)
                second.wait_for("ready")
                bus.stop()
                assert second.terminate() == 0
        finally:
            bus.close()


def test_a_second_pipeline_on_a_folder_is_refused(tmp_path: Path) -> None:
    with only_one(tmp_path):
        with pytest.raises(UsageError, match="pipeline.running"), only_one(tmp_path):
            pass
        command = [sys.executable, "-m", "polybus.spark.driver", "--data", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, env=environment(), check=False)
    assert done.returncode == 1
    assert b'"code":"pipeline.running"' in done.stdout
    with only_one(tmp_path):
        pass


def states(runner: FlowRunner) -> dict[str, tuple[str, str]]:
    return {one.flow: (one.state, one.error or "") for one in runner.progress()}


def test_a_damaged_segment_fails_its_flow_with_its_name_and_the_others_go_on(
    spark: Any, tmp_path: Path
) -> None:
    with running_bus(tmp_path, ["t"]) as bus:
        bus.publish("t", ["x" * 4000])
        bus.stop()
        (segment,) = (bus.data / "journal").glob("*.arrows")
        content = bytearray(segment.read_bytes())
        content[content.index(b"x" * 100) + 50] ^= 1
        segment.write_bytes(content)
        runner = FlowRunner(spark, bus.data, continuous=True)
        for flow in flows(bus.data):
            runner.start(flow)
        try:
            eventually(lambda: states(runner)["decode"][0] == "failed", timeout_s=90)
            assert "log.damaged" in states(runner)["decode"][1]
            assert segment.name in states(runner)["decode"][1]
            assert states(runner)["watch"][0] in ("waiting", "running")
        finally:
            runner.stop()


def test_a_full_disk_under_the_checkpoint_fails_the_flow_and_nothing_is_half_written(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with running_bus(tmp_path, ["t"]) as bus:
        bus.publish("t", ["x"])
        with monkeypatch.context() as patched:
            patched.setattr(plans, "sync_file", full)
            runner = FlowRunner(spark, bus.data, continuous=True)
            runner.start(flows(bus.data)[0])
            eventually(lambda: states(runner)["decode"][0] == "failed", timeout_s=90)
            text = states(runner)["decode"][1]
            runner.stop()
        assert "log.full" in text and "/offsets/0: No space left" in text
        assert not open_table(bus.data, "silver").exists
        runner = FlowRunner(spark, bus.data, continuous=True)
        runner.start(flows(bus.data)[0])
        await_rows(bus, 1)
        runner.stop()
