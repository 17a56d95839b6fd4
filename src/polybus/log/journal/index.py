"""The index file of a segment: the position of each commit, and its topics' rows.

One record per commit: uint32 payload length, uint64 XXH3 of length and payload, and the payload, a
MessagePack CommitEntry. A commit's record is written after the fsync of the segment, so an indexed
commit is durable. The last record of a sealed segment has the number SEAL and the position of the
end marker. The index is derived: recovery rebuilds a lost or damaged one from the segment.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from polybus.log.journal.commit import END, TopicRows

SEAL = -1
_HEADER = struct.Struct("<IQ")


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
