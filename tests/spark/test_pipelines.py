"""Pipelines that users declare: each row once, and errors with file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pipeline_kit import PASS_TIMEOUT_S, PipelineFolder, as_json, record_writes
from spark_kit import RunningBus, eventually, running_bus

from polybus.client.http.blocking import read_token, request_json
from polybus.lake.folders import drop_table
from polybus.lake.table import open_table
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.flows import checkpoints_of

ORDERS = as_json([{"id": n, "customer": f"c{n % 2}", "amount": n * 10} for n in range(6)])


@pytest.fixture
def pipelines(spark: Any, tmp_path: Path) -> Iterator[PipelineFolder]:
    with running_bus(tmp_path, ["orders", "big.orders"]) as bus:
        bus.publish("orders", ORDERS)
        yield PipelineFolder(spark, bus, tmp_path)


def test_python_files_become_tables_views_and_messages(pipelines: PipelineFolder) -> None:
    pipelines.write(
        "shop/flows.py",
        """
        from pyspark import pipelines as dp
        from pyspark.sql import SparkSession
        from pyspark.sql import functions as F

        spark = SparkSession.active()

        @dp.temporary_view
        def parsed():
            text = F.col("value").cast("string")
            row = F.from_json(text, "id INT, customer STRING, amount INT")
            return spark.readStream.table("orders").select(row.alias("row")).select("row.*")

        @dp.table(partition_cols=["customer"])
        def clean():
            return spark.readStream.table("parsed").where("amount > 0")

        @dp.materialized_view
        def totals():
            return spark.read.table("clean").groupBy("customer").agg(F.sum("amount").alias("sum"))

        dp.create_sink("big", format="polybus", options={"topic": "big.orders"})

        @dp.append_flow(target="big", name="big_orders")
        def big_orders():
            big = spark.readStream.table("clean").where("amount >= 40")
            return big.select(F.to_json(F.struct("id")).alias("value"))
        """,
    )
    pipelines.run()
    assert pipelines.rows("shop.clean", "id", "amount", "customer") == [
        (n, n * 10, f"c{n % 2}") for n in range(1, 6)
    ]
    assert pipelines.rows("shop.totals", "customer", "sum") == [("c0", 60), ("c1", 90)]
    pipelines.bus.publish("orders", as_json([{"id": 9, "customer": "c0", "amount": 90}]))
    pipelines.run()
    assert pipelines.rows("shop.totals", "customer", "sum") == [("c0", 150), ("c1", 90)]
    topic = pipelines.spark.read.format("polybus").option("data", str(pipelines.bus.data))
    sent = topic.option("subscribe", "big.orders").load().selectExpr("string(value) AS value")
    assert sorted(row.value for row in sent.collect()) == as_json_ids(4, 5, 9)


def as_json_ids(*ids: int) -> list[str]:
    return [f'{{"id":{n}}}' for n in ids]


def test_sql_files_mean_the_same_as_in_spark(pipelines: PipelineFolder) -> None:
    pipelines.write(
        "shop.sql",
        """
        -- Orders; with a ';' in a comment.
        CREATE STREAMING TABLE lines (id INT, note STRING) PARTITIONED BY (note);

        CREATE FLOW small AS INSERT INTO lines BY NAME
        SELECT INT(string(value):id) AS id, 'a;b' AS note
        FROM STREAM(orders) WHERE INT(string(value):amount) < 30;

        CREATE FLOW large AS INSERT INTO lines BY NAME
        SELECT INT(string(value):id) AS id, 'large' AS note
        FROM STREAM orders WHERE INT(string(value):amount) >= 30;

        CREATE MATERIALIZED VIEW counts AS
        WITH known AS (SELECT note FROM lines)
        SELECT note, count(*) AS n FROM known GROUP BY note
        """.replace("string(value):", "parse_json(string(value)):"),
    )
    pipelines.run()
    assert pipelines.rows("shop.counts", "note", "n") == [("a;b", 3), ("large", 3)]


def test_columns_are_added_and_rows_of_another_type_are_quarantined(
    pipelines: PipelineFolder,
) -> None:
    text = """
        from pyspark import pipelines as dp

        dp.create_streaming_table("mixed")

        def orders(*columns):
            return spark.readStream.table("orders").selectExpr(*columns)

        @dp.append_flow(target="mixed")
        def first():
            return orders("INT(offset) AS id")

        """
    pipelines.write("shop.py", text)
    pipelines.run()
    flows = """
        @dp.append_flow(target="mixed")
        def wider():
            return orders("INT(offset) + 10 AS id", "topic AS more")

        @dp.append_flow(target="mixed")
        def other():
            return orders("STRING(offset) AS id")
        """
    pipelines.write("shop.py", text + flows)
    pipelines.run()
    known = [(n, None) for n in range(6)] + [(n + 10, "orders") for n in range(6)]
    assert pipelines.rows("shop.mixed", "id", "more") == sorted(known, key=repr)
    found = pipelines.rows("shop.mixed.quarantine", "row", "reason")
    reason = "table shop.mixed: column id is string in the new rows, not integer; cast it"
    assert found == [(f'{{"id":"{n}"}}', reason) for n in range(6)]
    pipelines.run()
    assert len(pipelines.rows("shop.mixed.quarantine", "row")) == 6


def test_a_table_is_read_as_it_was(pipelines: PipelineFolder) -> None:
    rates = open_table(pipelines.bus.data, "rates")
    for batch in range(2):
        rates.append(pa.table({"n": [batch + 1]}), writer="w", batch_id=batch)
    pipelines.write(
        "old.sql",
        """
        CREATE MATERIALIZED VIEW sums AS
        SELECT (SELECT sum(n) FROM rates VERSION AS OF 0) AS before, sum(n) AS now FROM rates
        """,
    )
    pipelines.write(
        "options.py",
        """
        from pyspark import pipelines as dp

        @dp.materialized_view
        def first():
            return spark.read.option("versionAsOf", 0).table("rates")
        """,
    )
    pipelines.run()
    assert pipelines.rows("old.sums", "before", "now") == [(1, 3)]
    assert pipelines.rows("options.first", "n") == [(1,)]


TOTALS = """
from pyspark import pipelines as dp
from pyspark.sql import functions as F

@dp.table
def clean():
    row = F.from_json(F.col("value").cast("string"), "id INT, customer STRING, amount INT")
    rows = spark.readStream.table("orders").select(row.alias("row")).select("row.*")
    return rows

@dp.materialized_view
def totals():
    return spark.read.table("clean").groupBy("customer").agg(F.sum("amount").alias("sum"))
"""


# What is replaced in TOTALS by what, and words of the error.
UNFIT = [
    (
        '"orders"',
        '"big.orders"',
        "it read polybus subscribe=orders and now reads polybus subscribe=big",
    ),
    ("id INT", "id BIGINT", "column id was int and now is bigint"),
    (
        "return rows",
        "return rows.dropDuplicates(['id'])",
        "its state was for nothing and is now for",
    ),
    ("@dp.table", "@dp.table(partition_cols=['id'])", "partitioned by nothing and now is by id"),
]


def test_a_change_that_does_not_fit_the_checkpoint_is_an_error_before_the_start(
    pipelines: PipelineFolder,
) -> None:
    path = pipelines.write("shop.py", TOTALS)
    pipelines.run()
    for old, new, words in UNFIT:
        path.write_text(TOTALS.replace(old, new, 1))
        text = pipelines.problem()
        assert "pipeline.changed" in text and f"{path}:5: flow clean cannot continue" in text
        assert words in text and "--reset clean" in text
    renamed = TOTALS.replace(
        "@dp.table", 'dp.create_streaming_table("clean")\n\n@dp.append_flow(target="clean")'
    )
    path.write_text(renamed.replace("def clean()", "def other()"))
    assert "Name it clean to continue, or start over" in pipelines.problem()
    # A query that fits its checkpoint continues: no row is read twice, no table is rebuilt.
    path.write_text(TOTALS.replace("return rows", "return rows.where('amount < 50')"))
    pipelines.bus.publish("orders", as_json([{"id": 9, "customer": "c9", "amount": 9}]))
    pipelines.run()
    assert [row[0] for row in pipelines.rows("shop.clean", "id")] == [0, 1, 2, 3, 4, 5, 9]
    # Starting over takes a new query to all the data there is.
    path.write_text(
        TOTALS.replace("id INT", "id BIGINT").replace("return rows", "return rows.where('id > 3')")
    )
    pipelines.run(reset=["clean"])
    assert [row[0] for row in pipelines.rows("shop.clean", "id")] == [4, 5, 9]
    assert pipelines.rows("shop.totals", "customer", "sum") == [("c0", 40), ("c1", 50), ("c9", 9)]
    # A new table would have only what comes from now on.
    drop_table(pipelines.bus.data, "shop.clean")
    text = pipelines.problem()
    assert "table shop.clean was removed" in text and "start over with --reset clean" in text
    pipelines.run(reset=["clean"])
    assert [row[0] for row in pipelines.rows("shop.clean", "id")] == [4, 5, 9]


def test_the_plan_of_a_batch_is_durable_before_a_declared_table_has_the_batch(
    pipelines: PipelineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines.write("shop.py", TOTALS)
    with monkeypatch.context() as patched:
        writes = record_writes(patched)
        pipelines.run()
    plan = checkpoints_of(pipelines.bus.data, "shop") / "clean" / "offsets" / "0"
    assert writes[:2] == [("sync", str(plan)), ("commit", "shop.clean")]


def test_progress_counts_rows_that_a_stream_read_and_rows_of_a_view(
    pipelines: PipelineFolder,
) -> None:
    pipelines.write("shop.py", TOTALS)
    runner = pipelines.start(pipelines.prepare(), continuous=False)
    assert runner.wait(PASS_TIMEOUT_S)
    runner.stop()
    clean, totals = sorted(runner.progress(), key=lambda one: one.flow)
    assert (clean.rows, clean.batch_rows, totals.rows) == (6, 6, 2)
    assert (clean.inputs, clean.outputs) == (["topic:orders"], ["table:shop.clean"])
    assert (totals.inputs, totals.outputs) == (["table:shop.clean"], ["table:shop.totals"])


JOINED = """
from pyspark import pipelines as dp
from pyspark.sql import functions as F

def rows(topic, schema):
    row = F.from_json(F.col("value").cast("string"), schema)
    return spark.readStream.table(topic).select(row.alias("row")).select("row.*")

@dp.table
def known():
    return rows("names", "customer STRING, name STRING")

@dp.table
def joined():
    orders = rows("orders", "id INT, customer STRING")
    return orders.join(spark.read.table("known"), "customer", "left")

@dp.materialized_view
def per_name():
    return spark.sql("SELECT name, count(*) AS n FROM joined GROUP BY name")
"""


def test_a_continuous_run_joins_with_tables_as_they_grow(spark: Any, tmp_path: Path) -> None:
    with running_bus(tmp_path, ["orders", "names"]) as bus:
        pipelines = PipelineFolder(spark, bus, tmp_path)
        pipelines.write("shop.py", JOINED)
        bus.publish("names", as_json([{"customer": "c0", "name": "Ann"}]))
        prepared = pipelines.prepare()
        after = {flow.name: flow.after for flow in prepared.flows}
        assert after == {"known": (), "joined": ("known",), "per_name": ("joined",)}
        runner = pipelines.start(prepared, continuous=True)
        try:
            for n, name in enumerate(("Ann", "Bob")):
                if n:
                    bus.publish("names", as_json([{"customer": f"c{n}", "name": name}]))
                await_rows(bus, "shop.known", n + 1)
                bus.publish("orders", as_json([{"id": n, "customer": f"c{n}"}]))
                await_rows(bus, "shop.joined", n + 1)
            expected = [("Ann", 1), ("Bob", 1)]
            eventually(lambda: pipelines.rows("shop.per_name", "name", "n") == expected)
            eventually(lambda: [one.lag for one in runner.progress()] == [0, 0, None])
            states = {one.flow: one.state for one in runner.progress()}
            assert states == {"known": "running", "joined": "running", "per_name": "waiting"}
            eventually(lambda: {"shop.known", "shop.joined"} <= consumers(bus))
            assert runner.failures == []
        finally:
            assert runner.stop(30)
        assert pipelines.rows("shop.joined", "id", "name") == [(0, "Ann"), (1, "Bob")]


def test_a_bus_on_another_machine_is_read_and_written_by_its_url(
    pipelines: PipelineFolder, tmp_path: Path
) -> None:
    where = BusLocation(tmp_path / "lake", pipelines.bus.url)
    remote = PipelineFolder(pipelines.spark, pipelines.bus, tmp_path, where)
    remote.write(
        "far.sql",
        """
        CREATE STREAMING TABLE ids AS
        SELECT INT(parse_json(string(value)):id) AS id FROM STREAM(orders);
        CREATE MATERIALIZED VIEW counts AS
        SELECT (SELECT count(*) FROM ids) AS ids, (SELECT count(*) FROM orders) AS messages
        """,
    )
    remote.run()
    assert remote.rows("far.ids", "id") == [(n,) for n in range(6)]
    assert remote.rows("far.counts", "ids", "messages") == [(6, 6)]


def await_rows(bus: RunningBus, table: str, count: int) -> None:
    lake_table = open_table(bus.data, table)
    eventually(lambda: lake_table.rows == count, timeout_s=120)


def consumers(bus: RunningBus) -> set[str]:
    listed = request_json(bus.url, "GET", "/v1/consumers", token=read_token(bus.data))
    found = listed["consumers"] if isinstance(listed, dict) else listed
    return {one.get("group") or one.get("name") for one in found}
