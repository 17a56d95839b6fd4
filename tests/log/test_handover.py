"""The hand-over: sealed segments become Parquet, each message exactly once."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from segments_kit import (
    DAY_US,
    NOON_US,
    bury_topic,
    expected_values,
    history_of,
    make_segment,
    make_topic,
    parquet_files,
    read_history,
    rows_batch,
)

from polybus.errors import BusyError, StorageError, UsageError
from polybus.log import layout
from polybus.log.columns import SCHEMA
from polybus.log.disk import FileLock
from polybus.log.history import manifest as manifests
from polybus.log.history import parquet
from polybus.log.history.handover import compact, hand_over
from polybus.log.history.manifest import HistoryLock
from polybus.log.journal.commit import HEAD
from polybus.log.journal.segment import delete_segments

HOSTILE_NAMES = [
    "..",
    ".",
    "a/b",
    "../../etc",
    " spaces ",
    "größe/日本",
    "%2e",
    "x" * 255,
    "ü" * 127,
]


def test_every_topic_of_a_sealed_segment_is_handed_over(tmp_path: Path) -> None:
    for topic in ("news", "sport"):
        make_topic(tmp_path, topic)
    segment = make_segment(
        tmp_path,
        1,
        [[rows_batch("news", 0, 5), rows_batch("sport", 0, 7)], [rows_batch("news", 5, 5)]],
    )
    assert hand_over(tmp_path) == [segment]
    for topic, count in (("news", 10), ("sport", 7)):
        table = read_history(history_of(tmp_path, topic))
        assert table.column("value").to_pylist() == expected_values(topic, count)
        assert table.column("offset").to_pylist() == list(range(count))


def test_the_live_segment_is_left_alone(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    make_segment(tmp_path, 1, [[rows_batch("news", 0, 5)]], sealed=False)
    assert hand_over(tmp_path) == []
    assert history_of(tmp_path, "news").handed_over == 0


def test_duckdb_and_plain_pyarrow_read_the_history(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, "news")
    days = [[rows_batch("news", n * 10, 10, timestamp_us=NOON_US + n * DAY_US)] for n in range(3)]
    make_segment(tmp_path, 1, days)
    hand_over(tmp_path)
    found = (
        duckdb.connect()
        .execute(
            'SELECT count(*), count(DISTINCT "offset"), min(value::VARCHAR), count(DISTINCT date) '
            f"FROM read_parquet('{folder}/history/**/*.parquet')"
        )
        .fetchall()
    )
    assert found == [(30, 30, "news:1:0", 3)]
    for path in parquet_files(folder):
        with pq.ParquetFile(path) as file:
            assert file.schema_arrow.equals(SCHEMA)
            column = file.metadata.row_group(0).column(2)
            assert (column.path_in_schema, column.compression) == ("offset", "ZSTD")
            assert column.statistics.max - column.statistics.min == 9


def test_a_new_file_begins_when_the_day_changes_even_backwards(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, "news")
    before, after = 20_000 * DAY_US - 1, 20_000 * DAY_US
    batches = [
        rows_batch("news", n, 1, timestamp_us=t)
        for n, t in enumerate([before, after, before, before])
    ]
    make_segment(tmp_path, 1, [batches])
    hand_over(tmp_path)
    assert [str(path.relative_to(folder)) for path in parquet_files(folder)] == [
        f"history/date=2024-10-03/{0:020d}-{0:020d}.parquet",
        f"history/date=2024-10-03/{2:020d}-{3:020d}.parquet",
        f"history/date=2024-10-04/{1:020d}-{1:020d}.parquet",
    ]
    table = read_history(history_of(tmp_path, "news"))
    assert table.column("offset").to_pylist() == [0, 1, 2, 3]


def test_small_files_of_a_day_grow_together(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, "news")
    for number in range(6):
        make_segment(tmp_path, number + 1, [[rows_batch("news", number * 10, 10)]])
        delete_segments(hand_over(tmp_path, grace_s=0))
    assert [path.name for path in parquet_files(folder)] == [f"{0:020d}-{59:020d}.parquet"]
    table = read_history(history_of(tmp_path, "news"))
    assert table.column("value").to_pylist() == expected_values("news", 60)


def test_a_replaced_file_leaves_history_at_once_and_the_disk_after_a_grace(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, "news")
    make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]])
    hand_over(tmp_path)
    make_segment(tmp_path, 2, [[rows_batch("news", 10, 10)]])
    hand_over(tmp_path)
    assert len(parquet_files(folder)) == 1
    assert len(list(folder.glob("scratch/*.replaced"))) == 1
    hand_over(tmp_path, grace_s=0)
    assert not (folder / "scratch").exists()


def test_a_large_file_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_topic(tmp_path, "news")
    monkeypatch.setattr("polybus.log.history.manifest.SMALL_FILE_BYTES", 1)
    for number in range(3):
        make_segment(tmp_path, number + 1, [[rows_batch("news", number * 10, 10)]])
        hand_over(tmp_path)
    assert len(parquet_files(folder)) == 3


def test_a_damaged_small_file_is_not_merged_away(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, "news")
    make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]])
    delete_segments(hand_over(tmp_path))
    parquet_files(folder)[0].write_bytes(b"PAR1 not any more PAR1")
    make_segment(tmp_path, 2, [[rows_batch("news", 10, 10)]])
    hand_over(tmp_path)
    history = history_of(tmp_path, "news")
    assert len(parquet_files(folder)) == 2
    assert read_history(history, 10).num_rows == 10


def test_a_file_is_closed_when_it_gets_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_topic(tmp_path, "news")
    monkeypatch.setattr(parquet, "FILE_BYTES_MAX", 1)
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 10)
    make_segment(tmp_path, 1, [[rows_batch("news", n * 10, 10)] for n in range(5)])
    hand_over(tmp_path)
    assert len(parquet_files(folder)) == 5
    assert read_history(history_of(tmp_path, "news")).num_rows == 50


def test_run_again_it_changes_nothing(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, "news")
    segment = make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]])
    hand_over(tmp_path)
    before = (folder / "manifest.json").stat().st_ino
    assert hand_over(tmp_path) == [segment]
    assert (folder / "manifest.json").stat().st_ino == before


def test_rows_of_a_deleted_or_recreated_topic_are_left_behind(tmp_path: Path) -> None:
    make_topic(tmp_path, "news", epoch=2)
    segment = make_segment(
        tmp_path,
        1,
        [
            [rows_batch("news", 0, 10, epoch=1), rows_batch("gone", 0, 5, epoch=3)],
            [rows_batch("news", 0, 3, epoch=2)],
        ],
    )
    bury_topic(tmp_path, "news", epoch=1)
    assert hand_over(tmp_path) == [], "nothing proves that the other topic was deleted"
    bury_topic(tmp_path, "gone", epoch=3)
    assert hand_over(tmp_path) == [segment]
    table = read_history(history_of(tmp_path, "news"))
    assert table.column("value").to_pylist() == expected_values("news", 3, epoch=2)
    assert not layout.topic_folder(tmp_path, "gone").exists()


def test_the_files_of_an_older_epoch_go(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, "news", epoch=1)
    make_segment(tmp_path, 1, [[rows_batch("news", 0, 10, epoch=1, timestamp_us=NOON_US + DAY_US)]])
    delete_segments(hand_over(tmp_path))
    make_topic(tmp_path, "news", epoch=2)
    make_segment(tmp_path, 2, [[rows_batch("news", 0, 3, epoch=2)]])
    before = parquet_files(folder)
    hand_over(tmp_path)
    assert parquet_files(folder) == before, "nothing proves that their topic was deleted"
    bury_topic(tmp_path, "news", epoch=1)
    hand_over(tmp_path)
    assert [path.name for path in parquet_files(folder)] == [f"{0:020d}-{2:020d}.parquet"]


def test_a_topic_deleted_at_work_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_topic(tmp_path, "news")
    segment = make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]])
    real = parquet.FileWriter.flush

    def flush_after_delete(writer: parquet.FileWriter) -> None:
        (tmp_path / "trash").mkdir()
        folder.rename(tmp_path / "trash" / "1")
        real(writer)

    monkeypatch.setattr(parquet.FileWriter, "flush", flush_after_delete)
    assert hand_over(tmp_path) == [segment]
    assert not folder.exists()


def test_a_topic_that_is_deleted_and_created_again_during_the_save_gets_no_old_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_topic(tmp_path, "news")
    segment = make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]])
    real = manifests.save

    def save_into_another(folder: Path, manifest: manifests.Manifest) -> None:
        (tmp_path / "trash").mkdir()
        folder.rename(tmp_path / "trash" / "1")
        make_topic(tmp_path, "news", epoch=2)
        (folder / "history").mkdir()
        real(folder, manifest)

    monkeypatch.setattr(manifests, "save", save_into_another)
    assert hand_over(tmp_path) == [segment]
    assert [path.name for path in folder.iterdir()] == ["topic.json"]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_hostile_name_stays_inside_its_folder(tmp_path: Path, name: str) -> None:
    data = tmp_path / "data"
    folder = make_topic(data, name)
    make_segment(data, 1, [[rows_batch(name, 0, 10)]])
    hand_over(data)
    assert folder.parent == layout.topics_folder(data)
    assert {path.name for path in tmp_path.iterdir()} == {"data"}
    assert [path.parent.parent.parent for path in tmp_path.rglob("*.parquet")] == [folder]
    assert read_history(history_of(data, name)).num_rows == 10


def test_a_damaged_commit_keeps_its_segment_and_stops_only_its_topics(tmp_path: Path) -> None:
    for topic in ("news", "sport"):
        make_topic(tmp_path, topic)
    segment = make_segment(
        tmp_path,
        1,
        [
            [rows_batch("news", 0, 10), rows_batch("sport", 0, 10)],
            [rows_batch("news", 10, 10)],
            [rows_batch("news", 20, 10), rows_batch("sport", 10, 10)],
        ],
    )
    later = make_segment(tmp_path, 4, [[rows_batch("sport", 20, 5)], [rows_batch("news", 30, 5)]])
    content = bytearray(segment.read_bytes())
    content[content.index(b"news:1:10")] ^= 1
    segment.write_bytes(content)
    told: list[str] = []
    assert hand_over(tmp_path, progress=told.append) == []
    assert history_of(tmp_path, "news").handed_over == 10
    assert history_of(tmp_path, "sport").handed_over == 25
    assert any(line.startswith("damaged") and segment.name in line for line in told)
    assert any("'news'" in line and "offsets 10 to 29" in line for line in told)
    assert later.exists()


def test_a_lost_manifest_does_not_cost_the_files(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, "news")
    make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]])
    delete_segments(hand_over(tmp_path))
    (folder / "manifest.json").unlink()
    make_segment(tmp_path, 2, [[rows_batch("news", 10, 10)]])
    assert hand_over(tmp_path) == []
    assert len(parquet_files(folder)) == 1


def test_many_topics_are_handed_over_in_bounded_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polybus.log.history.handover._GROUP_BYTES_MAX", 4000)
    topics = [f"t{number}" for number in range(30)]
    for topic in topics:
        make_topic(tmp_path, topic)
    commits = [[rows_batch(topic, n * 4, 4) for topic in topics] for n in range(5)]
    segment = make_segment(tmp_path, 1, commits)
    assert hand_over(tmp_path) == [segment]
    for topic in topics:
        table = read_history(history_of(tmp_path, topic))
        assert table.column("value").to_pylist() == expected_values(topic, 20)


def test_only_one_hand_over_works_at_a_time(tmp_path: Path) -> None:
    with HistoryLock(tmp_path), pytest.raises(BusyError, match=r"log\.history-busy"):
        hand_over(tmp_path)


@pytest.mark.parametrize("wait_s", [0.0, 30.0])
def test_a_backup_that_waits_has_its_turn_after_the_next_segment(
    tmp_path: Path, wait_s: float
) -> None:
    make_topic(tmp_path, "news")
    segments = [
        make_segment(tmp_path, number, [[rows_batch("news", 5 * number - 5, 5)]])
        for number in (1, 2, 3)
    ]
    done: list[Path] = []
    seen: list[int] = []
    may_end = threading.Event()

    def copy() -> None:
        with HistoryLock(tmp_path, shared=True, wait_s=30):
            seen.append(read_history(history_of(tmp_path, "news")).num_rows)
            may_end.wait(30)

    backup = threading.Thread(target=copy)

    def finished(segment: Path) -> None:
        done.append(segment)
        if len(done) == 1:
            # It finds the lock taken, and looks again later than the hand-over.
            with HistoryLock(tmp_path):
                backup.start()
                while not is_queued(tmp_path):
                    time.sleep(0.001)
            if wait_s:
                may_end.set()

    if wait_s:
        assert hand_over(tmp_path, finished=finished, wait_s=wait_s) == segments
    else:
        with pytest.raises(BusyError, match=r"log\.history-busy"):
            hand_over(tmp_path, finished=finished)
        assert done == segments[:1]
        may_end.set()
    backup.join()
    assert seen == [5], "the rows of one segment"
    assert hand_over(tmp_path) == segments
    assert read_history(history_of(tmp_path, "news")).num_rows == 15


def is_queued(data: Path) -> bool:
    try:
        with FileLock(data / manifests.QUEUE):
            return False
    except BlockingIOError:
        return True


def test_compact_hands_over_the_live_segment_too(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]])
    make_segment(tmp_path, 2, [[rows_batch("news", 10, 10)]], sealed=False)
    assert len(compact(tmp_path)) == 2
    assert layout.segments(tmp_path) == []
    left = [path.name for path in layout.journal_folder(tmp_path).iterdir()]
    assert left == ["floor.json"]
    table = read_history(history_of(tmp_path, "news"))
    assert table.column("value").to_pylist() == expected_values("news", 20)


def test_compact_refuses_while_a_bus_runs_and_without_data(tmp_path: Path) -> None:
    with layout.DataLock(tmp_path), pytest.raises(StorageError, match=r"log\.locked"):
        compact(tmp_path)
    with pytest.raises(UsageError, match=r"log\.no-data"):
        compact(tmp_path / "nowhere")


def test_compact_of_an_empty_journal_does_nothing(tmp_path: Path) -> None:
    make_segment(tmp_path, 1, [], sealed=False)
    assert compact(tmp_path) == []
    assert layout.segments(tmp_path)[0].stat().st_size == len(HEAD)
