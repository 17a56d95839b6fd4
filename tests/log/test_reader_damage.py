"""LogReader and damage: told with its place, and never served."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from reader_kit import data, offsets, values
from segments_kit import make_segment, make_topic, rows_batch

from polybus.errors import StorageError
from polybus.log import layout
from polybus.log.disk import Disk, DiskFile
from polybus.log.history.handover import hand_over
from polybus.log.journal.recovery import recover
from polybus.log.journal.segment import delete_segments
from polybus.log.reading.reader import LogReader

__all__ = ["data"]


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


def test_a_damaged_manifest_is_told_and_not_believed(data: Path) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)]])
    delete_segments(hand_over(data))
    path = layout.topic_folder(data, "news") / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"last":4', b'"last":5'))
    with pytest.raises(StorageError) as caught:
        LogReader(data).bounds("news")
    assert caught.value.code == "log.damaged"
    assert msgspec.json.decode(path.read_bytes())


class NotedDisk(Disk):
    """Notes in which order files are synced and replaced."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def open(self, path: Path, mode: int = 0o644) -> DiskFile:
        file = super().open(path, mode)
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


@pytest.mark.parametrize("lost", ["manifest.json", "topic.json", "the history", "the folder"])
def test_a_topic_that_has_lost_its_files_is_not_empty(data: Path, lost: str) -> None:
    make_topic(data, "empty")
    folder = layout.topic_folder(data, "news")
    make_segment(data, 1, [[rows_batch("news", 0, 5)]])
    delete_segments(hand_over(data))
    reader = LogReader(data)
    assert reader.bounds("news").stop == 5 and reader.bounds("empty").stop == 0
    if lost == "the folder":
        shutil.rmtree(folder)
    elif lost == "the history":
        shutil.rmtree(folder / "history")
        (folder / "manifest.json").unlink()
    else:
        (folder / lost).unlink()
    for again in (reader, LogReader(data)):
        for look, *more in ((again.bounds,), (again.history,), (again.plan, 0, 5)):
            with pytest.raises(StorageError, match="log.damaged.*news.*is missing"):
                look("news", *more)
        assert again.bounds("empty").stop == 0
        assert ("news" in again.topics()) == (lost != "the folder")


def test_a_folder_whose_polybus_json_cannot_be_read_is_not_a_missing_one(data: Path) -> None:
    (data / "polybus.json").unlink()
    (data / "polybus.json").symlink_to("polybus.json")  # Opening it fails with ELOOP.
    with pytest.raises(StorageError, match=r"log\.failed: cannot read .*polybus\.json"):
        LogReader(data)


def test_a_journal_that_cannot_be_read_is_not_an_empty_one(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_segment(data, 1, [[rows_batch("news", 0, 5)]])
    scan, names = os.scandir, os.listdir

    def refuse(path: object) -> None:
        if str(path) == str(layout.journal_folder(data)):
            raise PermissionError(errno.EACCES, "Permission denied")

    def scandir(path: str) -> object:
        refuse(path)
        return scan(path)

    def listdir(path: str) -> list[str]:
        refuse(path)
        return names(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(StorageError, match=r"log\.denied: cannot read the journal"):
        LogReader(data).bounds("news")
