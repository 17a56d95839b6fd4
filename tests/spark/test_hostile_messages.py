"""No message stops the standard pipeline: what cannot be processed is in quarantine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from spark_kit import RunningBus, running_bus
from standard_kit import Pipe, Topics, make_decoding_raise

from polybus.client import connect
from polybus.lake.table import LakeTable, open_table
from polybus.spark import tables
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.flows import FlowProgress, FlowRunner
from polybus.spark.pipelines.standard import batches, poison
from polybus.spark.pipelines.standard.batches import flows
from polybus.spark.views import collect

SCHEMA = (
    "id BIGINT, tiny TINYINT, whole INT, real DOUBLE, single FLOAT, price DECIMAL(10,2), "
    "at TIMESTAMP, local TIMESTAMP_NTZ, day DATE, good BOOLEAN, name STRING, "
    "raw BINARY, tags ARRAY<INT>, sizes MAP<STRING, INT>, "
    "inner STRUCT<a: INT, b: STRING>, free VARIANT"
)
DECLARED: list[Any] = [
    {"name": "any"},
    {"name": "json", "format": "json"},
    {"name": "typed", "schema": SCHEMA, "message-id": "$.id", "event-time": "$.at"},
]
NORMAL = '{"id": %d, "name": "normal", "at": "2026-03-01T12:00:00Z"}'
LONG = 1_000_000
TIMES = [
    *("+294247-01-10T04:00:54.775807Z", "-290308-12-21T19:59:05.224192Z", "9999-12-31T23:59:59Z"),
    *("9999-12-31T23:59:59.999999-18:00", "0000-01-01T00:00:00Z", "0001-01-01T00:00:00+18:00"),
    *("10000-01-01", "-0001-01-01", "1582-10-10", "1969-12-31T23:59:59.999999Z", "2026-02-30"),
    *("2026-03-01T25:61:61Z", "2016-12-31T23:59:60Z", "2026-03-01T12:00:00+99:99", "epoch", "now"),
    *("2026-03-01T12:00:00[Mars/Phobos]", "T", "12:00", "0", "-1", "-62135596800", "1e308", "-0.0"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "NaN", "Infinity"),
    *("199999999999999999", "200000000000000000", "99999999999", "1e-320", "", " ", "\0", "\ud7ff"),
    *(
        "9" * 400,
        "0x7fffffff",
        "1e400",
        "1" * LONG,
        "2026-03-01T12:00:00" + "0" * LONG,
        "٢٠٢٦-٠٣-٠١",
    ),
]
FIELDS: list[str] = [
    *("null", "true", "0", "-0", "-0.0", "1e400", "-1e400", "1e-400", "5e-324", "1.0", '""', "[]"),
    *("{}", "9223372036854775807", "9223372036854775808", "-9223372036854775809", '"\\u0000"'),
    *('"\\ud800"', '"\\udfff\\ud800"', '"NaN"', '"Infinity"', '"\\uffff"', "[null]", "[[[]]]"),
    *('"9999-99-99"', '"+294247-01-10T04:00:54.775807Z"', '"-290308-12-21T19:59:05Z"', '"0000"'),
    *("99999999999999999999999999999999999999", "0." + "1" * 60, "1" * 999, "1" * 1001, "9" * 5000),
    *(
        "12345678901.999",
        '{"a": "x", "b": {}}',
        '{"": 1}',
        '{"a": 99999999999}',
        '"' + "x" * 70_000 + '"',
    ),
]
VALUES: list[str | bytes] = [
    *("", " ", "\n\t\r ", "\0", "\ufeff{}", "{", "[", "}", "]", "{}", "[]", "null", "true", "NaN"),
    *("Infinity", "-", "1e", "01", "'a'", "{'a': 1}", "{a: 1}", '{"a": NaN}', '{"a": -Infinity}'),
    *(
        '{"a": 1, "a": 2}',
        '{"a": 1, "\\u0061": 2}',
        '{"a": 1,}',
        "[1,]",
        "[,]",
        '{"a": 1} x',
        "{}{}",
    ),
    *('{"\\ud800": 1}', '{"\\ud800": 1, "\\ud801": 2}', '{"": {"": {"": 1}}}', '{"a\\u0000b": 1}'),
    *(
        '{"id": "x\ty"}',
        '["\n"]',
        '{"a": "\\x"}',
        '{"a": "\\u12"}',
        "/* */ {}",
        "[1] // x",
        "[0x1]",
    ),
    *("[" * 900 + "]" * 900, "[" * 999 + "]" * 999, "[" * 1001 + "]" * 1001, "[" * 100_000),
    *('{"a":' * 900 + "1" + "}" * 900, '{"a":' * 100_000, "[" * LONG + "]" * LONG),
    *("[" + "1" * LONG + "]", "[1e" + "9" * LONG + "]", "[1e999999999]", "[-1e-999999999]"),
    *("[" + "0," * 200_000 + "0]", json.dumps({f"k{n}": n for n in range(20_000)})),
    *('{"' + "k" * 60_000 + '": 1}', '{"' + "k" * LONG + '": 1}', '["' + "x" * LONG + '"]'),
    *(" " * LONG + "{}", "\n" * LONG, " " * LONG + "x", "{" + " " * LONG, "x" * LONG, "é" * LONG),
    *(
        b"\xff",
        b"{\xff}",
        b'{"a": "\xff"}',
        b'{"\xed\xa0\x80": 1}',
        b"\xc0\x80",
        b"\xf4\x90\x80\x80",
    ),
    *(
        b"[" + b"\x00" * 100,
        b"\xef\xbb\xbf[1]",
        b"\xff\xfe{\x00}\x00",
        b"\x1f\x8b\x08",
        b"PAR1" * 10,
    ),
    *(
        "x" * (1 << 20),
        "{" + "x" * (1 << 20),
        '["' + "\\u0041" * 170_000 + '"]',
        "\u2028\u202e\ufffe",
    ),
    *(f'{{"{name}": {text}}}' for text in FIELDS for name in ("id", "at", "price", "free")),
    *(
        f'{{"id": {n}, "whole": {text}, "tags": {text}, "inner": {text}}}'
        for n, text in enumerate(FIELDS, 5000)
    ),
]
HEADERS: list[Any] = [
    *({"event-time": text} for text in TIMES),
    *({"message-id": text} for text in ("", "\0", "\n", "x" * LONG, "t\n7\nid", "é" * 1000, "nan")),
    *({name: b"\xff\xfe\xed\xa0\x80"} for name in ("event-time", "message-id", "other")),
    *({"": "x"}, {"\0": "x"}, {"é" * 100: "x"}, {"a" * 200: b"\0" * 1000}, {"x": ""}),
    {f"h{number}": str(number) for number in range(1000)},
]


TOPICS = [one["name"] for one in DECLARED]


async def publish_zoo(bus: RunningBus) -> set[tuple[str, int]]:
    """Publish every kind to every topic, a normal message after each; where the normal ones are."""
    normal = set()
    async with connect(f"boson+properties://127.0.0.1:{bus.port}") as client:
        for topic in TOPICS:
            zoo: list[tuple[str | bytes, dict[str, str | bytes] | None]]
            zoo = [(value, None) for value in VALUES]
            zoo += [(NORMAL % (2000 + index), headers) for index, headers in enumerate(HEADERS)]
            for index, (value, headers) in enumerate(zoo):
                await client.publish(topic, value, headers=headers)
                await client.publish(topic, NORMAL % (1_000_000 + index))
                normal.add((topic, 2 * index + 1))
            last = await client.publish(topic, NORMAL % 0, receipt=True)
            assert last is not None and last.offset == 2 * len(zoo)
    return normal


def places(data: Path, table: str) -> list[tuple[str, int]]:
    rows = open_table(data, table).read().select(["topic", "offset"]).to_pylist()
    return [(row["topic"], row["offset"]) for row in rows]


def test_no_message_of_a_hostile_zoo_stops_a_flow_or_is_lost(spark: Any, tmp_path: Path) -> None:
    settings = {"pipeline": {"alert-history-s": 0.5, "alert-messages-min": 1}}
    with running_bus(tmp_path, DECLARED, settings) as bus:
        normal = asyncio.run(publish_zoo(bus))
        runner = FlowRunner(spark, BusLocation(bus.data), continuous=False)
        for flow in flows(bus.data):
            runner.start(flow)
            assert runner.wait(150), runner.progress()
        states = {one.flow: (one.state, one.error) for one in runner.progress()}
        assert states == {"decode": ("done", None), "watch": ("done", None)}
    good, bad = places(bus.data, "silver"), places(bus.data, "quarantine")
    assert normal <= set(good)
    assert len(good) + len(bad) == len({*good, *bad})
    total = len(TOPICS) * (2 * (len(VALUES) + len(HEADERS)) + 1)
    traffic = open_table(bus.data, "traffic").read()
    assert sum(traffic["messages"].to_pylist()) == total
    assert sum(traffic["quarantined"].to_pylist()) == len(bad)
    # Some hostile ids are equal to others.
    assert len(good) + len(bad) + sum(traffic["duplicates"].to_pylist()) == total
    assert sum(traffic["duplicates"].to_pylist()) < 40
    assert {row["topic"] for row in open_table(bus.data, "alerts").read().to_pylist()} == {*TOPICS}
    reasons = open_table(bus.data, "quarantine").read()["reason"].to_pylist()
    assert all(reasons) and not any("cannot be processed" in one for one in reasons)
    # Every row can be read again: in Python, whose datetime is the narrowest type, and in Spark.
    assert len(open_table(bus.data, "silver").read()["event_time"].to_pylist()) == len(good)
    shown = "SELECT COUNT(CAST(payload AS STRING)) AS n, COUNT(properties) FROM silver"
    assert collect(spark, shown, bus.data, rows_max=1).to_pylist()[0]["n"] > len(normal)
    typed = collect(spark, "SELECT * FROM `silver.typed`", bus.data, rows_max=total)
    assert typed.num_rows == sum(topic == "typed" for topic, _ in good)


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> None:
    make_decoding_raise(monkeypatch)


def mixed(topics: Topics) -> list[dict[str, Any]]:
    values = ["poison", "good", "good", "{bad", "poison it's", "good"]
    return [topics.message(topic, value) for value in values for topic in ("a", "b")]


def check_mixed(pipe: Pipe) -> None:
    assert len(pipe.rows("silver", "offset")) == 6
    found = pipe.rows("quarantine", "topic", "offset", "value", "reason")
    assert [row[:3] for row in found] == [
        (topic, offset, value)
        for topic in ("a", "b")
        for offset, value in ((0, b"poison"), (3, b"{bad"), (4, b"poison it's"))
    ]
    assert all(("boom" in row[3]) == (b"poison" in row[2]) for row in found)
    counted = pipe.rows("traffic", "topic", "messages", "quarantined")
    assert counted == [("a", 6, 3), ("b", 6, 3)]


@pytest.mark.parametrize("table", ["silver", "quarantine"])
def test_messages_that_make_decoding_raise_are_quarantined_once_also_after_a_crash(
    spark: Any, tmp_path: Path, raising: None, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    def commit(self: LakeTable, *arguments: Any, **options: Any) -> bool:
        if self.name == table:
            raise ZeroDivisionError
        return real_commit(self, *arguments, **options)

    real_commit = LakeTable.commit
    pipe, topics = Pipe(spark, tmp_path), Topics()
    batch = mixed(topics)
    with monkeypatch.context() as patched:
        patched.setattr(LakeTable, "commit", commit)
        with pytest.raises(ZeroDivisionError):
            pipe.run(0, batch)
    pipe.restart(begun=0)
    pipe.run(0, batch)
    check_mixed(pipe)
    pipe.run(1, [topics.message("a", "good")])
    assert len(pipe.rows("silver", "offset")) == 7


def test_a_batch_with_very_many_messages_that_raise_loses_none(
    spark: Any, tmp_path: Path, raising: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poison, "FOUND_MAX", 1)
    pipe, topics = Pipe(spark, tmp_path), Topics()
    pipe.run(0, [topics.message("a", "poison" if n % 2 else "good") for n in range(8)])
    offsets = [*pipe.rows("silver", "offset"), *pipe.rows("quarantine", "offset")]
    assert sorted(offsets) == [(n,) for n in range(8)]
    assert any("together with" in row[0] for row in pipe.rows("quarantine", "reason"))


@pytest.mark.parametrize("path", ["stage", "stage_small"])
def test_no_message_is_blamed_for_a_table_that_cannot_be_written(
    spark: Any, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(frame: Any, table: LakeTable, *arguments: Any, **options: Any) -> Any:
        if table.name == "silver":
            raise RuntimeError("No space left on device")
        return real_stage(frame, table, *arguments, **options)

    real_stage = getattr(tables, path)
    pipe, topics = Pipe(spark, tmp_path), Topics()
    pipe.is_small = path == "stage_small"
    batch = [topics.message("a", "good")]
    with monkeypatch.context() as patched:
        patched.setattr(batches, path, full)
        with pytest.raises(RuntimeError, match="No space left"):
            pipe.run(0, batch)
    assert pipe.rows("quarantine", "offset") == []
    pipe.run(0, batch)
    assert pipe.rows("silver", "offset") == [(0,)]


def decode_all(spark: Any, bus: RunningBus) -> FlowProgress:
    """One pass of the flow `decode`."""
    runner = FlowRunner(spark, BusLocation(bus.data), continuous=False)
    runner.start(flows(bus.data)[0])
    assert runner.wait(150), runner.progress()
    return runner.progress()[0]


def test_quarantine_has_only_the_beginning_of_a_large_value(
    spark: Any, tmp_path: Path, raising: None
) -> None:
    """Quarantined with a reason, or because it raises: the log has the whole value."""
    pipe, topics = Pipe(spark, tmp_path, value_bytes_max=2000), Topics()
    values = ["x" * 5000, "poison" * 1000, "{" * 1500, "good"]
    pipe.run(0, [topics.message("a", value) for value in values])
    found = pipe.rows("quarantine", "offset", "bytes", "cut", "value")
    assert found == [
        (0, 5000, True, b"x" * 1024),
        (1, 6000, True, b"poison" * 170 + b"pois"),
        (2, 1500, False, b"{" * 1500),
    ]
    assert pipe.rows("traffic", "messages", "bytes", "quarantined") == [(4, 12_504, 3)]


@pytest.mark.parametrize(("first", "then"), [(1000, 9000), (9000, 1000)])
def test_a_batch_keeps_its_limit_of_values_whatever_is_configured_meanwhile(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, then: int
) -> None:
    """A value between the two limits is in one table, once."""

    def commit(self: LakeTable, *arguments: Any, **options: Any) -> bool:
        done = real_commit(self, *arguments, **options)
        if self.name == "silver":
            raise ZeroDivisionError
        return done

    real_commit = LakeTable.commit
    with running_bus(tmp_path, ["t"]) as bus:
        bus.publish("t", ["x" * 5000, "y" * 10_000, "good"])
        with monkeypatch.context() as patched:
            patched.setattr(LakeTable, "commit", commit)
            bus.reconfigure(pipeline={"value-bytes-max": first})
            assert decode_all(spark, bus).state == "failed"
        bus.reconfigure(pipeline={"value-bytes-max": then})
        assert decode_all(spark, bus).state == "done"
        bus.publish("t", ["x" * 5000])
        assert decode_all(spark, bus).state == "done"
    small = [0] if first > 5000 else []
    later = [3] if then > 5000 else []
    everything = {("t", offset) for offset in range(4)}
    assert places(bus.data, "silver") == [("t", offset) for offset in sorted([*small, 2, *later])]
    assert set(places(bus.data, "quarantine")) == everything - set(places(bus.data, "silver"))
    assert len(places(bus.data, "quarantine")) == 2


def test_values_of_the_largest_size_do_not_exceed_the_memory_of_java(
    spark: Any, tmp_path: Path
) -> None:
    """12 values of 60 MB in a batch; what quarantine has of them is small.

    By default such values are blobs, and Spark gets their references.
    """
    inline = {"limits": {"inline-bytes-max": 64 << 20}}
    with running_bus(tmp_path, ["t"], inline) as bus:
        for _ in range(12):
            bus.publish("t", [b"\xff" * 60_000_000])
        bus.publish("t", ["good"])
        assert decode_all(spark, bus).state == "done"
    table = open_table(bus.data, "quarantine")
    assert table.read()["bytes"].to_pylist() == [60_000_000] * 12
    assert sum(file.stat().st_size for file in table.files()) < 1_000_000
    assert places(bus.data, "silver") == [("t", 12)]
