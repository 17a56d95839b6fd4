"""The stream reader without Spark: offsets, limits, new, lost and damaged topics."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows
from source_kit import SECOND_US, WrittenLog, offsets_of, source_options, written_log

from polybus import config
from polybus.errors import StorageError, UsageError
from polybus.lake import settings as pipeline_settings
from polybus.lake import stopped
from polybus.lake.stopped import StoppedTopic
from polybus.log import layout
from polybus.log.history.retention import retain
from polybus.spark.source import positions, readers
from polybus.spark.source.positions import shares
from polybus.spark.source.readers import PolybusStreamReader

ALL = ReadAllAvailable()


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenLog]:
    with written_log(tmp_path) as log:
        log.create("news")
        yield log


def stream(written: WrittenLog, **given: Any) -> PolybusStreamReader:
    given = {"startingOffsets": "earliest"} | given
    if not {"subscribe", "subscribePattern"} & set(given):
        given["subscribe"] = "news"
    return PolybusStreamReader(source_options(written.data, streaming=True, **given))


def step(reader: Any, start: Any, limit: Any = ALL) -> tuple[Any, list[tuple[str, int]]]:
    """One micro-batch: its end, and what is read. Offsets pass through JSON, as in Spark."""
    end = json.loads(json.dumps(reader.latestOffset(start, limit)))
    read = [] if end == start else offsets_of(reader, reader.partitions(start, end))
    return end, read


def places(offset: Any) -> dict[str, int]:
    return {topic: one["offset"] for topic, one in offset["topics"].items()}


def test_offsets_have_group_epoch_and_the_next_offset(written: WrittenLog) -> None:
    written.append("news", 3)
    epoch = written.log.bounds("news").epoch
    reader = stream(written, groupId="reports")
    start = reader.initialOffset()
    assert start == {"group": "reports", "topics": {"news": {"epoch": epoch, "offset": 0}}}
    assert places(reader.latestOffset(start, ALL)) == {"news": 3}
    assert places(reader.reportLatestOffset()) == {"news": 3}


def test_a_stream_reads_each_message_once_as_the_log_grows(written: WrittenLog) -> None:
    reader = stream(written)
    place, read = reader.initialOffset(), []
    for number in range(6):
        written.append("news", 5)
        if number % 2:
            written.hand_over()
        place, rows = step(reader, place)
        read += rows
    assert read == [("news", offset) for offset in range(30)]
    assert step(reader, place) == (place, [])


def test_a_repeated_batch_reads_the_same_messages(written: WrittenLog) -> None:
    written.append("news", 10)
    reader = stream(written)
    start = reader.initialOffset()
    end, read = step(reader, start, ReadMaxRows(7))
    written.append("news", 10)
    written.hand_over()
    again = stream(written)
    assert offsets_of(again, again.partitions(start, end)) == read


@pytest.mark.parametrize(("starting", "expected"), [("earliest", 0), ("latest", 4)])
def test_a_stream_begins_at_its_starting_offsets(
    written: WrittenLog, starting: str, expected: int
) -> None:
    written.append("news", 4)
    assert places(stream(written, startingOffsets=starting).initialOffset()) == {"news": expected}


def test_a_stream_begins_at_a_time(written: WrittenLog) -> None:
    written.append("news", 4)
    written.clock.now_us += 10 * SECOND_US
    written.append("news", 4)
    options = source_options(
        written.data,
        streaming=True,
        subscribe="news",
        startingTimestamp=written.clock.now_us // 1000 - 1,
    )
    assert places(PolybusStreamReader(options).initialOffset()) == {"news": 4}


def test_a_time_after_the_end_is_an_error_or_the_end(written: WrittenLog) -> None:
    written.append("news", 4)
    late = {"subscribe": "news", "startingTimestamp": written.clock.now_us // 1000 + 1}
    with pytest.raises(UsageError) as caught:
        PolybusStreamReader(source_options(written.data, streaming=True, **late)).initialOffset()
    assert caught.value.code == "spark.timestamp-unmatched"
    options = source_options(
        written.data, streaming=True, startingOffsetsByTimestampStrategy="latest", **late
    )
    assert places(PolybusStreamReader(options).initialOffset()) == {"news": 4}


def test_an_unknown_topic_is_reported_when_the_stream_starts(written: WrittenLog) -> None:
    with pytest.raises(UsageError) as caught:
        stream(written, subscribe="news,sport").initialOffset()
    assert caught.value.code == "topic.unknown"
    assert "option subscribe" in caught.value.text
    assert "'sport'" in caught.value.text


def test_a_matching_topic_that_is_created_later_joins_from_its_beginning(
    written: WrittenLog,
) -> None:
    reader = stream(written, subscribePattern="n.*")
    written.append("news", 2)
    place, read = step(reader, reader.initialOffset())
    written.create("nature", "sport")
    assert step(reader, place) == (place, []), "nothing to read in it yet"
    written.append("nature", 3)
    written.append("sport", 3)
    start = place
    place, rows = step(reader, start)
    assert rows == [("nature", 0), ("nature", 1), ("nature", 2)]
    again = stream(written, subscribePattern="n.*")
    assert offsets_of(again, again.partitions(start, place)) == rows
    written.append("nature", 1)
    assert step(reader, place)[1] == [("nature", 3)]


def test_the_limit_per_trigger_is_shared_in_proportion(written: WrittenLog) -> None:
    written.create("sport")
    written.append("news", 30)
    written.append("sport", 10)
    reader = stream(written, subscribe="news,sport", maxOffsetsPerTrigger=8)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(8)
    place, _ = step(reader, reader.initialOffset(), limit)
    assert places(place) == {"news": 6, "sport": 2}
    for _ in range(4):
        place, _ = step(reader, place, limit)
    assert places(place) == {"news": 30, "sport": 10}
    assert places(step(reader, reader.initialOffset(), ALL)[0]) == {"news": 30, "sport": 10}


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_shares_never_exceed_the_limit_and_never_starve_a_topic(most: int) -> None:
    left = {"a": 50, "b": 1, "c": 0, "d": 9}
    steps = 0
    while any(left.values()):
        taken = shares(left, most)
        assert sum(taken.values()) == min(most, sum(left.values()))
        left = {topic: count - taken[topic] for topic, count in left.items()}
        assert min(left.values()) >= 0
        steps += 1
    assert steps == -(-60 // most)


def test_a_batch_waits_for_enough_messages_until_the_delay_is_over(
    written: WrittenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(readers, "monotonic", lambda: now[0])
    reader = stream(written, minOffsetsPerTrigger=5, maxTriggerDelay="30s")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(5)
    written.append("news", 1)
    place, read = step(reader, reader.initialOffset(), limit)
    assert len(read) == 1, "the first batch waits for nothing"
    written.append("news", 4)
    assert step(reader, place, limit) == (place, [])
    now[0] += 31
    place, read = step(reader, place, limit)
    assert len(read) == 4
    written.append("news", 5)
    place, read = step(reader, place, limit)
    assert len(read) == 5, "enough is not waited for"
    written.append("news", 1)
    assert len(step(reader, place, ALL)[1]) == 1, "trigger once takes what there is"


def test_available_now_ends_where_the_log_ended_when_it_began(written: WrittenLog) -> None:
    written.append("news", 5)
    reader = stream(written, subscribePattern=".*", minOffsetsPerTrigger=100)
    place = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    written.append("news", 5)
    written.create("sport")
    written.append("sport", 5)
    place, read = step(reader, place, ReadMaxRows(3))
    place, more = step(reader, place, ReadMaxRows(3))
    assert read + more == [("news", offset) for offset in range(5)]
    assert step(reader, place, ReadMaxRows(3)) == (place, [])


def expire_first_half(written: WrittenLog) -> None:
    """Offsets 0 to 4 of `news` are removed, 5 to 9 stay."""
    written.append("news", 5)
    written.hand_over()
    written.clock.now_us += 86_400 * SECOND_US
    written.append("news", 5)
    written.hand_over()
    folder = layout.topic_folder(written.data, "news")
    assert retain(folder, config.Retention(age_s=3600), now_us=written.clock.now_us)


def lost(written: WrittenLog, reader: Any, start: Any) -> str:
    with pytest.raises(UsageError) as caught:
        step(reader, start)
    assert caught.value.code == "spark.data-loss"
    assert "failOnDataLoss" in caught.value.text
    return caught.value.text


def test_expired_offsets_are_an_error_that_names_topic_and_offset(written: WrittenLog) -> None:
    start = stream(written).initialOffset()
    expire_first_half(written)
    text = lost(written, stream(written), start)
    assert "topic 'news': the next offset to read, 0, has expired; the log holds 5 to 10" in text


def test_expired_offsets_are_skipped_and_logged_by_option(
    written: WrittenLog, caplog: pytest.LogCaptureFixture
) -> None:
    start = stream(written).initialOffset()
    expire_first_half(written)
    reader = stream(written, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "polybus.spark"):
        end, read = step(reader, start)
        step(reader, start)
    assert read == [("news", offset) for offset in range(5, 10)]
    assert [record.message for record in caplog.records if "expired" in record.message] != []
    assert len(caplog.records) == 1, "each loss is reported once"
    assert step(reader, end) == (end, [])


def test_a_recreated_topic_is_an_error_even_if_it_is_longer_now(written: WrittenLog) -> None:
    written.append("news", 3)
    start, _ = step(stream(written), stream(written).initialOffset())
    written.recreate("news")
    written.append("news", 8)
    assert "'news' was deleted and created again" in lost(written, stream(written), start)


def test_a_recreated_topic_is_read_from_its_beginning_by_option(written: WrittenLog) -> None:
    written.append("news", 3)
    reader = stream(written, failOnDataLoss="false")
    start, _ = step(reader, reader.initialOffset())
    written.recreate("news")
    written.append("news", 2)
    end, read = step(reader, start)
    assert read == [("news", 0), ("news", 1)]
    assert end["topics"]["news"]["epoch"] == written.log.bounds("news").epoch
    assert step(reader, end) == (end, [])


def test_a_deleted_topic_is_an_error_or_is_skipped(written: WrittenLog) -> None:
    written.create("sport")
    written.append("news", 3)
    pattern = {"subscribePattern": ".*"}
    start, _ = step(stream(written, **pattern), stream(written, **pattern).initialOffset())
    written.log.delete_topic("sport")
    written.append("news", 1)
    assert "topic 'sport' was deleted" in lost(written, stream(written, **pattern), start)
    reader = stream(written, failOnDataLoss="false", **pattern)
    end, read = step(reader, start)
    assert read == [("news", 3)]
    assert places(end) == {"news": 4}


def test_a_topic_that_is_left_out_keeps_its_offset_even_if_it_is_damaged(
    written: WrittenLog,
) -> None:
    written.create("sport", "weather")
    written.append("news", 3)
    written.append("sport", 3)
    pattern = {"subscribePattern": ".*"}
    start, _ = step(stream(written, **pattern), stream(written, **pattern).initialOffset())
    for topic in ("news", "sport", "weather"):
        written.append(topic, 2)
    manifest = layout.topic_folder(written.data, "sport") / "manifest.json"
    manifest.write_text("{")
    with pytest.raises(StorageError, match="log.damaged"):
        stream(written, **pattern).latestOffset(start, ALL)
    without = stream(written, leaveOut='["sport", "weather"]', **pattern)
    assert places(without.initialOffset()) == {"news": 0}
    place, read = step(without, start)
    assert read == [("news", 3), ("news", 4)]
    assert places(place)["sport"] == 3
    assert step(without, place) == (place, [])
    manifest.unlink()
    place, read = step(stream(written, **pattern), place)
    assert read == [("sport", 3), ("sport", 4), ("weather", 0), ("weather", 1)]
    assert places(place) == {"news": 5, "sport": 5, "weather": 2}


def damage(path: Path, text: bytes) -> None:
    """Flip a bit of the byte after a text; doing it again repairs the file."""
    content = bytearray(path.read_bytes())
    content[content.index(text) + len(text)] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("is_history", [True, False])
def test_a_damaged_topic_is_held_in_place_and_the_others_continue(
    written: WrittenLog,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_history: bool,
) -> None:
    monkeypatch.setattr(positions, "RECHECK_S", 0.0)
    written.create("sport")
    given = {"subscribePattern": ".*", "failOnDamage": "false"}
    for topic in ("news", "sport"):
        written.append(topic, 2)
    place, _ = step(stream(written, **given), stream(written, **given).initialOffset())
    written.append("news", 2)
    written.append("sport", 2, size=100)
    if is_history:
        written.hand_over()
    pattern = "sport/history/**/*.parquet" if is_history else "journal/*.arrows"
    (path,) = written.data.rglob(pattern)
    damage(path, b"sport:3" if not is_history else b"PAR1")
    with pytest.raises(StorageError, match="log.damaged"):
        reader = stream(written, subscribePattern=".*")
        step(reader, place)
    reader = stream(written, **given)
    with caplog.at_level(logging.WARNING):
        place, read = step(reader, place)
        assert read == [("news", 2), ("news", 3)]
        assert places(place) == {"news": 4, "sport": 2}
        assert list(place["damaged"]) == ["sport"] and path.name in place["damaged"]["sport"]
        written.append("news", 1)
        place, read = step(reader, place, ReadMaxRows(2))
        assert read == [("news", 4)]
        assert step(reader, place) == (place, [])
    assert [one.message.split(":")[0] for one in caplog.records] == [
        "topic 'sport' is held in place"
    ]
    assert places(reader.reportLatestOffset()) == {"news": 5, "sport": 4}
    damage(path, b"sport:3" if not is_history else b"PAR1")
    place, read = step(reader, place)
    assert read == [("sport", 2), ("sport", 3)]
    assert places(place) == {"news": 5, "sport": 4} and "damaged" not in place


def test_a_topic_whose_manifest_is_damaged_is_held_and_reported(written: WrittenLog) -> None:
    written.create("sport", "weather")
    given = {"subscribePattern": ".*", "failOnDamage": "false"}
    for topic in ("news", "sport"):
        written.append(topic, 3)
    place, _ = step(stream(written, **given), stream(written, **given).initialOffset())
    for topic in ("news", "sport", "weather"):
        written.append(topic, 1)
    manifests = [
        layout.topic_folder(written.data, topic) / "manifest.json" for topic in ("sport", "weather")
    ]
    for path in manifests:
        path.write_text("{")
    reader = stream(written, **given)
    reader.prepareForTriggerAvailableNow()
    place, read = step(reader, place)
    assert read == [("news", 3)]
    assert places(place)["sport"] == 3 and sorted(place["damaged"]) == ["sport", "weather"]
    assert step(reader, place) == (place, [])
    for path in manifests:
        path.unlink()
    place, read = step(stream(written, **given), place)
    assert read == [("sport", 3), ("weather", 0)]
    assert "damaged" not in place


def test_a_topic_whose_last_file_is_missing_is_held_and_repeats_nothing(
    written: WrittenLog,
) -> None:
    given = {"failOnDamage": "false", "failOnDataLoss": "false"}
    written.append("news", 3)
    reader = stream(written, **given)
    place, _ = step(reader, reader.initialOffset())
    written.append("news", 2)
    end = reader.latestOffset(place, ReadAllAvailable())
    (segment,) = written.data.glob("journal/*.arrows")
    kept = segment.rename(segment.with_suffix(".kept"))
    again = stream(written, **given)
    with pytest.raises(StorageError, match=r"log\.damaged"):
        again.partitions(place, end)
    after, read = step(again, end)
    assert (places(after), read) == (places(end), [])
    assert list(after["damaged"]) == ["news"]
    kept.rename(segment)
    written.append("news", 1)
    assert step(stream(written, **given), place)[1] == [("news", 3), ("news", 4), ("news", 5)]
    assert step(stream(written, **given), after)[1] == [("news", 5)]


def note_stopped(written: WrittenLog, offset: int, **conditions: str) -> None:
    """What a batch of the standard pipeline notes that leaves out `news`."""
    epoch = written.log.bounds("news").epoch
    stopped.write(written.data, {"news": StoppedTopic(epoch, offset, "why", conditions, "w", 1)})


def test_a_topic_that_a_batch_left_out_is_put_back_and_held_until_the_config_changes(
    written: WrittenLog,
) -> None:
    given = {"subscribe": "news,sport", "stoppedIn": str(written.data)}
    written.create("sport")
    strict = config.DeclaredTopic(name="news", expect_or_fail={"few": "x"})
    pipeline_settings.write(written.data, config.Config(topics=[strict]))
    written.append("news", 5)
    reader = stream(written, **given)
    start = reader.initialOffset()
    end, read = step(reader, start)
    assert len(read) == 5
    note_stopped(written, 2, few="x")
    # The batch that left it out runs again, without it.
    assert offsets_of(reader, reader.partitions(start, end)) == []
    written.append("sport", 1)
    place, read = step(reader, end)
    assert (places(place), read) == ({"news": 2, "sport": 1}, [("sport", 0)])
    assert "stopped at offset 2: why" in place["stopped"]["news"]
    assert step(stream(written, **given), place) == (place, [])
    pipeline_settings.write(written.data, config.Config())
    for before in (end, place):
        after, read = step(stream(written, **given), before)
        assert [one for one in read if one[0] == "news"] == [("news", at) for at in (2, 3, 4)]
        assert places(after)["news"] == 5 and "stopped" not in after


def test_a_topic_that_was_left_out_as_damaged_is_put_back_although_it_cannot_be_read(
    written: WrittenLog,
) -> None:
    given = {"failOnDamage": "false", "stoppedIn": str(written.data)}
    written.append("news", 5)
    end, _ = step(stream(written, **given), stream(written, **given).initialOffset())
    note_stopped(written, 3)
    manifest = layout.topic_folder(written.data, "news") / "manifest.json"
    manifest.write_text("{")
    place, read = step(stream(written, **given), end)
    assert (places(place), read, list(place["damaged"])) == ({"news": 3}, [], ["news"])
    manifest.unlink()
    stopped.write(written.data, {})
    assert step(stream(written, **given), place)[1] == [("news", 3), ("news", 4)]


def test_messages_that_expire_before_a_batch_is_repeated_are_data_loss(written: WrittenLog) -> None:
    start = stream(written).initialOffset()
    end = json.loads(json.dumps(start))
    end["topics"]["news"]["offset"] = 8
    expire_first_half(written)
    with pytest.raises(UsageError) as caught:
        stream(written).partitions(start, end)
    assert caught.value.code == "spark.data-loss"
    reader = stream(written, failOnDataLoss="false")
    read = offsets_of(reader, reader.partitions(start, end))
    assert read == [("news", offset) for offset in range(5, 8)]


def test_a_checkpoint_of_another_source_is_refused(written: WrittenLog) -> None:
    with pytest.raises(UsageError) as caught:
        stream(written).latestOffset({"news": {"0": 5}}, ALL)
    assert caught.value.code == "spark.checkpoint"
