"""Streams of lake tables: each added row once, after kills, resets and compaction too."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from driver_kit import RunningDriver, descendants
from pipeline_kit import PASS_TIMEOUT_S, PipelineFolder, as_json
from spark_kit import RunningBus, eventually, running_bus
from standard_kit import Pipe, Topics

from polybus.lake.compact import compact
from polybus.lake.fields import JSON_MARK
from polybus.lake.table import LakeTable, open_table
from polybus.spark.pipelines.declared import streams

COPY = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()

@dp.table
def copied():
    return spark.readStream.option("maxFilesPerTrigger", 2).table("silver")
"""


@pytest.fixture
def pipelines(spark: Any, tmp_path: Path) -> Iterator[PipelineFolder]:
    with running_bus(tmp_path, ["orders", "late.orders"]) as bus:
        yield PipelineFolder(spark, bus, tmp_path)


def add(table: LakeTable, *numbers: int) -> None:
    """Rows as those of silver: JSON text that Spark shows as VARIANT, and a map."""
    payload = pa.field("payload", pa.string(), metadata=JSON_MARK)
    kinds = [("n", pa.int64()), payload, ("properties", pa.map_(pa.string(), pa.string()))]
    rows = [{"n": n, "payload": f'{{"n":{n}}}', "properties": [("k", str(n))]} for n in numbers]
    table.append(pa.Table.from_pylist(rows, pa.schema(kinds)), writer="w", batch_id=None)


def silver_of(pipelines: PipelineFolder) -> LakeTable:
    return open_table(pipelines.bus.data, "silver")


def failure(pipelines: PipelineFolder) -> str:
    """The error of the only flow that fails in a pass."""
    runner = pipelines.start(pipelines.prepare(), continuous=False)
    try:
        assert runner.wait(PASS_TIMEOUT_S)
        (failed,) = runner.failures
        return str(failed.error)
    finally:
        runner.stop()


def test_a_flow_takes_the_rows_of_a_table_and_then_what_is_added(pipelines: PipelineFolder) -> None:
    silver = silver_of(pipelines)
    for number in range(5):
        add(silver, number)
    pipelines.write(
        "shop.sql",
        """
        CREATE STREAMING TABLE copied AS
        SELECT n, payload:n::int AS inner, properties['k'] AS k FROM STREAM(silver) WHERE n <> 3;
        """,
    )
    pipelines.run()
    expected = [(n, n, str(n)) for n in range(5) if n != 3]
    assert pipelines.rows("shop.copied", "n", "inner", "k") == expected
    pipelines.run()
    add(silver, 5, 6)
    compact(silver)
    add(silver, 7)
    pipelines.run()
    expected += [(n, n, str(n)) for n in (5, 6, 7)]
    assert pipelines.rows("shop.copied", "n", "inner", "k") == expected


def test_a_stream_of_silver_has_all_its_columns(pipelines: PipelineFolder) -> None:
    pipe, topics = Pipe(pipelines.spark, pipelines.bus.data), Topics()
    headers = {"event-time": "2026-03-01T11:59:00Z", "message-id": "m-1"}
    first = [topics.message("orders", '{"id": 1}', headers=headers), topics.message("chat", "hi")]
    pipe.run(0, first)
    pipelines.write("shop.sql", "CREATE STREAMING TABLE copied AS SELECT * FROM STREAM(silver);")
    pipelines.run()
    pipe.run(1, [topics.message("raw", b"\xff\x00"), topics.message("orders", '{"id": 2}')])
    pipelines.run()
    silver = silver_of(pipelines)
    assert silver.schema is not None and silver.rows == 4
    copied = open_table(pipelines.bus.data, "shop.copied")
    assert copied.state.fields == silver.state.fields
    columns = silver.schema.names
    assert pipelines.rows("shop.copied", *columns) == pipelines.rows("silver", *columns)


def test_a_batch_that_was_stored_and_not_noted_is_not_stored_again(
    pipelines: PipelineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver ends after the table's commit and before Spark's, in each of the first batches."""
    silver = silver_of(pipelines)
    for number in range(6):
        add(silver, number)
    pipelines.write("shop.py", COPY)
    store = streams.TableBatches._store

    def fail(self: Any, rows: Any, writer: str, batch_id: int) -> None:
        known = self.table.has_batch(writer, batch_id)
        store(self, rows, writer, batch_id)
        if not known:
            raise RuntimeError("ended here")

    with monkeypatch.context() as patched:
        patched.setattr(streams.TableBatches, "_store", fail)
        for number in (6, 7):
            assert "ended here" in failure(pipelines)
            add(silver, number)
            compact(silver)
    pipelines.run()
    assert pipelines.rows("shop.copied", "n") == [(n,) for n in range(8)]


def test_a_flow_over_a_table_of_its_pipeline_has_rows_that_the_topic_has_lost(
    pipelines: PipelineFolder,
) -> None:
    pipelines.bus.publish("orders", as_json([{"id": n} for n in range(3)]))
    pipelines.write(
        "shop/orders.sql",
        "CREATE STREAMING TABLE kept AS SELECT epoch, string(value) AS text FROM STREAM(orders);",
    )
    pipelines.run()
    pipelines.write(
        "shop/later.py",
        """
        from pyspark import pipelines as dp
        from pyspark.sql import SparkSession

        spark = SparkSession.active()

        @dp.table
        def second():
            return spark.readStream.format("delta").table("kept").select("text")

        @dp.table
        def third():
            return spark.readStream.table("shop.second")
        """,
    )
    pipelines.bus.publish("orders", as_json([{"id": 3}]))
    prepared = pipelines.run()
    after = {flow.name: flow.after for flow in prepared.flows}
    assert after == {"kept": (), "second": ("kept",), "third": ("second",)}
    inputs = {flow.name: flow.inputs for flow in prepared.flows}
    assert inputs["third"] == ("table:shop.second",)
    # In one pass the rows have come through all tables.
    texts = [(text,) for text in as_json([{"id": n} for n in range(4)])]
    assert pipelines.rows("shop.third", "text") == texts
    # Rows that the first table removes cannot be removed from the second.
    pipelines.run(refresh=["kept"], reset=["kept"])
    assert "lake.rows-changed" in failure(pipelines)
    pipelines.run(reset=["second", "third"])
    assert pipelines.rows("shop.third", "text") == texts


def test_a_changed_or_recreated_table_fails_its_flow_and_a_reset_repairs_it(
    pipelines: PipelineFolder,
) -> None:
    silver = silver_of(pipelines)
    add(silver, 1)
    pipelines.write("shop.py", COPY)
    pipelines.run()
    add(silver, 2)
    silver.commit([], remove=list(silver.state.files)[:1], writer="w", batch_id=None)
    text = failure(pipelines)
    assert "lake.rows-changed: table silver: version 2 removes or changes rows" in text
    assert "--reset FLOW" in text
    pipelines.run(reset=["copied"])
    assert pipelines.rows("shop.copied", "n") == [(2,)]
    shutil.rmtree(silver.path)
    add(LakeTable(silver.path), 3)
    assert "lake.recreated: table silver is not the one that was read" in failure(pipelines)
    pipelines.run(reset=["copied"])
    assert pipelines.rows("shop.copied", "n") == [(3,)]


def test_a_table_and_a_topic_of_one_name(pipelines: PipelineFolder) -> None:
    """A name is that of the topic, as ever; `format("delta")` asks for the table."""
    pipelines.bus.publish("late.orders", ["from the topic"])
    add(open_table(pipelines.bus.data, "late.orders"), 1)
    pipelines.write(
        "shop.py",
        """
        from pyspark import pipelines as dp
        from pyspark.sql import SparkSession

        spark = SparkSession.active()

        @dp.table
        def topic():
            return spark.readStream.table("late.orders").selectExpr("string(value) AS text")

        @dp.table
        def table():
            return spark.readStream.format("delta").table("late.orders").select("n")
        """,
    )
    pipelines.run()
    assert pipelines.rows("shop.topic", "text") == [("from the topic",)]
    assert pipelines.rows("shop.table", "n") == [(1,)]


def start(bus: RunningBus, folder: Path) -> RunningDriver:
    options = ("--pipelines", str(folder), "--memory", "768m", "--no-standard")
    return RunningDriver(bus.data, *options)


def kill(driver: RunningDriver) -> None:
    """End the driver, its JVM and their workers in the middle of whatever they do."""
    for pid in [driver.process.pid, *descendants(driver.process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.kill()


@pytest.mark.timeout(600)
def test_a_kill_of_the_driver_leaves_each_row_exactly_once(tmp_path: Path) -> None:
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (folder / "shop.py").write_text(COPY)
    with running_bus(tmp_path, ["orders"]) as bus:
        silver, copied = open_table(bus.data, "silver"), open_table(bus.data, "shop.copied")
        numbers = iter(range(1_000_000))
        for _ in range(20):
            add(silver, next(numbers), next(numbers))
        driver = start(bus, folder)
        deadline_s = time.monotonic() + 120
        # Until some batches are done, of a backlog that takes more of them.
        while not copied.exists or copied.rows < 10:
            assert time.monotonic() < deadline_s, driver.events
            if copied.exists:
                add(silver, next(numbers))
            time.sleep(0.2)
        kill(driver)
        compact(silver)
        driver = start(bus, folder)
        try:
            eventually(lambda: copied.rows >= silver.rows, timeout_s=120)
            assert driver.said("failed") == [] and driver.terminate() == 0
        finally:
            if driver.process.poll() is None:
                driver.kill()
        found = Counter(copied.read()["n"].to_pylist())
        assert found == Counter(silver.read()["n"].to_pylist())
        assert set(found.values()) == {1}
