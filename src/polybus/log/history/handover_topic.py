"""One topic's part of a hand-over: its rows of one segment become files, then a manifest.

The order of writes is in log/history/handover.py.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pyarrow as pa

from polybus.errors import StorageError
from polybus.log.columns import SCHEMA, TopicRows
from polybus.log.disk import Disk
from polybus.log.history import exposed, parquet
from polybus.log.history import manifest as manifests
from polybus.log.history.manifest import HistoryFile, Manifest
from polybus.log.topics import epoch_of, read_topic_metadata, was_deleted


class TopicHandover:
    """Moves a topic's rows of one segment to its history.

    Call `expect` for all rows, then `add` for the rows that it `wants`, in order, `write` from time
    to time, and `finish`. Nothing is visible before `finish`. `problem` says why rows had to stay
    in the journal.
    """

    def __init__(self, name: str, folder: Path, *, retention_bytes: int | None) -> None:
        """`retention_bytes` applies if the topic sets none itself."""
        self.name = name
        self.expected_bytes = 0
        self.problem: str | None = None
        self._folder = folder
        self._days: set[str] = set()
        self._writer: parquet.FileWriter | None = None
        self._files: list[HistoryFile] = []
        self._merged: HistoryFile | None = None
        self._deleted: set[int] = set()
        self._old_epoch = False
        self._on_disk = False
        self._epoch: int | None = None
        self._file_bytes_max = parquet.FILE_BYTES_MAX
        self._manifest = Manifest(epoch=0)
        try:
            note = read_topic_metadata(folder)
            if note is not None:
                self._epoch = note.epoch
                limit = note.settings.retention_bytes or retention_bytes
                if limit is not None:
                    # Retention removes whole files, so a few should fit.
                    self._file_bytes_max = min(self._file_bytes_max, limit // 4)
                found = manifests.load(folder)
                self._manifest = manifests.of_epoch(folder, found, note.epoch)
                self._on_disk = found is self._manifest
                self._old_epoch = found is not None and not self._on_disk
        except StorageError as error:
            self.problem = error.text
        self._added: list[pa.RecordBatch] = []
        self._next = self._written = self._manifest.handed_over

    @property
    def buffered_bytes(self) -> int:
        return 0 if self._writer is None else self._writer.buffered_bytes

    def expect(self, rows: TopicRows, size: int) -> None:
        """Count rows that are in the segment."""
        self.expected_bytes += size
        self._days.add(parquet.day_of(rows.min_timestamp_us))
        self._days.add(parquet.day_of(rows.max_timestamp_us))

    def wants(self, rows: TopicRows) -> bool:
        """Whether the rows continue the topic's history; a gap before them stops the topic."""
        if self.problem is not None or self._epoch is None or self.has(rows):
            return False
        if rows.epoch < self._epoch:
            # There is no proof that their topic was deleted, so they stay in the journal.
            return False
        if rows.epoch > self._epoch:
            self.stop(f"epoch {rows.epoch} in the journal, {self._epoch} in topic.json")
            return False
        if rows.first_offset > self._next:
            self.stop(f"offsets {self._next} to {rows.first_offset - 1} are missing")
            return False
        return rows.stop_offset > self._next

    def has(self, rows: TopicRows) -> bool:
        """Whether the rows are in history, or the trash proves that their topic was deleted."""
        if rows.epoch == self._epoch:
            return rows.stop_offset <= self._manifest.handed_over
        if rows.epoch not in self._deleted and was_deleted(self._folder, rows.epoch):
            self._deleted.add(rows.epoch)
        return rows.epoch in self._deleted

    def stop(self, problem: str) -> None:
        """Hand over only the rows that were added so far."""
        self.problem = self.problem or problem

    def add(self, rows: TopicRows, batch: pa.RecordBatch) -> None:
        """Add the next rows: slices of a commit, which they keep in memory until `write`."""
        self._added.append(batch.slice(self._next - rows.first_offset))
        self._next = rows.stop_offset

    def write(self) -> None:
        """Write the added rows to a file, or drop them if the topic was deleted meanwhile."""
        if not self._added:
            return
        # Join small slices: a topic may have only a row or two in each commit.
        batch = pa.concat_batches(self._added)
        self._added.clear()
        if not parquet.contiguous(batch.column("offset"), self._written):
            self.stop(f"from offset {self._written} on, its rows do not match the index")
            return
        with self._unless_gone():
            for day, rows in parquet.split_by_day(batch):
                for start in range(0, rows.num_rows, parquet.ROW_GROUP_ROWS):
                    part = rows.slice(start, parquet.ROW_GROUP_ROWS)
                    self._writer_for(day).add(part)
            self._written += batch.num_rows

    def flush(self) -> None:
        if self._writer is not None:
            with self._unless_gone():
                self._writer.flush()

    def finish(self, *, grace_s: float) -> None:
        """Make the added rows part of history by replacing the manifest, then clean up."""
        self.write()
        if self._epoch is None:
            return
        with self._unless_gone():
            self._close_file()
            if self._files or self._old_epoch:
                self._save_manifest()
            if self._on_disk:
                days = None if self._old_epoch else self._days
                sweep(self._folder, self._manifest, days=days, grace_s=grace_s)

    def release(self) -> None:
        """Drop unfinished files."""
        self._added.clear()
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def _save_manifest(self) -> None:
        assert self._epoch is not None
        if epoch_of(self._folder) != self._epoch:
            # The topic was recreated meanwhile; its next hand-over removes the files.
            self._epoch = None
            return
        kept = self._manifest.files
        if self._merged is not None:
            kept = kept[:-1]
        replaced = msgspec.structs.replace(
            self._manifest, files=(*kept, *self._files), handed_over=self._written
        )
        manifests.save(self._folder, replaced)
        self._manifest = replaced
        self._on_disk = True
        if epoch_of(self._folder) != self._epoch:
            self._take_back()
        else:
            exposed.catch_up(self._folder, replaced)

    def _take_back(self) -> None:
        """Remove our files from a topic that was deleted and created again during the save."""
        found = manifests.load(self._folder)
        if found is not None and found.epoch == self._epoch:
            (self._folder / manifests.NAME).unlink(missing_ok=True)
            paths = [self._folder / file.path for file in self._files]
            for path in paths:
                path.unlink(missing_ok=True)
            for folder in (*[path.parent for path in paths], self._folder / manifests.HISTORY):
                with suppress(OSError):
                    folder.rmdir()  # Only if it is empty.
        self._epoch = None
        self._on_disk = False

    def _writer_for(self, day: str) -> parquet.FileWriter:
        writer = self._writer
        if writer is not None:
            if writer.day == day and writer.written_bytes < self._file_bytes_max:
                return writer
            self._close_file()
        writer = self._writer = parquet.FileWriter(self._folder, day, SCHEMA)
        if not self._files:
            self._merge_last_file(writer)
        return writer

    def _merge_last_file(self, writer: parquet.FileWriter) -> None:
        """If the day's last file is small, begin with its rows in order to replace it."""
        last = self._manifest.files[-1] if self._manifest.files else None
        if last is None or last.bytes >= min(manifests.SMALL_FILE_BYTES, self._file_bytes_max):
            return
        path = self._folder / last.path
        # A damaged file stays in the manifest, so that `verify` finds it.
        if parquet.day_in(last.path) != writer.day or not path.exists():
            return
        if parquet.xxh3_of(path) != last.xxh3:
            return
        for rows in parquet.open_file(path).iter_batches(batch_size=8192, use_threads=False):
            writer.add(rows)
        self._merged = last

    def _close_file(self) -> None:
        if self._writer is not None:
            self._files.append(self._writer.finish())
            self._writer = None

    @contextmanager
    def _unless_gone(self) -> Iterator[None]:
        """If a file is missing because the topic was deleted, drop its rows."""
        try:
            yield
        except FileNotFoundError:
            if epoch_of(self._folder) == self._epoch:
                raise
            self._epoch = None
            self.release()


def sweep(folder: Path, manifest: Manifest, *, days: set[str] | None, grace_s: float) -> None:
    """Move files that the manifest does not name out of history; `days` None means every day.

    The manifest must be on disk: a topic without one may have lost it, and these files may be the
    only copy of its rows.
    """
    named = {file.path for file in manifest.files}
    history = folder / manifests.HISTORY
    if days is None:
        days = {path.name.removeprefix("date=") for path in history.glob("date=*")}
    for day in days:
        day_folder = history / f"date={day}"
        for path in day_folder.glob("*.parquet"):
            if str(path.relative_to(folder)) not in named:
                set_aside(folder, path)
        with suppress(OSError):
            day_folder.rmdir()  # Only if it is empty.
    sweep_scratch(folder, grace_s=grace_s)


def set_aside(folder: Path, path: Path) -> None:
    """Move a file out of history, so that queries over the folder do not read it."""
    scratch = folder / parquet.SCRATCH
    scratch.mkdir(exist_ok=True)
    replaced = scratch / f"{path.name}.replaced"
    with suppress(FileNotFoundError):
        path.replace(replaced)
        os.utime(replaced)
        Disk().sync_folder(path.parent)


def sweep_scratch(folder: Path, *, grace_s: float) -> None:
    """Remove partial files, and replaced ones after their grace period. Under HistoryLock."""
    scratch = folder / parquet.SCRATCH
    try:
        found = list(os.scandir(scratch))
    except FileNotFoundError:
        return
    for entry in found:
        with suppress(FileNotFoundError):
            old = entry.stat().st_mtime <= time.time() - grace_s
            if old or entry.name.endswith(".writing"):
                os.unlink(entry.path)
    with suppress(OSError):
        scratch.rmdir()  # Only if it is empty.
