"""The pipeline's process: it starts, stops, waits for its bus, and resumes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from driver_kit import RunningDriver, descendants, is_java, running_driver
from old_tables_kit import lay_out_old_tables
from spark_kit import RunningBus, environment, eventually, running_bus

from polybus.cli import main
from polybus.client import connect
from polybus.client.http import blocking
from polybus.errors import UsageError
from polybus.lake import stopped
from polybus.lake.table import LakeTable, open_table
from polybus.log import layout, spark_checkpoint
from polybus.processes import started_ticks
from polybus.spark import tables
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.flows import FlowRunner
from polybus.spark.pipelines.running import driver as driver_module
from polybus.spark.pipelines.running import service
from polybus.spark.pipelines.running.driver import PipelineOptions, Supervisor
from polybus.spark.pipelines.running.service import only_one, write_status
from polybus.spark.pipelines.spark_sessions import JvmProcess
from polybus.spark.pipelines.standard import batches
from polybus.spark.pipelines.standard.batches import flows

# For a machine that runs other tests meanwhile.
SLACK_S = 7.0
TOPICS = ("red", "blue", "green")
# Any minute of 20 messages is an alert, for a topic without a history too.
ALERTING = {"pipeline": {"alert-history-s": 0.5, "alert-messages-min": 20, "alert-pause-s": 600}}


def silver_offsets(data: Path) -> list[int]:
    table = open_table(data, "silver")
    return sorted(table.read()["offset"].to_pylist()) if table.exists else []


def await_rows(bus: RunningBus, count: int) -> None:
    table = open_table(bus.data, "silver")
    eventually(lambda: table.exists and table.rows >= count, timeout_s=120)
    assert silver_offsets(bus.data) == list(range(count))


def await_table(bus: RunningBus, name: str, count: int) -> None:
    table = open_table(bus.data, name)
    eventually(lambda: table.exists and table.rows == count, timeout_s=120)


async def first_alert(port: int, driver: RunningDriver, bus: RunningBus) -> dict[str, Any]:
    """What a browser sees: subscribed to $alerts before there is anything to see."""
    async with connect(f"ws://127.0.0.1:{port}") as client:
        # Confirmed before the burst: on a busy machine the alert is faster than a subscription.
        async with asyncio.timeout(120), client.subscribe("$alerts") as subscription:
            await asyncio.to_thread(bus.publish, "t", [f"burst {n}" for n in range(60)])
            message = await anext(aiter(subscription))
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


@contextlib.contextmanager
def driver_here(spark: Any, data: Path, patched: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """A driver in this process, on the tests' session, which it must not end."""

    session = contextlib.nullcontext(spark)
    patched.setattr(driver_module, "open_session", lambda data, **options: session)
    patched.setattr(driver_module, "end_early", lambda *about, **more: None)
    driver = Supervisor(PipelineOptions(data=data), lambda event: None)
    running = threading.Thread(target=driver.run)
    running.start()
    try:
        yield driver
    finally:
        driver.stop()
        running.join(60)
    assert not running.is_alive()


def no_session(*about: Any, **more: Any) -> Any:
    raise UsageError("spark.no-java", "as far as the start of Spark")


def pipeline_status(data: Path, *options: str) -> str:
    result = CliRunner().invoke(main, ["pipeline", "status", "--data", str(data), *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_status_is_that_of_the_driver_while_it_runs_and_after_it_ended(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> tuple[str, dict[str, tuple[str, int | None]]]:
        said = json.loads(pipeline_status(bus.data, "--json"))
        flows = {f"{one['pipeline']}.{one['flow']}": one for one in said["flows"]}
        return said["state"], {name: (one["state"], one["rows"]) for name, one in flows.items()}

    with running_bus(tmp_path, ["t"]) as bus:
        bus.publish("t", ["one", "{two", "three"])
        write_status(bus.data, "done", problems=["pipeline.file: of a run before"])
        with driver_here(spark, bus.data, monkeypatch):
            await_table(bus, "quarantine", 1)
            decoded = ("running", 3)
            eventually(lambda: shown()[1].get("standard.decode") == decoded, timeout_s=60)
            assert shown()[0] == "running"
            written = bus.data / "pipeline" / "status.json"
            eventually(lambda: b'"rows":3' in written.read_bytes())
        assert shown() == (
            "stopped",
            {"standard.decode": ("stopped", 3), "standard.watch": ("stopped", None)},
        )
        last = service.read_status(bus.data)
        assert last is not None and "table:silver" in last.flows[0]["outputs"]
        assert "decode" in [one["flow"] for one in last.runs]
        assert any("ready: " in one and "flows: 2" in one for one in last.log)
        table = pipeline_status(bus.data)
        assert table.startswith("stopped at 2") and "of a run before" not in table
        assert ["standard.decode", "stopped", "3"] in [
            row.split()[:3] for row in table.splitlines()
        ]
        assert ["standard.watch", "stopped", "-"] in [row.split()[:3] for row in table.splitlines()]


def test_the_process_takes_the_tables_to_refresh() -> None:
    given = ["--data", "d", "--once", "--no-standard", "--refresh=shop.sums", "--reset=shop.sums"]
    options = driver_module.parse(given)
    assert (options.refresh, options.reset) == (("shop.sums",), ("shop.sums",))
    assert not options.standard and not options.continuous and not options.until_stopped


def test_a_second_pipeline_on_a_folder_is_refused(tmp_path: Path) -> None:
    with only_one(tmp_path):
        with pytest.raises(UsageError, match="pipeline.running"), only_one(tmp_path):
            pass
        command = [
            sys.executable,
            "-m",
            "polybus.spark.pipelines.running.driver",
            "--data",
            str(tmp_path),
        ]
        done = subprocess.run(command, capture_output=True, env=environment(), check=False)
    assert done.returncode == 1
    assert b'"code":"pipeline.running"' in done.stdout
    with only_one(tmp_path):
        pass


def test_tables_of_the_old_format_are_refused_before_spark_starts(tmp_path: Path) -> None:
    lay_out_old_tables(tmp_path)
    module = "polybus.spark.pipelines.running.driver"
    command = [sys.executable, "-m", module, "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, env=environment(), check=False)
    assert done.returncode == 1
    assert b'"code":"lake.old-format"' in done.stdout
    assert f"polybus tables migrate --data {tmp_path}".encode() in done.stdout


def test_a_driver_without_java_leaves_a_status_that_says_what_is_missing(tmp_path: Path) -> None:
    with running_bus(tmp_path, ["t"]) as bus:
        module = "polybus.spark.pipelines.running.driver"
        command = [sys.executable, "-m", module, "--data", str(bus.data)]
        without = environment(POLYBUS_JAVA="/nowhere/java")
        done = subprocess.run(command, capture_output=True, env=without, check=False)
        status = service.read_status(bus.data)

        assert done.returncode == 1 and b'"code":"spark.no-java"' in done.stdout
        assert status is not None and status.state == "failed"
        assert "Spark needs Java 17" in status.problems[0]
        assert pipeline_status(bus.data).startswith("failed at 2")


def test_a_status_that_cannot_be_read_does_not_stop_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pipeline" / "status.json"
    path.parent.mkdir()
    path.symlink_to(path)  # Opening it fails with ELOOP.
    monkeypatch.setattr(driver_module, "open_session", no_session)
    options = PipelineOptions(data=tmp_path, until_stopped=False, standard=False)
    with pytest.raises(UsageError, match="as far as the start of Spark"):
        Supervisor(options, lambda event: None).run()
    status = service.read_status(tmp_path)
    assert status is not None and status.state == "failed"


def test_an_error_before_the_run_is_a_failed_event(tmp_path: Path) -> None:
    code = f"""
from polybus.errors import StorageError
from polybus.spark.pipelines.running import driver

def refuse(*given):
    raise StorageError("log.failed", "the disk is broken")

driver.Supervisor = refuse
raise SystemExit(driver.main(["--data", {str(tmp_path)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment())
    told = {"event": "failed", "code": "log.failed", "text": "the disk is broken"}
    assert (done.returncode, json.loads(done.stdout)) == (1, told)


@pytest.mark.parametrize("text", ["starting Spark on", "Spark is up"])
def test_a_start_that_is_stopped_ends_within_seconds_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    with running_bus(tmp_path, ["t"]) as bus:
        monkeypatch.setenv("TMPDIR", str(scratch))
        with running_driver(bus.data) as driver:
            eventually(lambda: any(one["text"].startswith(text) for one in driver.said("starting")))
            eventually(lambda: descendants(driver.process.pid))
            children = descendants(driver.process.pid)
            began = time.monotonic()
            done = CliRunner().invoke(main, ["pipeline", "stop", "--data", str(bus.data)])
            assert done.exit_code == 0, done.output
            assert driver.await_end() == 0
            assert time.monotonic() - began < 3.0 + SLACK_S
            eventually(lambda: driver.said("stopped"))
        status = service.read_status(bus.data)
        assert status is not None and (status.state, status.problems) == ("stopped", [])
        assert driver.said("failed") == [] and driver.said("ready") == []
        assert not service.socket_path(bus.data).exists()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
        assert list(scratch.iterdir()) == []


def test_a_pipeline_waits_for_its_bus_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "end_early", lambda *about, **more: None)
    events: list[dict[str, Any]] = []

    def say(event: dict[str, Any]) -> None:
        events.append(event)
        waiting.stop()

    waiting = Supervisor(PipelineOptions(data=tmp_path / "data"), say)
    assert waiting.run()
    assert [event["event"] for event in events] == ["waiting", "stopped"]
    assert "polybus serve" in events[0]["text"]


@contextlib.contextmanager
def java_of_a_killed_run(data: Path, **about: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is called java, and the status of the run that left it."""
    data.mkdir()
    with subprocess.Popen(["bash", "-c", "exec -a java sleep 600"]) as java:
        try:
            eventually(lambda: is_java(java.pid))
            given = {"jvm": java.pid, "jvm_started": started_ticks(java.pid), **about}
            write_status(data, "running", **given)
            path = data / "pipeline" / "status.json"
            status = json.loads(path.read_bytes())
            path.write_text(json.dumps({**status, "pid": java.pid}))
            yield java
        finally:
            java.kill()


def test_the_java_process_of_a_killed_run_is_not_forgotten_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a start is refused or stopped: it may still write to the checkpoints."""
    monkeypatch.setattr(driver_module, "OLD_JVM_TIMEOUT_S", 0.0)
    monkeypatch.setattr(driver_module, "end_early", lambda *about, **more: None)
    monkeypatch.setattr(os, "getpid", itertools.count(1).__next__)  # Each start has another.
    data = tmp_path / "data"
    options = PipelineOptions(data=data, until_stopped=False, standard=False)
    with java_of_a_killed_run(data) as java:
        for _ in range(2):
            with pytest.raises(UsageError, match=f"process {java.pid} of the last"):
                Supervisor(options, lambda event: None).run()
        last = Supervisor(options, lambda event: last.stop())
        monkeypatch.setattr(driver_module, "OLD_JVM_TIMEOUT_S", 60.0)
        assert last.run()
        status = service.read_status(data)
        assert status is not None and (status.state, status.jvm) == ("stopped", java.pid)
    assert not JvmProcess(status.jvm, status.jvm_started).is_alive()


def test_another_process_with_the_id_of_the_last_java_process_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    monkeypatch.setattr(driver_module, "open_session", no_session)
    options = PipelineOptions(data=data, until_stopped=False, standard=False)
    with java_of_a_killed_run(data, jvm_started=1), pytest.raises(UsageError, match="no-java"):
        Supervisor(options, lambda event: None).run()


def test_a_pipeline_whose_java_process_dies_ends_with_an_error(tmp_path: Path) -> None:
    """So that its parent starts it again: no flow can recover."""
    with running_bus(tmp_path, ["t"]) as bus, running_driver(bus.data) as driver:
        driver.wait_for("ready")
        note = service.running(bus.data)
        assert note is not None
        os.kill(note.jvm, signal.SIGKILL)
        # A process that waits for answers of the JVM would not end at all.
        assert driver.process.wait(20) == 1
        eventually(lambda: any(one.get("code") == "spark.ended" for one in driver.said("failed")))
        assert service.running(bus.data) is None


def states(runner: FlowRunner) -> dict[str, tuple[str, str]]:
    return {one.flow: (one.state, one.error or "") for one in runner.progress()}


def flip(segment: Path, text: bytes) -> None:
    """Damage one byte of a message that begins with the text; doing it again repairs it."""
    content = bytearray(segment.read_bytes())
    content[content.index(text) + len(text)] ^= 1
    segment.write_bytes(content)


def in_silver(data: Path, topics: Sequence[str]) -> list[tuple[str, int]]:
    table = open_table(data, "silver")
    rows = table.read().select(["topic", "offset"]).to_pylist() if table.exists else []
    return sorted((row["topic"], row["offset"]) for row in rows if row["topic"] in topics)


@contextlib.contextmanager
def standard_flows(spark: Any, data: Path) -> Iterator[FlowRunner]:
    runner = FlowRunner(spark, BusLocation(data), continuous=True)
    runner.start(*flows(data))
    try:
        yield runner
    finally:
        assert runner.stop(60)


def test_a_damaged_topic_is_left_out_and_resumes_when_its_file_is_restored(
    spark: Any, tmp_path: Path
) -> None:
    def publish(*topics: str) -> None:
        for topic in topics:
            offset = sum(one == topic for one, _ in published)
            bus.publish(topic, [f"{topic} {offset} " * 100])
            published.append((topic, offset))

    def await_silver(expected: list[tuple[str, int]]) -> None:
        eventually(lambda: in_silver(bus.data, TOPICS) == sorted(expected), timeout_s=90)

    published: list[tuple[str, int]] = []
    with running_bus(tmp_path, TOPICS) as bus:
        publish("red", "blue")
        with standard_flows(spark, bus.data):
            await_silver(published)
        publish("red", "blue", "green")
        bus.stop()
        (segment,) = (bus.data / "journal").glob("*.arrows")
        manifest = layout.topic_folder(bus.data, "green") / "manifest.json"
        manifest.write_text("{")
        flip(segment, b"red 1 red 1")
        with standard_flows(spark, bus.data) as runner:
            await_silver([("red", 0), ("blue", 0), ("blue", 1)])
            bus.start()
            publish("blue")
            await_silver([("red", 0), ("blue", 0), ("blue", 1), ("blue", 2)])
            eventually(lambda: states(runner)["decode"] == ("running", ""))
            decode = runner.progress()[0]
            said = decode.warning or ""
            assert "topic 'red' is left out" in said and segment.name in said
            assert "topic 'green' is left out" in said and str(manifest) in said
            assert "topic 'blue'" not in said
            eventually(lambda: runner.progress()[0].lag == 1)
        bus.stop()
        manifest.unlink()
        flip(segment, b"red 1 red 1")
        with standard_flows(spark, bus.data) as runner:
            await_silver(published)
            eventually(lambda: runner.progress()[0].lag == 0)
            assert runner.progress()[0].warning is None
        traffic = open_table(bus.data, "traffic").read()
        assert sum(traffic["messages"].to_pylist()) == len(published)


@pytest.mark.parametrize("repaired", ["file", "topic"])
def test_only_the_topic_waits_whose_file_was_damaged_after_the_plan_of_a_batch(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repaired: str
) -> None:
    def no_commit(*arguments: Any, **options: Any) -> bool:
        raise ZeroDivisionError

    with running_bus(tmp_path, ["red", "blue"]) as bus:
        for topic in ("red", "blue"):
            bus.publish(topic, [f"{topic} 0 " * 100])
        with monkeypatch.context() as patched:
            patched.setattr(LakeTable, "commit", no_commit)
            with standard_flows(spark, bus.data) as runner:
                eventually(lambda: states(runner)["decode"][0] == "failed", timeout_s=90)
        bus.stop()
        (segment,) = (bus.data / "journal").glob("*.arrows")
        flip(segment, b"red 0 red 0")
        bus.start()
        with standard_flows(spark, bus.data) as runner:
            eventually(lambda: in_silver(bus.data, TOPICS) == [("blue", 0)], timeout_s=90)
            eventually(lambda: "'red' is left out" in (runner.progress()[0].warning or ""))
            said = runner.progress()[0].warning or ""
            assert segment.name in said and "restore the file" in said
            bus.publish("blue", ["more"])
            expected = [("blue", 0), ("blue", 1)]
            eventually(lambda: in_silver(bus.data, TOPICS) == expected, timeout_s=90)
            if repaired == "file":
                flip(segment, b"red 0 red 0")
                expected.append(("red", 0))
            else:
                blocking.request(bus.url, "DELETE", "/v1/topics/red")
            eventually(lambda: in_silver(bus.data, TOPICS) == expected, timeout_s=90)
            eventually(lambda: stopped.read(bus.data) == {})


def test_the_first_batch_counts_as_lag_while_it_runs(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(*arguments: Any, **options: Any) -> Any:
        assert go_on.wait(90)
        return real_stage(*arguments, **options)

    go_on, real_stage = threading.Event(), tables.stage
    monkeypatch.setattr(batches, "stage", held)
    with running_bus(tmp_path, ["t"]) as bus:
        bus.publish("t", ["one", "two", "three"])
        with standard_flows(spark, bus.data) as runner:
            eventually(lambda: runner.progress()[0].lag == 3, timeout_s=60)
            go_on.set()
            eventually(lambda: runner.progress()[0].lag == 0, timeout_s=60)


def test_a_full_disk_under_the_checkpoint_fails_the_flow_and_nothing_is_half_written(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with running_bus(tmp_path, ["t"]) as bus:
        bus.publish("t", ["x"])
        with monkeypatch.context() as patched:
            patched.setattr(spark_checkpoint, "sync_path", full)
            runner = FlowRunner(spark, BusLocation(bus.data), continuous=True)
            runner.start(flows(bus.data)[0])
            eventually(lambda: states(runner)["decode"][0] == "failed", timeout_s=90)
            text = states(runner)["decode"][1]
            runner.stop()
        assert "sink.checkpoint" in text and "No space left" in text
        assert not open_table(bus.data, "silver").exists
        runner = FlowRunner(spark, BusLocation(bus.data), continuous=True)
        runner.start(flows(bus.data)[0])
        await_rows(bus, 1)
        runner.stop()
