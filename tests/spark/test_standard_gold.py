"""What the standard pipeline computes with Arrow: percentiles, alerts, published statistics."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from standard_kit import NOON, Topics, frame_of

from polybus.config import Config, Pipeline
from polybus.config_file import load
from polybus.errors import ConfigError, PolybusError, StorageError, UsageError
from polybus.lake import settings as pipeline_settings
from polybus.lake.compact import vacuum
from polybus.lake.table import LakeTable, open_table
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.flows import FlowContext
from polybus.spark.pipelines.standard import gold, watch
from polybus.spark.pipelines.standard.batches import check_tables, writer_of
from polybus.spark.pipelines.standard.feed import changes

MINUTE = datetime.timedelta(minutes=1)
NOON_US = int(NOON.timestamp() * 1e6)
SETTINGS = Pipeline(alert_messages_min=10, alert_history_s=300.0)


def facts(sizes: list[int], topic: str = "t", minute: datetime.datetime = NOON) -> pa.Table:
    rows = [
        {"topic": topic, "protocol": "goms", "sender": "s", "timestamp": minute, "bytes": size}
        for size in sizes
    ]
    schema = pa.schema(
        [
            ("topic", pa.string()),
            ("protocol", pa.string()),
            ("sender", pa.string()),
            ("timestamp", pa.timestamp("us", "UTC")),
            ("bytes", pa.int64()),
        ]
    )
    return gold.facts_of(pa.Table.from_pylist(rows, schema=schema))


def add(table: Any, batch_id: int, *parts: pa.Table) -> None:
    table.add(gold.traffic_of(pa.concat_tables(parts), batch_id), writer="w", batch_id=batch_id)


def test_a_bucket_is_at_most_one_percent_from_every_size_in_it() -> None:
    sizes = np.concatenate([np.arange(0, 5000), np.geomspace(5000, 1 << 40, 2000).astype(np.int64)])
    found = gold.values_of(gold.buckets_of(sizes))
    assert np.all(np.abs(found - sizes) <= 0.01 * sizes + 0.5)
    assert np.array_equal(found[:50], sizes[:50])


def test_groups_are_in_the_order_of_their_keys_and_null_is_the_last() -> None:
    rows = pa.table({"topic": ["b", "a", None, "b", "é"], "hour": [2, 1, 1, 1, 1]})
    assert gold.Groups(rows, ("topic", "hour")).ids.tolist() == [2, 0, 4, 1, 3]
    assert gold.Groups(rows.slice(0, 0), ("topic", "hour")).ids.tolist() == []


def test_percentiles_are_right_when_a_minute_comes_in_many_batches(tmp_path: Path) -> None:
    draw = random.Random(5)
    sizes = [int(draw.lognormvariate(6, 1.5)) for _ in range(5000)]
    table = gold.traffic_table(tmp_path)
    for batch_id in range(10):
        add(table, batch_id, facts(sizes[batch_id::10]))
    (row,) = table.table.read().to_pylist()
    assert row["messages"] == 5000 and row["bytes"] == sum(sizes)
    for name, quantile in gold.QUANTILES.items():
        true = np.quantile(sizes, quantile, method="inverted_cdf")
        assert row[name] == pytest.approx(true, rel=0.01, abs=0.5)


def test_a_batch_touches_only_the_files_of_its_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gold, "CLOSED_ROWS", 3)
    table = gold.traffic_table(tmp_path)
    for number in range(5):
        add(table, number, *[facts([1], minute=NOON + number * 60 * MINUTE)])
    add(table, 5, *[facts([1], f"t{n}", NOON + 240 * MINUTE) for n in range(4)])
    files = len(table.table.files())
    assert files > 1
    add(table, 6, facts([1], minute=NOON))
    rows = {(r["topic"], r["minute"]): r["messages"] for r in table.table.read().to_pylist()}
    assert rows["t", NOON] == 2 and sum(rows.values()) == 10
    recent = table.recent(NOON_US + 239 * 60_000_000)
    assert recent is not None and recent.num_rows == 5


def test_a_damaged_file_is_not_added_to(tmp_path: Path) -> None:
    add(gold.traffic_table(tmp_path), 0, facts([1]))
    table = gold.traffic_table(tmp_path)
    [path] = table.table.files()
    column = pq.read_metadata(path).row_group(0).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset - 1] ^= 1  # The end of a page: its dictionary.
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"lake\.damaged.*CRC"):
        add(table, 1, facts([2]))


def test_the_change_data_feed_has_the_rows_that_a_batch_changes(tmp_path: Path) -> None:
    table = gold.traffic_table(tmp_path)
    add(table, 0, facts([1, 2], "a"), facts([1], "b"))
    add(table, 1, facts([4], "b"), facts([8], "c"))
    delta = DeltaTable(table.table.path)
    assert delta.metadata().configuration["delta.enableChangeDataFeed"] == "true"
    columns = ["_commit_version", "_change_type", "topic", "messages", "bytes"]
    feed = pa.table(delta.load_cdf(starting_version=0)).select(columns)
    assert sorted(tuple(row.values()) for row in feed.to_pylist()) == [
        (0, "insert", "a", 2, 3),
        (0, "insert", "b", 1, 1),
        (1, "insert", "c", 1, 8),
        (1, "update_postimage", "b", 2, 5),
        (1, "update_preimage", "b", 1, 1),
    ]
    assert vacuum(table.table, grace_s=-1) > 0
    assert table.table.read().num_rows == 3


def test_the_feed_tells_which_keys_are_gone() -> None:
    before, after = pa.table({"k": ["a", "b"], "n": [1, 2]}), pa.table({"k": ["b"], "n": [3]})
    found = changes(before, after, pa.table({"k": ["b"]}), ["k"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [
        ("b", 2, "update_preimage"),
        ("b", 3, "update_postimage"),
        ("a", 1, "delete"),
    ]


def minutes(*counts: int, topic: str = "t") -> pa.Table:
    """Rows of traffic: the last count is that of the minute at noon."""
    parts = [
        facts([1] * count, topic, NOON - (len(counts) - 1 - place) * MINUTE)
        for place, count in enumerate(counts)
        if count
    ]
    return gold.combine_traffic(gold.traffic_of(pa.concat_tables(parts), 0))


def found(traffic: pa.Table, after_s: float = 30.0, **raised: int) -> list[tuple[str, str, int]]:
    known = {("t", kind): at_us for kind, at_us in raised.items()}
    now_us = NOON_US + int(after_s * 1e6)
    return [
        (one.kind, one.topic, one.messages)
        for one in watch.find_alerts(traffic, now_us, SETTINGS, known)
    ]


def test_a_spike_is_a_minute_far_above_the_topics_own_history() -> None:
    usual = [20, 18, 22, 20, 19, 21]
    assert found(minutes(*usual, 81)) == [("spike", "t", 81)]
    assert found(minutes(*usual, 79)) == []
    assert found(minutes(1, 1, 1, 1, 1, 1, 9)) == [], "below alert-messages-min"
    assert found(minutes(20, 20, 200)) == [], "the topic is too young"
    assert found(minutes(*usual, 200, 20)) == [("spike", "t", 200)], "the minute just over"
    regular = [0, 90, 0, 0, 90, 0, 0, 90]
    assert found(minutes(1, *regular)) == [], "bursts are usual here"


def test_a_partial_first_minute_is_not_what_is_usual() -> None:
    young = Pipeline(alert_messages_min=10, alert_history_s=30.0)
    now_us = NOON_US + 59_000_000
    for counts, alerts in {
        (4, 60): 0,  # nothing is usual yet
        (4, 60, 60): 0,
        (4, 60, 60, 240): 1,
    }.items():
        assert len(watch.find_alerts(minutes(*counts), now_us, young, {})) == alerts, counts


def test_the_same_alert_is_not_repeated_for_a_while() -> None:
    traffic = minutes(20, 20, 20, 20, 20, 20, 100)
    assert found(traffic, spike=NOON_US - 569 * 1_000_000) == []
    assert found(traffic, spike=NOON_US - 571 * 1_000_000) == [("spike", "t", 100)]


def test_the_silence_of_a_busy_topic_raises_one_alert() -> None:
    busy = minutes(20, 20, 20, 20, 20, 20, 20)
    assert found(busy, after_s=60 + 179) == []
    assert found(busy, after_s=60 + 181) == [("silence", "t", 0)]
    assert found(busy, after_s=60 + 300, silence=NOON_US + 241_000_000) == []
    quiet = minutes(*[1] * 20)
    assert found(quiet, after_s=300) == []


SYSTEM = ("$stats", "shop/$stats", "new/$stats")


class Bus:
    """Takes what is published, unless it is away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away = False
        self.dies = False
        self.commits: dict[int, list[tuple[str, Any]]] = {}
        monkeypatch.setattr(watch, "publish", self.publish)

    def publish(self, rows: pa.Table, bus: Any, *, query: str, batch_id: int) -> None:
        if self.away:
            raise PolybusError("client.unreachable", "no bus")
        messages = [(row["topic"], msgspec.json.decode(row["value"])) for row in rows.to_pylist()]
        self.commits.setdefault(batch_id, messages)
        if self.dies:
            raise PolybusError("client.disconnected", "gone")

    def published(self, topic: str) -> list[Any]:
        return [value for tick in self.commits.values() for name, value in tick if name == topic]


def watching(tmp_path: Path) -> tuple[watch.Watch, FlowContext]:
    context = FlowContext(spark=None, bus=BusLocation(tmp_path), checkpoint=tmp_path, trigger={})
    return watch.Watch(tmp_path, clock_us=lambda: NOON_US + 30_000_000), context


def test_each_change_of_traffic_is_published_once_also_when_the_bus_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = Bus(monkeypatch)
    table = gold.traffic_table(tmp_path)
    watcher, context = watching(tmp_path)
    watcher.tick(context)
    add(table, 0, facts([5, 5]))
    watcher.tick(context)
    watcher.tick(context)
    assert [row["messages"] for row in bus.published("$stats")] == [2]
    assert bus.published("$stats")[0]["minute"] == "2026-03-01T12:00:00Z"
    bus.away = True
    add(table, 1, facts([5]))
    with pytest.raises(PolybusError):
        watcher.tick(context)
    add(table, 2, facts([5], "other"))
    bus.away, bus.dies = False, True
    watcher, context = watching(tmp_path)
    with pytest.raises(PolybusError):
        watcher.tick(context)
    bus.dies = False
    watcher, context = watching(tmp_path)
    watcher.tick(context)
    stats = [(row["topic"], row["messages"]) for row in bus.published("$stats")]
    assert stats == [("t", 2), ("t", 3), ("other", 1)]


def test_traffic_of_an_account_is_told_to_that_account_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = Bus(monkeypatch)
    (tmp_path / "accounts" / "shop" / "topics" / "$stats").mkdir(parents=True)
    (tmp_path / "accounts" / "new").mkdir()
    table = gold.traffic_table(tmp_path)
    watcher, context = watching(tmp_path)
    for number, topic in enumerate(("t", "shop/t", "new/t", "none/t")):
        add(table, number, facts([5], topic))
    watcher.tick(context)
    stats = {topic: [row["topic"] for row in bus.published(topic)] for topic in SYSTEM}
    assert stats == {"$stats": ["none/t", "t"], "shop/$stats": ["shop/t"], "new/$stats": []}


def test_an_alert_is_published_and_stored_exactly_once_through_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = Bus(monkeypatch)
    table = gold.traffic_table(tmp_path)
    for number in range(7):
        count = 20 if number < 6 else 500
        add(table, number, facts([1] * count, minute=NOON - (6 - number) * MINUTE))
    bus.away = True
    for _ in range(2):
        watcher, context = watching(tmp_path)
        with pytest.raises(PolybusError):
            watcher.tick(context)
    bus.away = False
    for _ in range(2):
        watcher, context = watching(tmp_path)
        watcher.tick(context)
    (alert,) = bus.published("$alerts")
    assert (alert["kind"], alert["topic"], alert["messages"]) == ("spike", "t", 500)
    assert open_table(tmp_path, "alerts").rows == 1


class Crash(BaseException):
    """The process dies."""


class CrashingWrites:
    """Dies before or after the write of a number; counts all such moments."""

    def __init__(self, crash_at: int) -> None:
        self._crash_at = crash_at
        self.moments = 0

    def _pass(self) -> None:
        if self.moments == self._crash_at:
            raise Crash
        self.moments += 1

    def around(self, write: Any) -> Any:
        def crashing(*arguments: Any, **options: Any) -> None:
            self._pass()
            write(*arguments, **options)
            self._pass()

        return crashing


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("crash_at", range(11))
def test_a_crash_at_any_write_of_a_tick_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int, stats: bool
) -> None:
    settings = Pipeline(stats=stats)
    pipeline_settings.write(tmp_path, Config(data=str(tmp_path), pipeline=settings))
    bus = Bus(monkeypatch)
    table = gold.traffic_table(tmp_path)
    for number in range(7):
        count = 20 if number < 6 else 500
        add(table, number, facts([1] * count, minute=NOON - (6 - number) * MINUTE))
    with monkeypatch.context() as patched:
        writes = CrashingWrites(crash_at)
        for owner, name in ((LakeTable, "append"), (watch, "replace_file"), (watch, "publish")):
            patched.setattr(owner, name, writes.around(getattr(owner, name)))
        watcher, context = watching(tmp_path)
        if crash_at < 10:
            with pytest.raises(Crash):
                watcher.tick(context)
        else:
            watcher.tick(context)
            assert writes.moments == 10, "new state, alerts, state, commit, state"
    watcher, context = watching(tmp_path)
    watcher.tick(context)
    watcher.tick(context)
    assert [one["messages"] for one in bus.published("$alerts")] == [500]
    assert open_table(tmp_path, "alerts").rows == 1
    assert [one["messages"] for one in bus.published("$stats")] == ([20] * 6 + [500]) * stats


def test_deliveries_are_reported_by_session(spark: Any, tmp_path: Path) -> None:
    topics = Topics()

    def report(*events: dict[str, Any]) -> dict[str, Any]:
        at = [{"time": "2026-03-01T12:00:00.5Z", "session": "s1", **event} for event in events]
        return topics.message("$events", msgspec.json.encode({"events": at}))

    table = gold.deliveries_table(tmp_path)

    def run(batch_id: int, *messages: dict[str, Any]) -> None:
        events = gold.events_of(frame_of(spark, messages))
        table.add(gold.deliveries_of(events), writer="w", batch_id=batch_id)

    other = {"kind": "delivered", "session": "s2", "count": 1, "messages": 9, "waiting": 1}
    sent = {"kind": "delivered", "topic": "t", "count": 3, "messages": 30, "waiting": 3}
    confirmed = {"kind": "confirmed", "count": 2, "wait-ms": 40.0, "waiting": 1}
    run(0, report({"kind": "session-opened"}, sent, other), report({"kind": "other", "count": 9}))
    run(1, report(confirmed, {"kind": "repeated", "count": 1}))
    run(1, report(confirmed))
    run(
        2,
        report(
            confirmed | {"count": 1, "wait-ms": 1000.0, "waiting": 0}, {"kind": "session-ended"}
        ),
    )
    columns = ("session", "sent", "messages", "sent_again", "confirmed", "waiting", "is_open")
    rows = {row["session"]: row for row in table.table.read().to_pylist()}
    assert [rows["s1"][name] for name in columns] == ["s1", 3, 30, 1, 3, 0, False]
    assert rows["s1"]["confirm_ms_p50"] == pytest.approx(40, rel=0.01)
    assert rows["s1"]["confirm_ms_p95"] == pytest.approx(1000, rel=0.01)
    assert [rows["s2"][name] for name in columns] == ["s2", 1, 9, 0, 0, 1, True]
    assert rows["s2"]["confirm_ms_p50"] is None


@pytest.mark.parametrize("name", ["silver", "recent_ids", "expectations"])
def test_tables_of_another_checkpoint_are_not_filled_twice(tmp_path: Path, name: str) -> None:
    """The error names all tables to remove, or the next start would be refused, too."""
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    writer = writer_of(checkpoint)
    for one in {"silver", name}:
        open_table(tmp_path, one).append(pa.table({"offset": [1]}), writer=writer, batch_id=0)
    check_tables(tmp_path, writer, checkpoint)
    (checkpoint.path / "metadata").unlink()
    with pytest.raises(UsageError) as caught:
        check_tables(tmp_path, writer_of(checkpoint), checkpoint)
    problem, _, advice = caught.value.text.partition("; ")
    assert caught.value.code == "pipeline.checkpoint"
    assert "table silver was filled from another" in problem and name in advice


def test_the_pipeline_reads_the_settings_that_the_bus_wrote(tmp_path: Path) -> None:
    orders = {"name": "Orders", "schema": "id INT", "message-id": "$.id", "event-time": "$.at[0]"}
    settings = {"topics": [orders, "plain"], "pipeline": {"watermark-s": 5.0, "alerts": False}}
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode(settings))
    config = load(path, {})
    pipeline_settings.write(tmp_path, config)
    found = pipeline_settings.read(tmp_path)
    assert found.pipeline == Pipeline(watermark_s=5.0, alerts=False)
    (topic,) = found.topics
    assert (topic.name, topic.message_id, topic.event_time) == ("orders", "$.id", "$.at[0]")
    assert pipeline_settings.read(tmp_path / "none") == pipeline_settings.PipelineSettings()


@pytest.mark.parametrize("path", ["id", "$", "$.a'b", "$..a", "$.a b"])
def test_an_invalid_path_is_reported_with_its_topic(tmp_path: Path, path: str) -> None:
    config = tmp_path / "config.json"
    config.write_bytes(msgspec.json.encode({"topics": [{"name": "orders", "message-id": path}]}))
    with pytest.raises(ConfigError, match="topics: orders: message-id is"):
        load(config, {})
