"""`polybus verify` and a backup know the blobs of a data folder."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.errors import StorageError, UsageError
from polybus.log.blobs import (
    BLOCK_BYTES,
    BlobMark,
    BlobReader,
    BlobWriter,
    blobs_folder,
    find_blobs,
    remove_incoming,
    share,
)
from polybus.log.disk import Disk
from polybus.log.history.handover import compact
from polybus.log.verify.verify import verify
from polybus.services.backup import backup, restore
from polybus.testing import run_bus

PAYLOAD = bytes(range(256)) * 5000


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A stopped bus with a message that refers to a blob."""
    folder = tmp_path / "data"

    async def publish() -> None:
        async with run_bus("news", data=str(folder)) as node:
            access, blobs = node.accounts.default, node.services.blobs
            upload = blobs.upload(access, "news")
            await upload.write(PAYLOAD)
            kept = await blobs.keep(upload, ["news"])
            batch = kept.batch("news")
            node.bus.commit([batch])
            blobs.published(kept, [batch])
            await node.context.durability.wait()

    asyncio.run(publish())
    yield folder


def blob_of(data: Path) -> Path:
    [found] = find_blobs(blobs_folder(data, "default"))
    return found.path


def test_a_blob_is_counted_and_its_damage_named(data: Path) -> None:
    report = verify(data)
    assert report.intact and report.bytes > len(PAYLOAD)
    blob = blob_of(data)
    content = blob / "content"
    whole = content.read_bytes()
    for corrupted in (whole[:-1], whole + b"x", whole[:1000] + b"?" + whole[1001:], b""):
        content.write_bytes(corrupted)
        [damage] = verify(data).damages
        assert damage.file == str(blob), damage
    content.write_bytes(whole)
    sums = (blob / "sums").read_bytes()
    (blob / "sums").write_bytes(bytes(len(sums)))
    assert not verify(data).intact
    (blob / "sums").write_bytes(sums)
    assert verify(data).intact


@pytest.mark.parametrize("in_history", [False, True])
def test_a_message_without_its_blob_is_named(data: Path, in_history: bool) -> None:
    if in_history:
        compact(data)
    assert verify(data).intact
    blob = blob_of(data)
    blob.rename(data / "elsewhere")
    [damage] = verify(data).damages
    assert (damage.topic, damage.first, damage.last) == ("news", 0, 0)
    assert damage.file == str(blob)


def test_a_backup_has_the_blobs_and_a_restored_folder_serves_them(
    data: Path, tmp_path: Path
) -> None:
    (blobs_folder(data, "default") / "incoming-1").mkdir()
    backup(data, tmp_path / "copy")
    assert not list((tmp_path / "copy").rglob("incoming-*"))
    restore(tmp_path / "copy", tmp_path / "restored")
    for folder in (tmp_path / "copy", tmp_path / "restored"):
        assert verify(folder).intact
        assert BlobReader(blob_of(folder)).read(0, len(PAYLOAD)) == PAYLOAD
        assert [mark.offset for mark in next(find_blobs(blob_of(folder).parent)).marks] == [0]


def test_a_payload_can_be_read_from_any_byte_on(tmp_path: Path) -> None:
    for size in (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES):
        payload = bytes(index * 7 & 0xFF for index in range(size))
        writer = BlobWriter(tmp_path, Disk())
        for start in range(0, size, 100_000):
            writer.write(payload[start : start + 100_000])
        blob = writer.place(tmp_path / writer.finish(), BlobMark(1, 2))
        reader = BlobReader(blob)
        assert reader.size == size and reader.check() is None
        for start in {0, size // 2, max(0, size - 1)}:
            assert reader.read(start, 1000) == payload[start : start + 1000]
        assert reader.read(0, size + 1) == payload


def test_what_is_not_a_blob_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "incoming-1").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / ("a" * 64)).symlink_to(tmp_path)
    assert list(find_blobs(tmp_path)) == []
    remove_incoming(tmp_path, Disk())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a" * 64, "notes.txt"]
    with pytest.raises(UsageError):
        BlobReader(tmp_path / ("a" * 64))
    with pytest.raises(UsageError):
        BlobReader(tmp_path / ("b" * 64))


def test_a_blob_that_the_disk_cannot_read_is_not_an_unknown_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = BlobWriter(tmp_path, Disk())
    writer.write(b"payload")
    reader = BlobReader(writer.place(tmp_path / writer.finish(), BlobMark(1, 2)))

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(StorageError, match=r"log\.failed: cannot read blob"):
        reader.block(0)


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_bytes(b"not a folder")
    with pytest.raises(StorageError, match=r"log\.failed"):
        BlobWriter(tmp_path / "blobs", Disk()).write(b"x")


def test_a_payload_for_two_accounts_repairs_the_blob_of_each(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for number in range(2):
        writer = BlobWriter(folders[0], Disk())
        writer.write(b"payload")
        blob = writer.place(folders[0] / writer.finish(), BlobMark(1, number))
        other = share(blob, folders[1], BlobMark(2, number), Disk())
        for path in (blob, other):
            assert BlobReader(path).check() is None
            content = path / "content"
            content.unlink()
            content.write_bytes(b"damaged")
        assert [path.name for folder in folders for path in folder.iterdir()] == [blob.name] * 2
