"""LogReader while the log grows, moves, expires or begins again: nothing is lost or doubled."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from log_kit import opened_log
from reader_kit import append, data, hand_over_all, log, offsets, values
from segments_kit import DAY_US, NOON_US, expected_values, make_segment, make_topic, rows_batch

from polybus import config
from polybus.errors import UsageError
from polybus.log import layout
from polybus.log.files import FileLog
from polybus.log.history.handover import compact, hand_over
from polybus.log.history.retention import retain
from polybus.log.journal.segment import delete_segments
from polybus.log.reading import folder as reader_folder
from polybus.log.reading import pieces as reader_pieces
from polybus.log.reading import reader as log_reader
from polybus.log.reading.reader import LogReader

__all__ = ["data", "log"]


@pytest.fixture(autouse=True, params=["few topics", "many topics"])
def topics_looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of many topics is believed for a while; a moving log must correct it."""
    if request.param == "many topics":
        monkeypatch.setattr(log_reader, "FRESH_TOPICS", 0)
        monkeypatch.setattr(log_reader, "KNOWN_S", 3600.0)
        monkeypatch.setattr(reader_folder, "SETTLED_NS", 0)


def test_messages_without_an_fsync_are_not_seen(log: FileLog) -> None:
    log.create_topic("news")
    append(log, "news", 3)
    reader = LogReader(log.data)
    assert reader.bounds("news").stop == 3
    # Written to the segment, as by a commit whose fsync has not returned, but not indexed.
    segment = layout.segments(log.data)[-1]
    held = layout.index_path(segment).read_bytes()
    append(log, "news", 2)
    grown = layout.index_path(segment).read_bytes()
    layout.index_path(segment).write_bytes(held)
    assert LogReader(log.data).bounds("news").stop == 3
    assert values(LogReader(log.data), "news") == [b"news:0", b"news:1", b"news:2"]
    layout.index_path(segment).write_bytes(grown)
    assert reader.bounds("news").stop == 5


def test_a_reader_follows_a_log_that_grows_across_segments(log: FileLog) -> None:
    log.create_topic("news")
    reader = LogReader(log.data)
    read: list[int] = []
    for number in range(12):
        append(log, "news", 1 + number % 3)
        if number % 4 == 3:
            log.seal()
        if number == 7:
            hand_over_all(log)
        stop = reader.bounds("news").stop
        assert stop == log.bounds("news").stop
        read += offsets(reader.read("news", len(read), stop))
    assert read == list(range(log.bounds("news").stop))


def test_half_an_index_record_is_waited_for(data: Path) -> None:
    segment = make_segment(
        data, 1, [[rows_batch("news", 0, 3)], [rows_batch("news", 3, 3)]], sealed=False
    )
    index = layout.index_path(segment)
    whole = index.read_bytes()
    reader = LogReader(data)
    index.write_bytes(whole[: len(whole) * 3 // 4])
    assert reader.bounds("news").stop == 3
    index.write_bytes(whole)
    assert reader.bounds("news").stop == 6
    assert values(reader, "news") == expected_values("news", 6)


def test_a_journal_that_begins_again_under_the_same_name_is_read_anew(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)]])
    reader = LogReader(data)
    plan = reader.plan("news", 0, 5)
    assert reader.bounds("news").stop == 5
    compact(data)
    make_segment(data, 1, [[rows_batch("news", 5, 9)]])
    assert reader.bounds("news").stop == 14
    assert values(reader, "news") == expected_values("news", 14)
    # The old plan names a segment that is there and holds other rows.
    assert offsets(reader.read_plan(plan)) == list(range(5))


def test_a_hand_over_between_plan_and_read_loses_and_doubles_nothing(log: FileLog) -> None:
    log.create_topic("news")
    for _ in range(5):
        append(log, "news", 7)
    plan = LogReader(log.data).plan("news", 3, 33)
    assert all(piece.file is None for piece in plan.pieces)
    hand_over_all(log)
    for piece in plan.pieces:
        assert not piece.path.exists()
    assert offsets(LogReader(log.data).read_plan(plan)) == list(range(3, 33))


def test_history_files_that_are_merged_between_plan_and_read_change_nothing(log: FileLog) -> None:
    log.create_topic("news")
    append(log, "news", 10)
    hand_over_all(log)
    append(log, "news", 10)
    plan = LogReader(log.data).plan("news", 0, 20)
    hand_over_all(log)
    assert not plan.pieces[0].path.exists(), "the small file was merged into another"
    assert offsets(LogReader(log.data).read_plan(plan)) == list(range(20))


def test_hand_overs_while_a_range_is_read_lose_and_double_nothing(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hand-over after every few batches: from the journal, and again from merged files."""
    monkeypatch.setattr(reader_pieces, "WINDOW_BYTES", 1)
    log.create_topic("news")
    for _ in range(30):
        append(log, "news", 3)
        log.seal()
    reader = LogReader(log.data)
    read: list[int] = []
    for number, rows in enumerate(reader.read("news", 0, 90, rows_max=3)):
        read += rows.column("offset").to_pylist()
        if number in (4, 9):
            append(log, "news", 2)
            hand_over_all(log)
    assert read == list(range(90))


def test_a_hand_over_in_another_process_at_any_moment_changes_nothing(log: FileLog) -> None:
    log.create_topic("news")
    stopping = threading.Event()
    failures: list[BaseException] = []

    def keep_moving() -> None:
        try:
            while not stopping.is_set():
                append(log, "news", 5)
                hand_over_all(log)
        except BaseException as error:
            failures.append(error)

    append(log, "news", 5)
    mover = threading.Thread(target=keep_moving)
    mover.start()
    try:
        reader = LogReader(log.data)
        reads = 0
        while reader.bounds("news").stop < 100 or reads < 20:
            stop = reader.bounds("news").stop
            assert offsets(reader.read("news", 0, stop, rows_max=4)) == list(range(stop))
            reads += 1
    finally:
        stopping.set()
        mover.join()
    assert not failures


def test_an_older_epoch_of_the_same_name_is_not_shown(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)], [rows_batch("news", 0, 2, epoch=2)]])
    make_topic(data, "news", epoch=2)
    reader = LogReader(data)
    assert reader.bounds("news").epoch == 2
    assert values(reader, "news") == [b"news:2:0", b"news:2:1"]


def test_a_topic_that_is_recreated_between_plan_and_read_is_never_mixed_up(log: FileLog) -> None:
    log.create_topic("news")
    append(log, "news", 10)
    hand_over_all(log)
    plan = LogReader(log.data).plan("news", 0, 10)
    log.delete_topic("news")
    log.create_topic("news")
    append(log, "news", 10, word="olds")
    hand_over_all(log)
    assert plan.pieces[0].path.exists(), "a file of the same name, with other messages"
    with pytest.raises(UsageError) as caught:
        offsets(LogReader(log.data).read_plan(plan))
    assert caught.value.code == "topic.recreated"
    told: list[UsageError] = []
    assert offsets(LogReader(log.data).read_plan(plan, lost=told.append)) == []
    assert [error.code for error in told] == ["topic.recreated"]


def test_a_recreated_topic_in_a_journal_that_begins_again_is_never_mixed_up(
    log: FileLog, tmp_path: Path
) -> None:
    """The same name, place, size and offset: only the commit's own words distinguish them."""
    log.create_topic("news")
    append(log, "news", 5, word="old")
    plan = LogReader(log.data).plan("news", 0, 5)
    again = tmp_path / "again"
    other = opened_log(again, lambda: NOON_US + DAY_US)
    other.create_topic("news")
    append(other, "news", 5, word="new")
    pieces = tuple(replace(one, path=other_path(again, one.path)) for one in plan.pieces)
    with pytest.raises(UsageError) as caught:
        list(LogReader(again).read_plan(replace(plan, pieces=pieces)))
    assert caught.value.code == "topic.recreated"
    other.close()


def other_path(data: Path, path: Path) -> Path:
    return layout.journal_folder(data) / path.name


def test_what_expires_between_plan_and_read_is_told_and_the_rest_is_read(data: Path) -> None:
    old, new = rows_batch("news", 0, 5), rows_batch("news", 5, 5, timestamp_us=NOON_US + DAY_US)
    make_segment(data, 1, [[old], [new]])
    delete_segments(hand_over(data))
    plan = LogReader(data).plan("news", 2, 10)
    limits = config.Retention(age_s=3600)
    assert retain(layout.topic_folder(data, "news"), limits, now_us=NOON_US + DAY_US)
    with pytest.raises(UsageError) as caught:
        offsets(LogReader(data).read_plan(plan))
    assert caught.value.code == "log.offset-unknown"
    told: list[UsageError] = []
    assert offsets(LogReader(data).read_plan(plan, lost=told.append)) == list(range(5, 10))
    assert [error.code for error in told] == ["log.offset-unknown"]
