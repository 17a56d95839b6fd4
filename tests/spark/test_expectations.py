"""Expectations: what happens to rows that do not meet them, and how they are counted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pipeline_kit import PipelineFolder
from spark_kit import RunningBus, eventually, running_bus
from standard_kit import Pipe, Topics
from test_standard_typed import TypedPipe

from polybus.client.http import blocking as bus_http
from polybus.config import DeclaredTopic
from polybus.errors import UsageError
from polybus.lake import stopped
from polybus.lake.table import open_table
from polybus.spark import listener
from polybus.spark.expectations import (
    CheckedRows,
    Expectation,
    added,
    check,
    expect,
    expect_or_drop,
    expectations_of,
)
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.declared.constraints import split
from polybus.spark.pipelines.flows import FlowProgress, FlowRunner
from polybus.spark.pipelines.running.stats import ExpectationStats
from polybus.spark.pipelines.spark_sessions import another_session
from polybus.spark.pipelines.standard.batches import flows
from polybus.spark.pipelines.standard.expected import with_fields
from polybus.spark.pipelines.standard.watch import Watch, WatchState

ORDERS = DeclaredTopic(
    name="orders",
    schema="id BIGINT NOT NULL, price DOUBLE, `key` STRING",
    expect={"has a price": "price > 0 AND `key` <> 'price'", "is late": "late OR offset >= 0"},
    expect_or_drop={"small id": "id < 100", "no seven": "id <> 7"},
)


def counted(pipe: Pipe) -> list[tuple[Any, ...]]:
    return pipe.rows("expectations", "expectation", "passed", "failed")


def test_rows_are_kept_dropped_and_counted_in_the_batch_that_writes_them(
    spark: Any, tmp_path: Path
) -> None:
    pipe, topics = TypedPipe(spark, tmp_path, ORDERS), Topics()
    values = [
        '{"id": 1, "price": 5, "key": "a"}',
        '{"id": 2, "price": -5, "key": "a"}',
        '{"id": 3}',
        '{"id": 7, "price": 1, "key": "a"}',
        '{"id": 700, "price": 1, "key": "a"}',
        "{broken",
    ]
    messages = [topics.message("orders", value) for value in values]
    messages.append(topics.message("chat", '{"id": 9}'))
    pipe.run(0, messages)
    pipe.run(0, messages)
    assert pipe.ids() == [1, 2, 3]
    assert pipe.rows("quarantine", "offset", "reason")[:2] == [
        (3, "expectation: no seven"),
        (4, "expectation: small id"),
    ]
    expected = [("has a price", 1, 2), ("is late", 3, 0), ("no seven", 3, 1), ("small id", 3, 1)]
    assert counted(pipe) == expected
    pipe.run(1, [topics.message("orders", '{"id": 4, "price": 1, "key": "b"}')])
    totals = [(one.name, one.passed, one.failed) for one in pipe.figures.expectations]
    assert sorted(totals)[0] == ("has a price", 3, 4)
    assert sum(row[1] for row in counted(pipe) if row[0] == "has a price") == 2


def test_the_counts_of_a_batch_are_published_with_its_statistics(
    spark: Any, tmp_path: Path
) -> None:
    topic = DeclaredTopic(name="orders", expect={"a price": "payload:price::double > 0"})
    pipe, topics = TypedPipe(spark, tmp_path, topic), Topics()
    pipe.run(0, [topics.message("orders", '{"price": 1}'), topics.message("orders", "x")])
    watch = Watch(tmp_path)
    state = WatchState("query", 0, -1, 0)
    rows = [json.loads(row["value"]) for row in watch._stats_messages(state)]
    [found] = [row for row in rows if "expectation" in row]
    assert (found["topic"], found["expectation"]) == ("orders", "a price")
    assert (found["passed"], found["failed"], found["consequence"]) == (1, 1, "expect")


STRICT = DeclaredTopic(name="orders", expect_or_fail={"no debt": "payload:sum::int >= 0"})


def test_only_the_topic_that_must_not_be_stops_until_the_config_lets_it_through(
    spark: Any, tmp_path: Path
) -> None:
    pipe, topics = TypedPipe(spark, tmp_path, STRICT), Topics()
    pipe.run(0, [topics.message("orders", '{"sum": 1}')])
    late = [topics.message("orders", '{"sum": 2}'), topics.message("orders", '{"sum": -1}')]
    for _ in range(2):
        pipe.run(1, [*late, topics.message("chat", "x")])
        pipe.restart(begun=1)
    assert pipe.rows("silver", "topic", "offset") == [("chat", 0), ("orders", 0)]
    assert pipe.rows("traffic", "topic", "messages") == [("chat", 1), ("orders", 1)]
    assert len(list((tmp_path / "tables" / "silver").glob("*.parquet"))) == 2
    [(topic, note)] = stopped.read(tmp_path).items()
    assert (topic, note.offset, note.batch) == ("orders", 1, 1)
    text = "1 of 2 messages of the batch do not meet the expectation 'no debt'"
    assert text in stopped.still_stopped(tmp_path, {topic: note})["orders"]
    pipe.configure()
    assert stopped.still_stopped(tmp_path, {topic: note}) == {}
    for _ in range(2):
        pipe.run(2, late)
    assert len(pipe.silver("offset")) == 4
    assert stopped.read(tmp_path) == {}


def decode_once(spark: Any, bus: RunningBus) -> FlowProgress:
    """One pass of the standard pipeline, reported to the bus."""
    session = another_session(spark)
    listener.install(session, data=bus.data)
    runner = FlowRunner(session, BusLocation(bus.data), continuous=False)
    runner.start(flows(bus.data)[0])
    assert runner.wait(150), runner.progress()
    [flow] = runner.progress()
    assert (flow.state, flow.error) == ("done", None)
    return flow


def test_a_stopped_topic_is_told_everywhere_and_goes_on_where_it_stopped(
    spark: Any, tmp_path: Path
) -> None:
    orders = {"name": "orders", "expect-or-fail": {"few": "offset < 2"}}
    with running_bus(tmp_path, [orders, "chat"]) as bus:
        bus.publish("orders", ["a", "b"])
        decode_once(spark, bus)
        bus.publish("orders", ["c", "d"])
        bus.publish("chat", ["x"])
        flow = decode_once(spark, bus)
        assert flow.warning is not None and "'orders' is stopped at offset 2" in flow.warning
        assert "reload the bus (SIGHUP)" in flow.warning
        assert flow.lag == 2
        bus.publish("chat", ["y"])
        bus.publish("orders", ["e"])
        decode_once(spark, bus)
        places = [("chat", 0), ("chat", 1), ("orders", 0), ("orders", 1)]
        assert silver_places(bus) == places
        eventually(lambda: consumer_of(bus)["lag"] == 3)
        assert list(consumer_of(bus)["stopped"]) == ["orders"]
        health = bus_http.request(bus.url, "GET", "/readyz").decode()
        assert "consumer standard: topic orders is stopped at offset 2" in health
        told = ask(bus, "/v1/topics/$events/messages?from=earliest")["messages"]
        kinds = [event["kind"] for one in told for event in one["value"]["events"]]
        assert kinds.count("consumer-stopped") == 1
        bus.reconfigure(topics=["orders", "chat"])
        flow = decode_once(spark, bus)
        assert (flow.warning, flow.lag) == (None, 0)
        assert silver_places(bus) == places + [("orders", offset) for offset in (2, 3, 4)]
        eventually(lambda: bus_http.request(bus.url, "GET", "/readyz") == b"ok\n")


def ask(bus: RunningBus, path: str) -> Any:
    return json.loads(bus_http.request(bus.url, "GET", path))


def consumer_of(bus: RunningBus) -> dict[str, Any]:
    found: list[dict[str, Any]] = ask(bus, "/v1/consumers")["consumers"]
    return found[0] if found else {"lag": None}


def silver_places(bus: RunningBus) -> list[tuple[str, int]]:
    rows = open_table(bus.data, "silver").read().select(["topic", "offset"]).to_pylist()
    return sorted((row["topic"], row["offset"]) for row in rows)


def test_a_condition_that_spark_does_not_understand_is_left_out_and_shown(
    spark: Any, tmp_path: Path
) -> None:
    topic = DeclaredTopic(
        name="orders",
        expect={"wrong": "nothing > 1", "no condition": "offset", "good": "offset >= 0"},
    )
    pipe, topics = TypedPipe(spark, tmp_path, topic), Topics()
    pipe.run(0, [topics.message("orders", "x")])
    assert counted(pipe) == [("good", 1, 0)]
    assert pipe.warning is not None
    assert "'wrong' is left out" in pipe.warning and "not a condition" in pipe.warning


def test_rows_of_any_frame_are_checked(spark: Any) -> None:
    expected = [
        Expectation("even", "id % 2 = 0", "expect_or_drop"),
        Expectation("small", "IF(id = 3, NULL, id < 8)"),
        Expectation("few", "id < 9", "expect_or_fail"),
    ]
    checked = CheckedRows(spark.range(10), expected)
    assert sorted(row[0] for row in checked.rows.collect()) == [0, 2, 4, 6, 8]
    counts = checked.counts()
    assert [(one.passed, one.failed) for one in counts] == [(5, 5), (7, 3), (9, 1)]
    with pytest.raises(UsageError, match=r"pipeline\.expectation: 1 of 10 rows .* 'few'"):
        check(counts)
    totals = list(counts)
    added(totals, checked.counts())
    assert [one.passed for one in totals] == [10, 14, 18]
    assert CheckedRows(spark.range(2), []).counts() == []


def test_a_function_of_a_pipeline_carries_its_expectations() -> None:
    @expect("first", "a > 0")
    @expect_or_drop("second", "b > 0")
    def dataset() -> None: ...

    assert [one.name for one in expectations_of(dataset)] == ["first", "second"]
    assert expectations_of(print) == ()


@pytest.mark.parametrize(
    ("condition", "written"),
    [
        ("price > 0", "P > 0"),
        ("PRICE + `first name` > 0", "P + N > 0"),
        ("price(1) = 'price' AND t.price = x::price", "price(1) = 'price' AND t.price = x::price"),
        ('price.x = "price" AND prices = 1', 'P.x = "price" AND prices = 1'),
    ],
)
def test_columns_of_a_schema_are_found_in_a_condition(condition: str, written: str) -> None:
    assert with_fields(condition, {"price": "P", "first name": "N"}) == written


CHECKED = """
    from pyspark import pipelines as dp
    from polybus.spark.expectations import expect, expect_or_drop, expect_or_fail

    @dp.table
    @expect("even", "id % 2 = 0")
    @expect_or_drop("small", "id < 3")
    {last}
    def checked():
        return spark.readStream.table("orders").selectExpr("offset AS id")
"""


def test_the_tables_of_a_pipeline_have_expectations(spark: Any, tmp_path: Path) -> None:
    with running_bus(tmp_path, ["orders"]) as bus:
        bus.publish("orders", ["x"] * 5)
        pipelines = PipelineFolder(spark, bus, tmp_path)
        pipelines.write("shop.py", CHECKED.format(last=""))
        runner = pipelines.start(pipelines.prepare(), continuous=False)
        assert runner.wait(120)
        [flow] = runner.progress()
        assert (flow.state, flow.error) == ("done", None)
        assert pipelines.rows("shop.checked", "id") == [(0,), (1,), (2,)]
        counts = [(one.topic, one.name, one.passed, one.failed) for one in flow.expectations]
        assert counts == [("shop.checked", "even", 3, 2), ("shop.checked", "small", 3, 2)]
        pipelines.write("shop.py", CHECKED.format(last='@expect_or_fail("few", "id < 5")'))
        bus.publish("orders", ["x"])
        runner = pipelines.start(pipelines.prepare(), continuous=False)
        assert runner.wait(120)
        [failed] = runner.failures
        assert failed.error is not None and "1 of 1 rows of the batch do not meet" in failed.error
        assert len(pipelines.rows("shop.checked", "id")) == 3
        pipelines.write("shop.py", CHECKED.format(last='@expect("wrong", "nothing > 5")'))
        assert "shop.py" in pipelines.problem() and "'wrong'" in pipelines.problem()


EVERYWHERE = """
    from pyspark import pipelines as dp
    from polybus.spark.expectations import expect, expect_or_drop, expect_or_fail

    @dp.temporary_view
    @expect_or_drop("small", "id < 4")
    def numbers():
        return spark.readStream.table("orders").selectExpr("offset AS id", "offset % 2 AS part")

    @dp.table
    @expect_or_drop("not zero", "id <> 0")
    def kept():
        return spark.readStream.table("numbers")

    @dp.materialized_view
    @expect("even part", "part = 0")
    @expect_or_drop("more than one", "sum > 1")
    def sums():
        return spark.read.table("kept").groupBy("part").agg({{"id": "sum"}}).selectExpr(
            "part", "`sum(id)` AS sum")

    dp.create_sink("out", format="polybus", options={{"topic": "out"}})

    @dp.append_flow(target="out")
    @{consequence}("not three", "value <> '3'")
    def send():
        return spark.readStream.table("kept").selectExpr("CAST(id AS STRING) AS value")

    dp.create_streaming_table("newest")
    dp.create_auto_cdc_flow(
        target="newest", source="numbers", keys=["part"], sequence_by="id", stored_as_scd_type=1)
"""
IN_SQL = """
    CREATE STREAMING TABLE low (
      CONSTRAINT `is low` EXPECT (id < 2) ON VIOLATION DROP ROW,
      CONSTRAINT known EXPECT (id IS NOT NULL) ON VIOLATION FAIL UPDATE
    ) AS SELECT id FROM STREAM(numbers);
    CREATE MATERIALIZED VIEW lows (CONSTRAINT one EXPECT (n = 1)) AS SELECT count(*) AS n FROM low;
"""


def test_views_sinks_changes_and_sql_files_have_expectations_too(
    spark: Any, tmp_path: Path
) -> None:
    declared = {"tables": [{"name": "shop.newest", "expect-or-drop": {"one": "id < 3"}}]}
    with running_bus(tmp_path, ["orders", "out"], declared) as bus:
        bus.publish("orders", ["x"] * 6)
        pipelines = PipelineFolder(spark, bus, tmp_path)
        pipelines.write("shop/flows.py", EVERYWHERE.format(consequence="expect_or_drop"))
        pipelines.write("shop/low.sql", IN_SQL)
        runner = pipelines.start(pipelines.prepare(), continuous=False)
        assert runner.wait(200)
        flows = {flow.flow: flow for flow in runner.progress()}
        assert {flow.error for flow in flows.values()} == {None}
        counts = {
            name: {(one.topic, one.name): (one.passed, one.failed) for one in flow.expectations}
            for name, flow in flows.items()
        }
        small = {("shop.numbers", "small"): (4, 2)}
        assert counts["kept"] == small | {("shop.kept", "not zero"): (3, 1)}
        assert counts["sums"] == {
            ("shop.sums", "even part"): (1, 1),
            ("shop.sums", "more than one"): (2, 0),
        }
        assert counts["send"] == small | {("shop.out", "not three"): (2, 1)}
        assert counts["newest"] == small | {("shop.newest", "one"): (3, 1)}
        lows = {("shop.low", "is low"): (2, 2), ("shop.low", "known"): (4, 0)}
        assert counts["low"] == small | lows
        assert counts["lows"] == {("shop.lows", "one"): (0, 1)}
        assert pipelines.rows("shop.kept", "id") == [(1,), (2,), (3,)]
        assert pipelines.rows("shop.sums", "part", "sum") == [(0, 2), (1, 4)]
        assert pipelines.rows("shop.newest", "part", "id") == [(0, 2), (1, 1)]
        assert pipelines.rows("shop.low", "id") == [(0,), (1,)]
        found = ask(bus, "/v1/topics/out/messages?from=earliest")["messages"]
        assert [one["value"] for one in found] == [1, 2]
        stats = ExpectationStats(BusLocation(bus.data))
        for _ in range(2):
            stats.publish([asdict(flow) for flow in runner.progress()])
        told = ask(bus, "/v1/topics/$stats/messages?from=earliest")["messages"]
        rows = [one["value"] for one in told]
        assert len(rows) == sum(map(len, counts.values()))
        assert {("kept", "shop.kept", 3, 1), ("send", "shop.out", 2, 1)} <= {
            (one["flow"], one["table"], one["passed"], one["failed"]) for one in rows
        }
        pipelines.write("shop/flows.py", EVERYWHERE.format(consequence="expect_or_fail"))
        prepared = pipelines.prepare(reset=["send"], refresh=["send"])
        runner = pipelines.start(prepared, continuous=False)
        assert runner.wait(200)
        [failed] = runner.failures
        assert failed.error is not None and "expectation 'not three' of shop.out" in failed.error
        assert len(ask(bus, "/v1/topics/out/messages?from=earliest")["messages"]) == 2


def test_constraints_leave_a_statement_that_spark_parses() -> None:
    columns = "CREATE STREAMING TABLE a (id INT,\n CONSTRAINT x EXPECT (f(id, ')') > 0))\nAS T"
    text, [found] = split(columns)
    assert text.split() == "CREATE STREAMING TABLE a (id INT ) AS T".split()
    assert (text.count("\n"), len(text)) == (columns.count("\n"), len(columns))
    assert (found.name, found.condition, found.consequence) == ("x", "f(id, ')') > 0", "expect")
    for same in ("CREATE MATERIALIZED VIEW a AS SELECT f(1, 2)", "CREATE STREAMING TABLE a (id"):
        assert split(same) == (same, [])
