"""LogReader: another process's view of the log, exact while the hand-over moves it about."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from segments_kit import (
    DAY_US,
    NOON_US,
    expected_values,
    make_segment,
    make_topic,
    rows_batch,
)

from polybus import config
from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.log import layout, parquet, reader_pieces
from polybus.log.columns import SCHEMA
from polybus.log.disk import DiskFile, OsDisk
from polybus.log.files import FileLog
from polybus.log.handover import compact, delete_segments, hand_over
from polybus.log.reader import LogReader, Times, row_group_starts
from polybus.log.recovery import recover
from polybus.log.retention import retain

Appended = Callable[[int], None]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "polybus.json").write_bytes(b'{"format":1,"epoch-max":0}')
    make_topic(tmp_path, "news")
    return tmp_path


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    opened = FileLog(
        tmp_path,
        durability="fsync",
        journal=config.Journal(),
        retention=config.Retention(),
        clock=lambda: NOON_US,
        maintenance=False,
    )
    yield opened
    opened.close()


def append(log: FileLog, topic: str, count: int, *, word: str = "") -> None:
    """So many messages as one durable commit, named by their offsets."""
    first = log.bounds(topic).stop
    values = [f"{word or topic}:{offset}".encode() for offset in range(first, first + count)]
    batch = Batch.of(topic, values)
    batch.protocol, batch.sender = "goms", "test"
    log.append(batch)
    log.sync()


def hand_over_all(log: FileLog) -> None:
    """What maintenance does: seal, hand over, forget and delete the segments."""
    log.seal()
    log.after_handover(hand_over(log.data, grace_s=0.0))


def offsets(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [offset for rows in batches for offset in rows.column("offset").to_pylist()]


def values(reader: LogReader, topic: str, start: int = 0, stop: int | None = None) -> list[Any]:
    stop = reader.bounds(topic).stop if stop is None else stop
    found = reader.read(topic, start, stop)
    return [value for rows in found for value in rows.column("value").to_pylist()]


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


@pytest.mark.parametrize("where", ["journal", "history"])
def test_a_flipped_bit_is_told_with_file_topic_and_offsets(data: Path, where: str) -> None:
    segment = make_segment(data, 1, [[rows_batch("news", 0, 5)], [rows_batch("news", 5, 5)]])
    path = segment
    if where == "history":
        delete_segments(hand_over(data))
        (path,) = layout.topic_folder(data, "news").glob("history/**/*.parquet")
    content = bytearray(path.read_bytes())
    content[len(content) - 100 if where == "journal" else len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError) as caught:
        values(LogReader(data), "news")
    assert caught.value.code == "log.damaged"
    first = 5 if where == "journal" else 0
    assert f"topic 'news', offsets {first} to 9" in caught.value.text
    assert str(path) in caught.value.text
    assert "checksum" in caught.value.text


def test_what_comes_before_damage_is_given_first(data: Path) -> None:
    segment = make_segment(data, 1, [[rows_batch("news", 0, 5)], [rows_batch("news", 5, 5)]])
    content = bytearray(segment.read_bytes())
    content[-100] ^= 1
    segment.write_bytes(content)
    assert offsets(LogReader(data).read("news", 0, 5)) == list(range(5))


def test_a_segment_that_lost_its_end_is_told(data: Path) -> None:
    segment = make_segment(data, 1, [[rows_batch("news", 0, 5)]], sealed=False)
    segment.write_bytes(segment.read_bytes()[:-20])
    with pytest.raises(StorageError, match="offsets 0 to 4.*the file ends before the commit does"):
        values(LogReader(data), "news")


def test_offsets_that_no_file_has_are_named(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)]])
    lost = make_segment(data, 2, [[rows_batch("news", 5, 5)]])
    make_segment(data, 3, [[rows_batch("news", 10, 5)]])
    delete_segments([lost])
    with pytest.raises(StorageError) as caught:
        values(LogReader(data), "news")
    assert caught.value.code == "log.damaged"
    assert "offsets 5 to 14" in caught.value.text


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
    """The same name, place, size and offset: only the commit's own words tell them apart."""
    log.create_topic("news")
    append(log, "news", 5, word="old")
    plan = LogReader(log.data).plan("news", 0, 5)
    again = tmp_path / "again"
    other = FileLog(
        again,
        durability="fsync",
        journal=config.Journal(),
        retention=config.Retention(),
        clock=lambda: NOON_US + DAY_US,
        maintenance=False,
    )
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
    wanted = Times(NOON_US + 10_000_000, NOON_US + 12_000_000)
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
    (piece,) = LogReader(data).pieces("news", 1, 10)
    assert row_group_starts(piece) == [4, 8]


def test_the_history_of_a_topic_is_one_snapshot(data: Path) -> None:
    old, new = rows_batch("news", 0, 5), rows_batch("news", 5, 5, timestamp_us=NOON_US + DAY_US)
    make_segment(data, 1, [[old], [new]])
    delete_segments(hand_over(data))
    make_segment(data, 3, [[rows_batch("news", 10, 1)]], sealed=False)
    history = LogReader(data).history("news")
    assert (history.start, history.handed_over, history.epoch) == (0, 10, 1)
    assert [(file.first, file.last) for file in history.files] == [(0, 4), (5, 9)]
    assert all(file.path.is_file() for file in history.files)
    assert history.files[1].min_timestamp_us == NOON_US + DAY_US


def test_a_plan_can_be_sent_to_another_process(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)]])
    delete_segments(hand_over(data))
    make_segment(data, 2, [[rows_batch("news", 5, 5)]], sealed=False)
    plan = pickle.loads(pickle.dumps(LogReader(data).plan("news", 0, 10)))
    assert offsets(LogReader(data).read_plan(plan)) == list(range(10))


def test_a_damaged_manifest_is_told_and_not_believed(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)]])
    delete_segments(hand_over(data))
    path = layout.topic_folder(data, "news") / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"last":4', b'"last":5'))
    with pytest.raises(StorageError) as caught:
        LogReader(data).bounds("news")
    assert caught.value.code == "log.damaged"
    assert msgspec.json.decode(path.read_bytes())


class NotedDisk(OsDisk):
    """Notes in which order files are synced and replaced."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def open(self, path: Path) -> DiskFile:
        file = super().open(path)
        sync = file.sync

        def noted() -> None:
            self.noted.append(f"sync {path.suffix}")
            sync()

        file.sync = noted  # type: ignore[method-assign]
        return file

    def rename(self, source: Path, target: Path) -> None:
        self.noted.append(f"replace {target.suffix}")
        super().rename(source, target)


def test_what_recovery_indexes_was_synced_before(data: Path) -> None:
    segment = make_segment(data, 1, [[rows_batch("news", 0, 5)]], sealed=False)
    layout.index_path(segment).unlink()
    assert LogReader(data).bounds("news").stop == 0
    disk = NotedDisk()
    recover(data, disk)
    assert LogReader(data).bounds("news").stop == 5
    assert disk.noted.index("sync .arrows") < disk.noted.index("replace .index")
