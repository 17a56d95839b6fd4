"""The standard pipeline's tables, row by row, from messages made by hand."""

from __future__ import annotations

import datetime
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from standard_kit import EPOCH, NOON, Pipe, Topics, frame_of, make_decoding_raise
from topics_kit import publish

from polybus.cli import tables
from polybus.config import DeclaredTopic
from polybus.errors import StorageError, UsageError
from polybus.lake import stopped
from polybus.lake.standard_tables import checkpoint_of
from polybus.lake.stopped import StoppedTopic
from polybus.lake.table import LakeTable, open_table, table_names
from polybus.log.disk import replace_file
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.declared_fields import schema_fields
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.flows import FlowContext
from polybus.spark.pipelines.standard import batches, poison
from polybus.spark.pipelines.standard.batches import StandardBatches
from polybus.spark.views import collect

ORDERS = DeclaredTopic(
    name="orders",
    schema="id BIGINT NOT NULL, name STRING, tags ARRAY<STRING>",
    message_id="$.id",
    event_time="$.sent.at",
)


def test_every_message_is_decoded_by_its_format(spark: Any, tmp_path: Path) -> None:
    pipe, topics = Pipe(spark, tmp_path), Topics()
    values: list[Any] = ['{"a": [1, null]}', " [2]", "hello é", "42", b"\xff\x00", ""]
    messages = [topics.message("t", value) for value in values]
    messages.append(topics.message("t", "", headers={"unit": "°C", "raw": b"\xfe"}))
    pipe.run(0, messages)
    assert pipe.silver(
        "offset", "format", "CAST(payload AS STRING)", "text", "binary", "bytes"
    ) == [
        (0, "json", '{"a":[1,null]}', None, None, 16),
        (1, "json", "[2]", None, None, 4),
        (2, "text", None, "hello é", None, 8),
        (3, "text", None, "42", None, 2),
        (4, "binary", None, None, b"\xff\x00", 2),
        (5, "text", None, "", None, 0),
        (6, "properties", None, None, None, 0),
    ]
    assert pipe.silver("properties")[6] == ({"unit": "°C", "raw": "/g=="},)
    assert pipe.rows("quarantine", "offset") == []
    assert {row[0] for row in pipe.rows("silver", "epoch")} == {EPOCH}


def test_what_cannot_be_decoded_is_quarantined_with_its_bytes_and_the_reason(
    spark: Any, tmp_path: Path
) -> None:
    pipe, topics = Pipe(spark, tmp_path, ORDERS, value_bytes_max=60), Topics()
    bad = {
        "{broken": "begins like JSON, but is not valid JSON, or has a duplicate key",
        "x" * 61: "the value has 61 bytes; value-bytes-max is 60",
    }
    declared = "the topic is declared as JSON, but the value"
    bad_orders = {
        '{"id": "seven"}': "schema: id is missing or not of type bigint",
        '{"name": "no id"}': "schema: id is missing or not of type bigint",
        '{"id": 1, "tags": 5}': "schema: tags is not of type array<string>",
        "[1]": "schema: not an object; id is missing or not of type bigint",
        "text": f"{declared} is not valid JSON, or has a duplicate key",
    }
    messages = [topics.message("t", value, headers={"h": b"\xff"}) for value in bad]
    messages += [topics.message("orders", value) for value in bad_orders]
    messages.append(topics.message("orders", b"\xff"))
    messages.append(topics.message("orders", '{"id": "7", "name": null, "more": 1}'))
    pipe.run(0, messages)
    found = pipe.rows("quarantine", "topic", "offset", "value", "reason")
    expected = [("t", n, v.encode(), r) for n, (v, r) in enumerate(bad.items())]
    expected += [("orders", n, v.encode(), r) for n, (v, r) in enumerate(bad_orders.items())]
    expected.append(("orders", 5, b"\xff", f"{declared} is not UTF-8"))
    assert found == sorted(expected, key=repr)
    assert pipe.rows("quarantine", "headers")[-1] == ([("h", b"\xff")],)
    assert pipe.silver("topic", "offset") == [("orders", 6)]
    columns = open_table(tmp_path, "quarantine").schema
    assert columns is not None
    assert {"epoch", "timestamp", "protocol", "sender", "key", "quarantined_at"} < set(
        columns.names
    )


def test_event_time_and_id_come_from_the_declared_path_or_a_header(
    spark: Any, tmp_path: Path
) -> None:
    pipe, topics = Pipe(spark, tmp_path, ORDERS), Topics()
    iso, early = "2026-03-01T11:59:30Z", "2026-03-01T11:00:00+01:00"
    millis = int(NOON.timestamp() * 1000)
    pipe.run(
        0,
        [
            topics.message("orders", f'{{"id": 1, "sent": {{"at": "{iso}"}}}}'),
            topics.message("orders", f'{{"id": 2, "sent": {{"at": {millis}}}}}'),
            topics.message("orders", '{"id": 3, "sent": {"at": "never"}}'),
            topics.message("t", "x", headers={"message-id": "m", "event-time": early}),
        ],
    )
    half_a_minute, two_hours = datetime.timedelta(seconds=30), datetime.timedelta(hours=2)
    plain = NOON.replace(tzinfo=None)
    assert pipe.silver("topic", "message_id", "CAST(event_time AS TIMESTAMP_NTZ)", "late") == [
        ("orders", "1", plain - half_a_minute, False),
        ("orders", "2", plain, False),
        ("orders", "3", plain, False),
        ("t", "m", plain - two_hours, True),
    ]


def test_duplicates_within_the_watermark_are_removed_and_counted(
    spark: Any, tmp_path: Path
) -> None:
    pipe, topics = Pipe(spark, tmp_path, watermark_s=60), Topics()

    def sent(name: str, after_s: float, topic: str = "t") -> dict[str, Any]:
        return topics.message(topic, name, after_s=after_s, headers={"message-id": name})

    pipe.run(0, [sent("a", 0), sent("b", 0), sent("a", 1), topics.message("t", "no id")])
    pipe.run(1, [sent("a", 2), sent("b", 62), sent("c", 62), sent("c", 62), sent("a", 2, "other")])
    pipe.restart()
    pipe.run(2, [sent("c", 100), sent("d", 100), sent('{"e": 1}', 100)])
    shown = "CONCAT(topic, ' ', COALESCE(text, CAST(payload AS STRING)))"
    assert [row[0] for row in pipe.silver(shown)] == [
        *("other a", "t a", "t b", "t no id", "t b", "t c", "t d", 't {"e":1}')
    ]
    assert sum(row[0] for row in pipe.rows("traffic", "duplicates")) == 4
    assert sum(row[0] for row in pipe.rows("traffic", "messages")) == 12


def test_a_repeated_batch_changes_nothing(spark: Any, tmp_path: Path) -> None:
    pipe, topics = Pipe(spark, tmp_path, ORDERS), Topics()
    batch = [topics.message("orders", '{"id": 1}'), topics.message("orders", '{"id": 1}')]
    batch += [topics.message("orders", "no"), topics.message("t", "x")]
    pipe.run(0, batch)

    def everything() -> list[Any]:
        return [
            pipe.rows("silver", "topic", "offset"),
            pipe.rows("quarantine", "topic", "offset"),
            pipe.rows("traffic", "topic", "messages", "duplicates", "quarantined"),
            pipe.rows("top_senders", "topic", "messages"),
        ]

    before = everything()
    assert before[0] == [("orders", 0), ("t", 0)]
    assert before[2] == [("orders", 3, 1, 1), ("t", 1, 0, 0)]
    pipe.restart(begun=0)
    pipe.run(0, batch)
    assert everything() == before
    files = list((tmp_path / "tables" / "silver").glob("*.parquet"))
    assert len(files) == len(open_table(tmp_path, "silver").files()), "leftovers"


# In the order of the docstring of batches.py.
WRITES = [
    *("standard-settings.json", "standard-aside.json", "standard-stopped.json", "silver"),
    *("silver_o", "quarantine", "recent_ids", "expectations", "traffic", "top_senders"),
    *("standard-stopped.json", "deliveries"),
]


STOPPING = (
    DeclaredTopic(name="o", schema="id INT", expect={"one": "id = 1"}),
    DeclaredTopic(name="s", expect_or_fail={"none": "false"}),
)


def batch_of_every_write() -> list[dict[str, Any]]:
    topics = Topics()
    delivered = {"kind": "delivered", "session": "s", "time": "2026-03-01T12:00:00Z", "count": 3}
    return [
        topics.message("t", "{bad"),
        topics.message("t", "good", headers={"message-id": "1"}),
        topics.message("t", "poison"),
        topics.message("o", '{"id": 1}'),
        topics.message("s", "x"),
        topics.message("c", "x"),
        topics.message("$events", json.dumps({"events": [delivered]})),
    ]


def keep_before_each_write(data: Path, kept: Path, patched: pytest.MonkeyPatch) -> list[str]:
    """Copy the data folder before each write; the names of those that were done."""

    def around(write: Any, name_of: Callable[[Any], str]) -> Any:
        def writing(first: Any, *arguments: Any, **options: Any) -> Any:
            shutil.copytree(data, kept / str(len(done)))
            done.append(name_of(first))
            return write(first, *arguments, **options)

        return writing

    done: list[str] = []
    patched.setattr(LakeTable, "change", around(LakeTable.change, lambda table: str(table.name)))
    for module in (batches, poison, stopped):
        patched.setattr(module, "replace_file", around(replace_file, lambda path: str(path.name)))
    return done


@pytest.fixture(scope="module")
def kept(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder as each write of a batch finds it, by its number, and as the last leaves it.

    That is what is left if the process dies there.
    """
    kept, data = tmp_path_factory.mktemp("kept"), tmp_path_factory.mktemp("batch")
    pipe = Pipe(spark, data, *STOPPING)
    # An earlier batch left it out; its conditions are gone now, so that it continues.
    earlier = StoppedTopic(EPOCH, 0, "", {"none": "false"}, "standard.decode:test", -1)
    stopped.write(data, {"c": earlier})
    with pytest.MonkeyPatch.context() as patched:
        make_decoding_raise(patched)
        done = keep_before_each_write(data, kept, patched)
        pipe.run(0, batch_of_every_write())
    assert done == WRITES
    shutil.copytree(data, kept / str(len(WRITES)))
    return kept


@pytest.mark.parametrize("position", range(len(WRITES) + 1))
def test_a_batch_that_ends_before_any_write_is_completed_without_loss_or_duplicates(
    spark: Any, tmp_path: Path, kept: Path, position: int
) -> None:
    shutil.copytree(kept / str(position), tmp_path, dirs_exist_ok=True)
    pipe = Pipe(spark, tmp_path, *STOPPING)
    pipe.restart(begun=0)
    pipe.run(0, batch_of_every_write())
    # Decoding no longer raises, but what the first run has set aside stays so.
    is_aside = "standard-aside.json" in WRITES[:position]
    good, bad = ([1], [0, 2]) if is_aside else ([1, 2], [0])
    found = pipe.rows("silver", "topic", "offset")
    assert found == [("c", 0), ("o", 0), *(("t", offset) for offset in good)]
    assert [(topic, one.offset) for topic, one in stopped.read(tmp_path).items()] == [("s", 0)]
    assert pipe.rows("quarantine", "offset") == [(offset,) for offset in bad]
    counted = pipe.rows("traffic", "messages", "duplicates", "quarantined")
    assert counted == [(1, 0, 0), (1, 0, 0), (3, 0, len(bad))]
    assert pipe.rows("top_senders", "messages") == [(1,), (1,), (3,)]
    assert pipe.rows("silver_o", "id") == [(1,)]
    assert pipe.rows("expectations", "topic", "passed", "failed") == [("o", 1, 0)]
    assert pipe.rows("deliveries", "session", "sent") == [("s", 3)]
    assert open_table(tmp_path, "recent_ids").rows == 1


def test_a_batch_runs_again_without_its_note_only_if_silver_does_not_have_it(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, topics = Pipe(spark, tmp_path), Topics()
    batch = [topics.message("t", "good"), topics.message("t", "poison")]
    with monkeypatch.context() as patched:
        make_decoding_raise(patched)
        pipe.run(0, batch)
    path = tmp_path / "pipeline" / poison.FILE
    path.write_bytes(path.read_bytes().replace(b'"batch":0', b'"batch":9'))
    pipe.restart(begun=0)
    with pytest.raises(StorageError, match=r"pipeline\.settings.*aside.json: its checksum"):
        pipe.run(0, batch)
    pipe.run(1, [topics.message("t", "more")])
    assert pipe.rows("silver", "offset") == [(0,), (2,)]
    assert pipe.rows("quarantine", "offset") == [(1,)]


def test_new_settings_apply_to_new_batches_and_not_to_an_unfinished_one(
    spark: Any, tmp_path: Path
) -> None:
    pipe, topics = Pipe(spark, tmp_path), Topics()
    pipe.run(0, [topics.message("orders", "free text")])
    pipe.configure(ORDERS)
    pipe.restart(begun=1)
    pipe.run(1, [topics.message("orders", "text again")])
    pipe.run(2, [topics.message("orders", "text no more")])
    assert pipe.rows("silver", "offset") == [(0,), (1,)]
    assert pipe.rows("quarantine", "offset") == [(2,)]


def test_spark_analyses_the_decoding_once_until_settings_change(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, decoded = tmp_path / "data", batches._good
    analysed: list[str] = []

    def good(frame: Any) -> Any:
        analysed.append("")
        return decoded(frame)

    monkeypatch.setattr(batches, "_good", good)
    publish(data, "orders", [b'{"id": 0}'])
    pipe = Pipe(spark, data)
    checkpoint = data / "pipeline" / "checkpoint"
    trigger = {"processingTime": "0 seconds"}
    bus = BusLocation(data)
    context = FlowContext(spark=spark, bus=bus, checkpoint=checkpoint, trigger=trigger)
    query = batches.start_decode(context)
    query.processAllAvailable()
    for number in (1, 2):
        publish(data, "orders", [b'{"id": %d}' % number])
        query.processAllAvailable()
    assert len(analysed) == 1
    assert pipe.rows("quarantine", "offset") == []
    pipe.configure(ORDERS)
    publish(data, "orders", [b'{"id": "x"}', b'{"id": 4}'])
    query.processAllAvailable()
    query.stop()
    assert len(analysed) == 2
    assert pipe.rows("silver", "offset", "message_id") == [
        (0, None),
        (1, None),
        (2, None),
        (4, "4"),
    ]
    assert pipe.rows("quarantine", "offset") == [(3,)]


def test_batches_for_spark_connect_are_created_on_the_server(spark: Any, tmp_path: Path) -> None:
    topics, checkpoint = Topics(), tmp_path / "checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "metadata").touch()
    sent = pickle.dumps(
        StandardBatches(tmp_path, "standard.decode:test", Checkpoint(checkpoint), None)
    )
    there = pickle.loads(sent)
    for batch_id in range(2):
        (checkpoint / "offsets" / str(batch_id)).touch()
        there(frame_of(spark, [topics.message("t", "x")]), batch_id)
    assert sorted(open_table(tmp_path, "silver").read()["offset"].to_pylist()) == [0, 1]


def test_traffic_is_counted_per_topic_protocol_and_minute(spark: Any, tmp_path: Path) -> None:
    pipe, topics = Pipe(spark, tmp_path), Topics()
    early = {"event-time": "2026-03-01T10:00:00Z"}
    pipe.run(0, [topics.message("t", "ab", after_s=59), topics.message("t", "abcd", after_s=60)])
    pipe.run(
        1,
        [
            topics.message("t", "abc", after_s=61, sender="10.0.0.2:1"),
            topics.message("t", "{no", after_s=62),
            topics.message("t", "x", after_s=63, headers=early),
            topics.message("t", "abc", after_s=61, protocol="http"),
        ],
    )
    minute = NOON + datetime.timedelta(minutes=1)
    columns = ("topic", "protocol", "minute", "messages", "bytes", "late", "quarantined")
    assert pipe.rows("traffic", *columns, "size_p50", "size_p99") == [
        ("t", "goms", NOON, 1, 2, 0, 0, 2, 2),
        ("t", "goms", minute, 4, 11, 1, 1, 3, 4),
        ("t", "http", minute, 1, 3, 0, 0, 3, 3),
    ]
    assert pipe.rows("top_senders", "topic", "hour", "sender", "messages", "bytes") == [
        ("t", NOON, "10.0.0.1:1", 5, 13),
        ("t", NOON, "10.0.0.2:1", 1, 3),
    ]


def test_an_invalid_schema_is_reported_with_its_topic(spark: Any) -> None:
    with pytest.raises(UsageError, match=r"pipeline.schema: topics: orders: schema 'id NUMBER'"):
        schema_fields("orders", "id NUMBER")
    with pytest.raises(UsageError, match="contains a quote"):
        schema_fields("orders", "`it's` INT")


def test_a_declared_topic_has_a_view_with_typed_columns(spark: Any, tmp_path: Path) -> None:
    pipe, topics = Pipe(spark, tmp_path, ORDERS), Topics()
    pipe.run(
        0,
        [
            topics.message("orders", '{"id": "7", "tags": ["a"], "name": "x"}'),
            topics.message("orders", '{"id": 8}'),
            topics.message("other", '{"id": 9}'),
        ],
    )
    (tmp_path / "polybus.json").write_text('{"format": 1}')
    query = "SELECT id + 1 AS next, name, tags, _message.offset FROM `silver.orders` ORDER BY id"
    rows = collect(spark, query, tmp_path, rows_max=10)
    assert rows.to_pylist() == [
        {"next": 8, "name": "x", "tags": ["a"], "offset": 0},
        {"next": 9, "name": None, "tags": None, "offset": 1},
    ]


def test_silver_is_built_again_from_the_log_with_all_that_it_feeds(
    spark: Any, tmp_path: Path
) -> None:
    data, pipe = tmp_path, Pipe(spark, tmp_path, ORDERS)
    publish(data, "orders", [b'{"id": %d}' % n for n in (1, 2)] + [b'{"id": "x"}'])
    open_table(data, "mine").append(pa.table({"n": [1]}), writer="w", batch_id=0)
    checkpoint = checkpoint_of(data)
    context = FlowContext(
        spark=spark,
        bus=BusLocation(data),
        checkpoint=checkpoint,
        trigger={"availableNow": True},
    )

    def filled() -> dict[str, list[tuple[Any, ...]]]:
        assert batches.start_decode(context).awaitTermination(60)
        columns = {
            "silver": ("offset", "message_id"),
            "quarantine": ("offset",),
            "silver_orders": ("id",),
            "traffic": ("topic", "messages", "quarantined", "duplicates"),
        }
        return {name: pipe.rows(name, *some) for name, some in columns.items()}

    def drop(*arguments: str) -> Any:
        return CliRunner().invoke(tables.drop, [*arguments, "--yes", "--data", str(data)])

    first = filled()
    assert first["silver"] == [(0, "1"), (1, "2")] and first["quarantine"] == [(2,)]
    for name in ("silver", "recent_ids"):
        refused = drop(name)
        assert isinstance(refused.exception, UsageError)
        assert refused.exception.code == "lake.needed"
    assert filled() == first
    # As if the folder was removed by hand: nothing is added to a silver with a hole.
    open_table(data, "silver").path.rename(data / "silver")
    with pytest.raises(UsageError, match=r"pipeline\.checkpoint: table silver lacks batch 0"):
        filled()
    (data / "silver").rename(open_table(data, "silver").path)
    assert drop("quarantine", "--rebuild").exit_code == 2
    done = drop("silver", "--rebuild")
    assert table_names(data) == ["mine"] and not checkpoint.exists(), done.output
    assert set(first) <= set(done.stdout.removeprefix("removed ").strip().split(", "))
    assert filled() == first
    assert drop("silver", "--rebuild").exit_code == 0
    unknown = drop("silver", "--rebuild").exception
    assert isinstance(unknown, UsageError) and unknown.code == "lake.unknown"
