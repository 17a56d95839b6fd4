"""One segment of the journal: an Arrow IPC stream of commits, and its index.

`pyarrow.ipc.open_stream` reads the stream, sealed or live. The index has one record per commit:
uint32 payload length, uint64 XXH3 of length and payload, and the payload, a MessagePack
CommitEntry. A commit's record is written after the fsync of the segment, so an indexed commit is
durable. The last record of a sealed segment has the number SEAL and the position of the end marker.

The committer writes with SegmentWriter. SegmentScan finds commits without the index, from which
recovery rebuilds a lost or damaged one; log/journal/recovery.py has the order of writes.
"""

import contextlib
import errno
import os
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import xxhash

from polybus.batch import Buffer
from polybus.errors import StorageError
from polybus.log.columns import TopicRows
from polybus.log.disk import Disk
from polybus.log.journal import commit as commits
from polybus.log.journal import floor as floors
from polybus.log.journal.commit import CONTINUATION, END, HEAD, CommitMetadata, Damaged
from polybus.log.journal.message import read_rows as rows_of
from polybus.log.layout import index_path

SEAL = -1
_HEADER = struct.Struct("<IQ")
_SEARCH_BYTES = 1 << 20
# A continuation marker with a metadata size below 64 MiB, or the end marker; matches may overlap.
_MESSAGE_START = re.compile(rb"(?=\xff\xff\xff\xff.{3}[\x00-\x03])", re.DOTALL)


class CommitEntry(NamedTuple):
    """Where a commit is in its segment, and which rows belong to which topic."""

    commit: int
    position: int
    size: int
    topics: tuple[TopicRows, ...]


class SegmentIndex(NamedTuple):
    """The content of an index file up to its first bad record."""

    entries: list[CommitEntry]
    sealed: bool
    intact_bytes: int
    """The size of the good records."""
    file_bytes: int

    @property
    def end(self) -> int:
        """Where the last indexed commit ends in the segment; 0 without one."""
        return self.entries[-1].position + self.entries[-1].size if self.entries else 0

    @property
    def is_complete(self) -> bool:
        """Whether it lists every commit that its segment had."""
        return self.sealed or not self.file_bytes

    def rows(self) -> Iterator[TopicRows]:
        return (rows for entry in self.entries for rows in entry.topics)


_DECODER = msgspec.msgpack.Decoder(CommitEntry)


def encode_entry(entry: CommitEntry) -> bytes:
    payload = msgspec.msgpack.encode(entry)
    length = len(payload).to_bytes(4, "little")
    return _HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(length + payload)) + payload


def encode_seal(position: int) -> bytes:
    return encode_entry(CommitEntry(SEAL, position, len(END), ()))


def read_index(path: Path) -> SegmentIndex:
    """Read an index file; a missing one is empty. Everything after a bad record is ignored."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    return parse_index(content)


def parse_index(content: bytes) -> SegmentIndex:
    """Decode bytes of an index that begin with any record."""
    entries: list[CommitEntry] = []
    position = 0
    while position + _HEADER.size <= len(content):
        length, checksum = _HEADER.unpack_from(content, position)
        stop = position + _HEADER.size + length
        payload = content[position + _HEADER.size : stop]
        if stop > len(content):
            break
        if xxhash.xxh3_64_intdigest(content[position : position + 4] + payload) != checksum:
            break
        entry = _DECODER.decode(payload)
        position = stop
        if entry.commit == SEAL:
            return SegmentIndex(entries, True, position, len(content))
        entries.append(entry)
    return SegmentIndex(entries, False, position, len(content))


class SegmentScan:
    """The commits that a segment's bytes hold from a position on, found without the index.

    Attributes:
        entries: the whole commits, in order.
        notes: the metadata of the commits.
        holes: (start, stop, reason) of bytes between commits that are not a commit.
        end: where the last whole commit ends.
        sealed: only the end marker follows.
        tail: why the bytes after `end` are not a commit; "" if there are none.
    """

    def __init__(self, path: Path, position: int) -> None:
        self.entries: list[CommitEntry] = []
        self.notes: list[CommitMetadata] = []
        self.holes: list[tuple[int, int, str]] = []
        self.end = position
        self.sealed = False
        self.tail = ""
        self._mark = _head(path)[1]
        with path.open("rb", buffering=0) as file:
            self._file_bytes = os.fstat(file.fileno()).st_size
            self._run(file.fileno(), self._file_bytes)

    def all_holes(self) -> list[tuple[int, int, str]]:
        """The holes, including bytes after the last commit."""
        tail = [(self.end, self._file_bytes, self.tail)] if self.tail else []
        return [*self.holes, *tail]

    def _run(self, file: int, file_bytes: int) -> None:
        hole: tuple[int, str] | None = None
        position = self.end
        while position < file_bytes:
            if file_bytes - position == len(END) and os.pread(file, 8, position) == END:
                self.sealed = True
                break
            try:
                note, size = _commit_at(file, position, file_bytes)
                # If the head is damaged, take the mark of the first intact commit.
                self._mark = self._mark or note.mark
                if note.mark != self._mark:
                    raise Damaged("it looks like a commit, but not one of this segment")
            except Damaged as error:
                if hole is None:
                    hole = (position, str(error))
                position = _next_message(file, position + 8, file_bytes)
                continue
            if hole is not None:
                self.holes.append((hole[0], position, hole[1]))
                hole = None
            self.entries.append(CommitEntry(note.commit, position, size, note.topics))
            self.notes.append(note)
            position = self.end = position + size
        if hole is not None:
            if self.sealed:
                self.holes.append((hole[0], position, hole[1]))
                self.end = position
            else:
                self.tail = hole[1]


def _head(path: Path) -> tuple[int, str] | tuple[None, None]:
    """The size and mark of a segment's head; None if the file does not begin with an intact one."""
    with path.open("rb", buffering=0) as file:
        return commits.read_head(os.pread(file.fileno(), 4096, 0)) or (None, None)


def _commit_at(file: int, position: int, file_bytes: int) -> tuple[CommitMetadata, int]:
    """Read and verify the commit at a position. Raises Damaged."""
    header = os.pread(file, 8, position)
    metadata_bytes = int.from_bytes(header[4:8], "little", signed=True)
    if len(header) < 8 or header[:4] != CONTINUATION or metadata_bytes <= 0:
        raise Damaged("no commit begins here")
    if position + 8 + metadata_bytes > file_bytes:
        raise Damaged("the commit is incomplete")
    size = commits.size_of(os.pread(file, 8 + metadata_bytes, position))
    if position + size > file_bytes:
        raise Damaged("the commit is incomplete")
    message = os.pread(file, size, position)
    commits.verify(message)
    return commits.note_of(message), size


def _next_message(file: int, position: int, file_bytes: int) -> int:
    """The next position at which a message may begin, or the end of the file."""
    while position < file_bytes:
        chunk = os.pread(file, _SEARCH_BYTES, position)
        for found in _MESSAGE_START.finditer(chunk):
            if (position + found.start()) % 8 == 0:
                return position + found.start()
        if len(chunk) < _SEARCH_BYTES:
            break
        position += len(chunk) - 8
    return file_bytes


class Segment:
    """A segment as its files describe it: the index, and the commits after the last indexed one.

    Attributes:
        head: the size of its head; None if that is damaged.
        scan: what follows the indexed commits; None if the index is sealed or names more bytes
            than the file has.
        entries, end: all commits, and where the last one ends.
        sealed: the segment is complete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = read_index(index_path(path))
        self.file_bytes = path.stat().st_size
        self.head = _head(path)[0]
        self.entries, self.sealed, self.end = self.index.entries, self.index.sealed, self.index.end
        self.scan: SegmentScan | None = None
        if not self.sealed and self.end <= self.file_bytes:
            self.scan = SegmentScan(path, self.end or self.head or len(HEAD))
            self.entries = self.entries + self.scan.entries
            self.sealed, self.end = self.scan.sealed, self.scan.end

    def damage(self) -> list[str]:
        """Descriptions of the damaged parts, as far as the index does not list them."""
        found = [] if self.head else [f"{self.path.name}: the head of the stream is damaged"]
        for start, stop, why in self.scan.holes if self.scan else ():
            found.append(f"{self.path.name}: bytes {start} to {stop}: {why}")
        return found


def read_rows(path: Path, entry: CommitEntry) -> pa.RecordBatch:
    """The rows of a commit, checked. FileNotFoundError if the segment was deleted.

    Raises StorageError `log.damaged`, naming the segment, the commit, topics and offsets.
    """
    try:
        message = read_message(path, entry.position, entry.size)
        note = commits.note_of(message)
        if note.commit != entry.commit:
            raise Damaged(f"the segment has commit {note.commit} at its position")
    except Damaged as error:
        raise damage_of(path, entry, str(error)) from error
    return rows_of(message)


def read_message(path: Path, position: int, size: int) -> Buffer:
    """A commit's bytes, verified. Raises Damaged; FileNotFoundError if the segment was deleted."""
    with path.open("rb", buffering=0) as file:
        try:
            message = os.pread(file.fileno(), size, position)
        except OSError as error:
            raise Damaged(f"the disk cannot read it: {error.strerror}") from error
    if len(message) < size:
        raise Damaged("the file ends before the commit does")
    commits.verify(message)
    return message


def damage_of(path: Path, entry: CommitEntry, reason: str) -> StorageError:
    concerned = ", ".join(
        f"{rows.topic} {rows.first_offset} to {rows.stop_offset - 1}" for rows in entry.topics[:10]
    )
    if len(entry.topics) > 10:
        concerned += f" and {len(entry.topics) - 10} more"
    text = f"journal segment {path.name}, commit {entry.commit} ({concerned}): {reason}"
    return StorageError("log.damaged", text)


class SegmentWriter:
    """The segment to which commits are appended, and its index.

    Appended commits are durable after `sync`; their entries are then recorded with `index`.

    Attributes:
        bytes, synced_bytes: the size of the segment, and how much of it is durable.
        commit_count: the number of indexed commits.
        ended: the end marker is written, but `seal` did not finish.
        mark: the mark that every commit of this segment carries.
    """

    def __init__(self, path: Path, disk: Disk, *, end: int, index_end: int, count: int) -> None:
        """Continue a segment whose `count` commits end at `end`; further bytes are cut off."""
        self.path = path
        self.bytes = self.synced_bytes = end
        self.commit_count = count
        self._disk = disk
        self._index_bytes = index_end
        # The index may have bytes after these.
        self._index_is_torn = True
        self._unindexed = b""
        self.ended = False
        self._open()
        self.mark = _head(path)[1] or ""

    @classmethod
    def create(cls, path: Path, disk: Disk) -> "SegmentWriter":
        """Begin a segment; its name and head are durable when this returns."""
        disk.unlink(path)
        disk.unlink(index_path(path))
        writer = cls(path, disk, end=0, index_end=0, count=0)
        try:
            writer.mark = commits.new_mark()
            writer.append(commits.head_of(writer.mark))
            writer.sync()
            disk.sync_folder(path.parent)
        except OSError:
            writer.close()
            raise
        return writer

    def append(self, *pieces: Buffer) -> int:
        """Write a message and return its position. After an OSError call `repair`."""
        position = self.bytes
        for piece in pieces:
            self._file.append(piece)
        self.bytes += sum([memoryview(piece).nbytes for piece in pieces])
        return position

    @property
    def descriptor(self) -> int:
        """For appending a commit elsewhere, which `wrote` counts when it has succeeded."""
        return self._file.descriptor

    def wrote(self, size: int) -> None:
        self._file.appended(size)
        self.bytes += size

    def can_sync_elsewhere(self) -> bool:
        """Whether a sync is no more than that, and the index only needs to be appended to."""
        return not (self._index_is_torn or self._unindexed or self._file.is_drop_due())

    def begin_sync_elsewhere(self) -> int:
        """Return the index's descriptor, for appending records after a sync.

        Until `synced` is called, a later write of the index cuts them off.
        """
        self._index_is_torn = True
        return self._index.descriptor

    def synced(self, stop: int, entries: list[CommitEntry], records: bytes | None) -> None:
        """Everything up to byte `stop` was synced elsewhere, and these commits' records appended.

        None if they could not be appended.
        """
        self.synced_bytes = stop
        if records is None:
            self.index(entries)
            return
        self.commit_count += len(entries)
        self._index.appended(len(records))
        self._index_bytes += len(records)
        self._index_is_torn = False

    def sync(self) -> None:
        # Another thread may append commits meanwhile; these are not durable yet.
        written_bytes = self.bytes
        self._file.sync()
        self.synced_bytes = written_bytes

    def index(self, entries: list[CommitEntry]) -> None:
        """Record synced commits.

        The index is derived from the segment. If the disk fails here, the records are written with
        the next ones, or by recovery.
        """
        self.commit_count += len(entries)
        self._unindexed += b"".join([encode_entry(entry) for entry in entries])
        with contextlib.suppress(OSError):
            self._write_index()

    def _write_index(self) -> None:
        if self._index_is_torn:
            self._index.truncate(self._index_bytes)
        self._index_is_torn = True
        self._index.append(self._unindexed)
        self._index_is_torn = False
        self._index_bytes += len(self._unindexed)
        self._unindexed = b""

    def seal(self) -> None:
        """End the stream and its index durably; may be called again after an OSError.

        All commits must be synced and indexed.
        """
        if not self.ended:
            self.append(END)
            self.sync()
            self.ended = True
            self._unindexed += encode_seal(self.bytes - len(END))
        self._write_index()
        self._index.sync()

    def repair(self, unsynced: list[CommitEntry]) -> None:
        """After an OSError: reopen the files, cut off a partial write, rewrite unsynced commits.

        After a failed fsync the kernel may show bytes that never reached the disk, and report
        success for the next fsync. Bytes that are written again are synced again. Raises OSError,
        also if the kernel has lost the bytes.
        """
        self.close()
        # Without an end marker that was not synced: `seal` writes it again.
        self.bytes = self.synced_bytes
        if unsynced:
            self.bytes = unsynced[-1].position + unsynced[-1].size
        self._open()
        for entry in unsynced:
            with self.path.open("rb") as file:
                message = os.pread(file.fileno(), entry.size, entry.position)
            try:
                commits.verify(message)
            except Damaged as error:
                text = f"{self.path.name}: commit {entry.commit} was lost before it was durable"
                raise OSError(errno.EIO, text) from error
            self._file.rewrite(entry.position, message)

    def _open(self) -> None:
        self._file = self._disk.open(self.path)
        try:
            if self._file.size() < self.bytes:
                text = f"{self.path.name} is truncated: expected {self.bytes} bytes"
                raise OSError(errno.EIO, text)
            self._file.truncate(self.bytes)
            self._index = self._disk.open(index_path(self.path))
        except OSError:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()
        self._index.close()


def delete_segments(
    segments: Iterable[Path],
    disk: Disk | None = None,
    *,
    handed_over: floors.HandedOver = dict,
) -> None:
    """Delete segments that are handed over, each with its index.

    `handed_over` replaces a damaged or missing floor.

    After an OSError or a StorageError some files may still be there: call it again with the same
    segments.
    """
    disk = disk or Disk()
    segments = list(segments)
    there = [segment for segment in segments if segment.exists()]
    if there:
        entries = [entry for segment in there for entry in Segment(segment).entries]
        rows = [rows for entry in entries for rows in entry.topics]
        floors.lift(there[0].parent.parent, rows, disk, handed_over)
    for segment in segments:
        # The segment first: recovery deletes an index without a segment, but would index a segment.
        disk.unlink(segment)
        disk.unlink(index_path(segment))
        disk.sync_folder(segment.parent)
