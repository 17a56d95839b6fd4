"""The index beside a segment: which commit is where, with which topics' rows.

One record per commit: uint32 payload length, uint64 XXH3 of length and payload, and the payload, a
MessagePack CommitEntry. A commit's record is written only after the segment's bytes were fsynced,
so an indexed commit was durable. The last record of a sealed segment has the number SEAL and the
place of the end marker. The index is derived: lost or damaged, it is made again from the segment.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from polybus.log.journal.commit import END, TopicRows

SEAL = -1
_HEADER = struct.Struct("<IQ")
_DECODER: msgspec.msgpack.Decoder[CommitEntry]


class CommitEntry(NamedTuple):
    """Where a commit is in its segment, and which rows of it are whose."""

    commit: int
    position: int
    size: int
    topics: tuple[TopicRows, ...]


class Index(NamedTuple):
    """What an index file says, up to its first bad record."""

    entries: list[CommitEntry]
    sealed: bool
    intact_bytes: int
    """Where the good records end."""
    file_bytes: int

    @property
    def end(self) -> int:
        """Where in the segment the last indexed commit ends; 0 if none is."""
        return self.entries[-1].position + self.entries[-1].size if self.entries else 0


_DECODER = msgspec.msgpack.Decoder(CommitEntry)


def encode_entry(entry: CommitEntry) -> bytes:
    payload = msgspec.msgpack.encode(entry)
    length = len(payload).to_bytes(4, "little")
    return _HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(length + payload)) + payload


def encode_seal(position: int) -> bytes:
    return encode_entry(CommitEntry(SEAL, position, len(END), ()))


def read_index(path: Path) -> Index:
    """Read an index file; a missing one is empty. What follows a bad record is not believed."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    return parse_index(content)


def parse_index(content: bytes) -> Index:
    """What the bytes of an index say, from the start of any record on."""
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
            return Index(entries, True, position, len(content))
        entries.append(entry)
    return Index(entries, False, position, len(content))
