"""LogReader: another process's view of the log, exact in what it gives."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from reader_kit import data, log, offsets, values
from segments_kit import DAY_US, NOON_US, expected_values, make_segment, make_topic, rows_batch

from polybus.errors import StorageError, UsageError
from polybus.log import layout
from polybus.log.columns import SCHEMA
from polybus.log.files import FileLog
from polybus.log.history import parquet
from polybus.log.history.handover import hand_over
from polybus.log.history.topic_history import TimeRange
from polybus.log.journal.segment import delete_segments
from polybus.log.reading.reader import LogReader

__all__ = ["data", "log"]


def test_a_folder_that_holds_no_log_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        LogReader(tmp_path / "nowhere")
    assert caught.value.code == "data.not-found"
    assert str(tmp_path / "nowhere") in caught.value.text


def test_a_newer_format_is_refused(data: Path) -> None:
    (data / "polybus.json").write_bytes(b'{"format":2}')
    with pytest.raises(StorageError) as caught:
        LogReader(data)
    assert caught.value.code == "log.format"


def test_system_topics_are_listed_only_when_asked_for(data: Path) -> None:
    make_topic(data, "$events")
    make_topic(data, "größe/日本")
    reader = LogReader(data)
    assert reader.topics() == ["größe/日本", "news"]
    assert reader.topics(system=True) == ["$events", "größe/日本", "news"]


def test_topics_that_come_and_go_are_seen_at_once(log: FileLog) -> None:
    reader = LogReader(log.data)
    for number in range(5):
        log.create_topic(f"t{number}")
        assert reader.topics() == [f"t{n}" for n in range(number + 1)]
    # From here on the folder looks as if it had been left alone for long.
    os.utime(layout.topics_folder(log.data), (0, 0))
    assert reader.topics() == reader.topics()
    log.create_topic("t5")
    assert reader.topics()[-1] == "t5"
    log.delete_topic("t0")
    assert reader.topics()[0] == "t1"


def test_a_topic_is_read_across_history_and_journal_with_all_columns(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)], [rows_batch("news", 5, 5)]])
    delete_segments(hand_over(data))
    make_segment(data, 3, [[rows_batch("news", 10, 4)]], sealed=False)
    reader = LogReader(data)
    assert (reader.bounds("news").start, reader.bounds("news").stop) == (0, 14)
    table = pa.Table.from_batches(reader.read("news", 0, 14))
    assert table.schema.equals(SCHEMA)
    assert table.column("value").to_pylist() == expected_values("news", 14)
    assert table.column("headers").to_pylist()[13] == [("n", b"13")]


def test_any_range_is_read_exactly(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)], [rows_batch("news", 5, 5)]])
    delete_segments(hand_over(data))
    make_segment(data, 3, [[rows_batch("news", 10, 4)], [rows_batch("news", 14, 3)]])
    make_segment(data, 5, [[rows_batch("news", 17, 3)]], sealed=False)
    reader = LogReader(data)
    for start in range(20):
        for stop in range(start, 21):
            assert offsets(reader.read("news", start, stop)) == list(range(start, stop))


def test_only_the_columns_asked_for_come_in_the_order_asked_for(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)]])
    delete_segments(hand_over(data))
    make_segment(data, 2, [[rows_batch("news", 5, 5)]], sealed=False)
    for rows in LogReader(data).read("news", 0, 10, columns=("headers", "offset")):
        assert rows.schema.names == ["headers", "offset"]


def test_other_topics_of_the_same_commits_are_left_out(data: Path) -> None:
    make_topic(data, "sport")
    commit = [rows_batch("news", 0, 3), rows_batch("sport", 0, 5)]
    make_segment(data, 1, [commit, [rows_batch("sport", 5, 2), rows_batch("news", 3, 2)]])
    reader = LogReader(data)
    assert values(reader, "sport") == expected_values("sport", 7)
    assert values(reader, "news") == expected_values("news", 5)


def test_small_commits_come_as_few_batches_and_none_is_over_the_limit(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 3 * n, 3)] for n in range(50)])
    sizes = [rows.num_rows for rows in LogReader(data).read("news", 0, 150, rows_max=40)]
    assert sum(sizes) == 150
    assert max(sizes) <= 40
    assert len(sizes) <= 5


def test_batches_are_bounded_in_bytes_but_no_message_is_cut(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 8, value_bytes=1000)]])
    for _ in ("journal", "history"):
        reader = LogReader(data)
        found = list(reader.read_plan(reader.plan("news", 0, 8), bytes_max=2500))
        assert offsets(iter(found)) == list(range(8))
        assert max(rows.num_rows for rows in found) == 2
        assert [rows.num_rows for rows in reader.read_plan(reader.plan("news", 0, 2), bytes_max=1)]
        delete_segments(hand_over(data))


def test_a_range_outside_of_the_bounds_is_refused(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)]])
    reader = LogReader(data)
    with pytest.raises(UsageError) as caught:
        reader.read("news", 2, 9)
    assert caught.value.code == "log.offset-unknown"
    assert "0 to 5" in caught.value.text
    with pytest.raises(UsageError) as caught:
        reader.bounds("nothing")
    assert caught.value.code == "topic.unknown"


def at(data: Path, times: Sequence[int]) -> None:
    """A message for each time, in seconds after noon, a commit each."""
    batches = [
        [rows_batch("news", number, 1, timestamp_us=NOON_US + 1_000_000 * after_s)]
        for number, after_s in enumerate(times)
    ]
    make_segment(data, 1, batches)


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_time_is_found_also_when_the_clock_was_set_back(data: Path, handed_over: bool) -> None:
    times = [0, 5, 3, 9, 4, 20]
    at(data, times)
    if handed_over:
        delete_segments(hand_over(data))
    reader = LogReader(data)
    for wanted in range(-1, 22):
        late = [offset for offset, after_s in enumerate(times) if after_s >= wanted]
        found = reader.offset_at("news", NOON_US + 1_000_000 * wanted)
        assert found == (late[0] if late else len(times))


@pytest.mark.parametrize("handed_over", [False, True])
def test_times_leave_out_what_cannot_match_and_nothing_else(
    data: Path, handed_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 2)
    times = [0, 1, 10, 11, 2, 12, 30, 31]
    at(data, times)
    if handed_over:
        delete_segments(hand_over(data))
    reader = LogReader(data)
    wanted = TimeRange(NOON_US + 10_000_000, NOON_US + 12_000_000)
    found = offsets(reader.read_plan(reader.plan("news", 0, 8, times=wanted)))
    assert {2, 3, 5} <= set(found)
    assert found == sorted(found)
    assert not {0, 1, 6, 7} & set(found)


def test_row_groups_begin_where_a_file_can_be_cut(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 4)
    make_segment(data, 1, [[rows_batch("news", 0, 10)]])
    delete_segments(hand_over(data))
    (piece,) = LogReader(data).plan("news", 1, 10).pieces
    assert piece.row_group_starts() == [4, 8]


def test_the_history_of_a_topic_is_one_snapshot(data: Path) -> None:
    old, new = rows_batch("news", 0, 5), rows_batch("news", 5, 5, timestamp_us=NOON_US + DAY_US)
    make_segment(data, 1, [[old], [new]])
    delete_segments(hand_over(data))
    make_segment(data, 3, [[rows_batch("news", 10, 1)]], sealed=False)
    history = LogReader(data).history("news")
    assert (history.start, history.handed_over, history.epoch) == (0, 10, 1)
    assert [(file.first, file.last) for file in history.files] == [(0, 4), (5, 9)]
    assert all((layout.topic_folder(data, "news") / file.path).is_file() for file in history.files)
    assert history.files[1].min_timestamp_us == NOON_US + DAY_US


def test_a_plan_can_be_sent_to_another_process(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)]])
    delete_segments(hand_over(data))
    make_segment(data, 2, [[rows_batch("news", 5, 5)]], sealed=False)
    plan = pickle.loads(pickle.dumps(LogReader(data).plan("news", 0, 10)))
    assert offsets(LogReader(data).read_plan(plan)) == list(range(10))
