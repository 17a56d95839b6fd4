"""Folders are durable before what is in them counts, whoever has made them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from polybus.batch import Batch
from polybus.log import disk as disks
from polybus.log.disk import Disk
from polybus.log.history.parquet import FileWriter
from polybus.log.journal.message import rows_of


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were synced, in order."""
    found: list[Path] = []
    monkeypatch.setattr(disks, "sync_path", found.append)
    return found


def test_a_folder_whose_sync_failed_is_synced_when_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    disk.make_folder(tmp_path)
    synced: list[Path] = []

    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disks, "sync_path", fail)
    with pytest.raises(OSError, match="Input/output error"):
        disk.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a").is_dir() and not (tmp_path / "a" / "b").exists()
    monkeypatch.setattr(disks, "sync_path", synced.append)
    disk.make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    synced.clear()
    disk.make_folder(tmp_path / "a" / "b")
    assert synced == []
    # Another process does not know whether the maker came to its sync.
    Disk().make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path / "a"]


def test_a_folder_whose_parent_cannot_be_read_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "data").mkdir()
    monkeypatch.setattr(disks, "sync_path", refuse)
    Disk().make_folder(tmp_path / "data")
    with pytest.raises(PermissionError):
        Disk().make_folder(tmp_path / "new")


@pytest.mark.parametrize("left", [[], ["history"], ["history", "history/date=2026-03-01"]])
def test_the_folders_of_a_history_file_are_durable_before_it_counts(
    tmp_path: Path, synced: list[Path], left: list[str]
) -> None:
    """`left`: what a hand-over had made when it was killed, perhaps before it was durable."""
    for name in left:
        (tmp_path / name).mkdir()
    batch = Batch.of("news", [b"x"])
    batch.first_offset = 0
    rows: pa.RecordBatch = rows_of(batch)
    writer = FileWriter(tmp_path, "2026-03-01", rows.schema)
    writer.add(rows)
    writer.finish()
    history = tmp_path / "history"
    needed = [history, history / "date=2026-03-01"]
    # That `date=` exists proves that `history` is durable.
    assert synced == (needed if len(left) == 2 else [tmp_path, *needed])


def test_a_history_file_of_a_deleted_topic_makes_no_folder(tmp_path: Path) -> None:
    topic = tmp_path / "topic"
    topic.mkdir()
    batch = Batch.of("news", [b"x"])
    batch.first_offset = 0
    rows: pa.RecordBatch = rows_of(batch)
    writer = FileWriter(topic, "2026-03-01", rows.schema)
    writer.add(rows)
    writer.flush()
    topic.rename(tmp_path / "trash")
    with pytest.raises(FileNotFoundError):
        writer.finish()
    assert not topic.exists()
