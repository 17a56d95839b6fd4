"""verify finds every damage, names topic, file and offsets, and finds none where there is none."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest
from segments_kit import DAY_US, NOON_US, bury_topic, make_segment, make_topic, rows_batch

from polybus.errors import StorageError, UsageError
from polybus.log import layout
from polybus.log.history import manifest as manifests
from polybus.log.history.handover import hand_over
from polybus.log.journal.commit import HEAD
from polybus.log.journal.segment import delete_segments
from polybus.log.verify.verify import Damage, verify


def data_directory(data: Path) -> tuple[Path, Path]:
    """`news`: 0 to 29 in three history files, 30 to 49 in the journal; `sport`: 0 to 9 there too.

    Returns the folder of `news` and the segment.
    """
    folder = make_topic(data, "news")
    make_topic(data, "sport")
    days = [[rows_batch("news", n * 10, 10, timestamp_us=NOON_US + n * DAY_US)] for n in range(3)]
    make_segment(data, 1, days)
    delete_segments(hand_over(data))
    segment = make_segment(
        data,
        4,
        [
            [rows_batch("news", 30, 10), rows_batch("sport", 0, 5)],
            [rows_batch("news", 40, 10)],
            [rows_batch("sport", 5, 5)],
        ],
    )
    return folder, segment


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_it_waits_for_the_hand_over_of_a_killed_bus(tmp_path: Path) -> None:
    folder, _ = data_directory(tmp_path)
    lock = manifests.HistoryLock(tmp_path)
    left = folder / "history" / "date=2020-01-01"
    left.mkdir()
    names = [left / f"{number}.parquet" for number in range(3)]
    for path in names:
        path.write_bytes(b"x")

    def end() -> None:
        # Files of a hand-over come and go until its process ends.
        for path in names:
            path.unlink()
        lock.release()

    timer = threading.Timer(0.2, end)
    timer.start()
    assert verify(tmp_path).notes == []
    timer.join()


def only_damage(data: Path) -> Damage:
    report = verify(data)
    assert not report.intact
    assert [str(damage) for damage in report.damages[1:]] == []
    return report.damages[0]


def test_an_intact_log_is_counted(tmp_path: Path) -> None:
    data_directory(tmp_path)
    seen: list[tuple[int, int]] = []
    report = verify(tmp_path, progress=lambda what, done, total: seen.append((done, total)))
    assert (report.intact, report.damages, report.notes) == (True, [], [])
    assert (report.topics, report.segments, report.files, report.messages) == (2, 1, 3, 60)
    assert seen[-1] == (report.bytes, report.bytes)
    assert len(seen) == 4


def test_an_empty_directory_is_intact(tmp_path: Path) -> None:
    assert verify(tmp_path).intact


def test_messages_in_history_and_still_in_the_journal_count_once(tmp_path: Path) -> None:
    data_directory(tmp_path)
    hand_over(tmp_path)
    report = verify(tmp_path)
    assert (report.intact, report.messages) == (True, 60)


def test_a_flipped_bit_in_a_segment_is_named(tmp_path: Path) -> None:
    _, segment = data_directory(tmp_path)
    flip(segment, segment.read_bytes().index(b"news:1:40"))
    damage = only_damage(tmp_path)
    assert (damage.topic, damage.file) == ("news", segment.name)
    assert (damage.first, damage.last) == (40, 49)
    assert "commit 5: the checksum does not match" in str(damage)


def test_every_flipped_bit_in_a_segment_is_found(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    segment = make_segment(tmp_path, 1, [[rows_batch("news", 0, 2)], [rows_batch("news", 2, 2)]])
    intact = segment.read_bytes()
    # The head is the schema, which Arrow spells with some slack: it counts if it means the same.
    for position in range(len(HEAD), len(intact), 11):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << position % 8
        segment.write_bytes(damaged)
        assert not verify(tmp_path).intact, position


def test_a_flipped_bit_found_without_an_index_names_the_missing_offsets(tmp_path: Path) -> None:
    _, segment = data_directory(tmp_path)
    flip(segment, segment.read_bytes().index(b"news:1:30"))
    layout.index_path(segment).unlink()
    report = verify(tmp_path)
    named = {(damage.topic, damage.first, damage.last) for damage in report.damages}
    assert named == {(None, None, None), ("news", 30, 39), ("sport", 0, 4)}


def test_a_flipped_bit_in_a_parquet_file_is_named(tmp_path: Path) -> None:
    folder, _ = data_directory(tmp_path)
    path = sorted(folder.glob("history/**/*.parquet"))[1]
    flip(path, 100)
    damage = only_damage(tmp_path)
    assert (damage.topic, damage.file, damage.first, damage.last) == ("news", str(path), 10, 19)
    assert verify(tmp_path).messages == 50


def test_a_parquet_file_with_other_rows_is_named(tmp_path: Path) -> None:
    """Even with a checksum that is right: what counts is that the offsets are there."""
    folder, _ = data_directory(tmp_path)
    found = manifests.load(folder)
    assert found is not None
    first, second, third = found.files
    (folder / second.path).write_bytes((folder / first.path).read_bytes())
    wrong = msgspec.structs.replace(second, xxh3=first.xxh3, bytes=first.bytes)
    manifests.save(folder, msgspec.structs.replace(found, files=(first, wrong, third)))
    assert "do not continue at offset 10" in str(only_damage(tmp_path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder, _ = data_directory(tmp_path)
    path = sorted(folder.glob("history/**/*.parquet"))[2]
    path.unlink()
    damage = only_damage(tmp_path)
    assert (damage.topic, damage.file, damage.first, damage.last) == ("news", str(path), 20, 29)
    assert damage.reason == "is missing"


def test_a_truncated_manifest_is_named(tmp_path: Path) -> None:
    folder, _ = data_directory(tmp_path)
    os.truncate(folder / "manifest.json", 100)
    damage = only_damage(tmp_path)
    assert (damage.topic, damage.file) == ("news", str(folder / "manifest.json"))


def test_a_damaged_or_missing_topic_file_is_named(tmp_path: Path) -> None:
    folder, _ = data_directory(tmp_path)
    os.truncate(folder / "topic.json", 10)
    assert only_damage(tmp_path).file == str(folder / "topic.json")
    (folder / "topic.json").unlink()
    assert only_damage(tmp_path).reason == "is missing"


def test_a_gap_between_history_and_journal_is_named(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]])
    delete_segments(hand_over(tmp_path))
    segment = make_segment(tmp_path, 2, [[rows_batch("news", 15, 5)]])
    damage = only_damage(tmp_path)
    assert (damage.topic, damage.file, damage.first, damage.last) == ("news", segment.name, 10, 14)


def test_a_gap_and_a_repeat_within_the_journal_are_named(tmp_path: Path) -> None:
    make_topic(tmp_path, "gap")
    make_topic(tmp_path, "twice")
    make_segment(tmp_path, 1, [[rows_batch("gap", 0, 10), rows_batch("twice", 0, 10)]])
    make_segment(tmp_path, 2, [[rows_batch("gap", 11, 1), rows_batch("twice", 8, 4)]])
    report = verify(tmp_path)
    named = {(damage.topic, damage.first, damage.last) for damage in report.damages}
    assert named == {("gap", 10, 10), ("twice", 8, 11)}


def test_a_torn_tail_is_a_note(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    segment = make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]], sealed=False)
    whole = segment.read_bytes()
    segment.write_bytes(whole + whole[len(HEAD) : len(HEAD) + 300])
    report = verify(tmp_path)
    assert (report.intact, report.messages) == (True, 10)
    assert segment.name in report.notes[0]


def test_a_cut_through_what_was_promised_is_damage(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    commits = [[rows_batch("news", 0, 10)], [rows_batch("news", 10, 10)]]
    segment = make_segment(tmp_path, 1, commits, sealed=False)
    os.truncate(segment, segment.stat().st_size - 100)
    damage = only_damage(tmp_path)
    assert (damage.topic, damage.first, damage.last) == ("news", 10, 19)


def test_a_lost_index_is_no_damage(tmp_path: Path) -> None:
    _, segment = data_directory(tmp_path)
    layout.index_path(segment).unlink()
    assert verify(tmp_path).intact
    layout.index_path(segment).write_bytes(b"nonsense that is no index at all")
    report = verify(tmp_path)
    assert report.intact
    assert "index" in report.notes[0]


def test_rows_of_deleted_and_recreated_topics_are_no_damage(tmp_path: Path) -> None:
    make_topic(tmp_path, "news", epoch=2)
    batches = [
        rows_batch("news", 0, 10, epoch=1),
        rows_batch("gone", 5, 5, epoch=3),
        rows_batch("news", 0, 3, epoch=2),
    ]
    make_segment(tmp_path, 1, [batches])
    assert verify(tmp_path).damage_count == 2, "nothing proves the deletions"
    bury_topic(tmp_path, "news", epoch=1)
    bury_topic(tmp_path, "gone", epoch=3)
    report = verify(tmp_path)
    assert (report.intact, report.messages) == (True, 3)
    assert "15 messages" in report.notes[0]


def test_a_file_nobody_names_is_a_note(tmp_path: Path) -> None:
    folder, _ = data_directory(tmp_path)
    leftover = folder / "history/date=2024-10-04" / f"{90:020d}-{99:020d}.parquet"
    leftover.write_bytes(b"")
    report = verify(tmp_path)
    assert report.intact
    assert str(leftover) in report.notes[0]


def test_a_running_bus_is_not_checked(tmp_path: Path) -> None:
    with layout.DataLock(tmp_path), pytest.raises(StorageError, match=r"log\.locked"):
        verify(tmp_path)
    with pytest.raises(UsageError, match=r"log\.no-data"):
        verify(tmp_path / "nowhere")
