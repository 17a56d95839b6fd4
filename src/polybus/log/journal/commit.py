"""The bytes of one commit: an Arrow IPC message with the rows of many topics, and its checksum.

A commit is one encapsulated record batch message. Its custom metadata has two entries:

    polybus.commit   JSON: the commit's number, the last number known to be on disk when it was
                     written (`synced`), the segment's mark, and which rows are which topic's
    polybus.xxh3     16 hexadecimal digits: XXH3 (64 bits) of every byte of the message, header,
                     padding and body, with these 16 digits taken as zeros

A segment begins with the stream's schema message, its head. The schema's metadata has an entry
`polybus.mark`: 16 random hexadecimal digits and a checksum of them. Each commit of the segment
repeats the digits. Nobody outside knows them, so a published value that looks like a commit is
never taken for one, even when a damaged segment is searched for what is still whole.

The digits of the checksum are found without trusting the message: as the only string of 16
characters between flatbuffer length and terminator (JSON never holds the zero bytes around it).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import pyarrow as pa
import xxhash

from polybus.batch import Batch, Buffer
from polybus.log.columns import SCHEMA, Rows, TopicRows
from polybus.log.journal.message import DIGITS, MessageWriter
from polybus.log.journal.message import read_rows as rows_of

END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""What a sealed segment ends with: the stream's end marker."""
CONTINUATION = END[:4]
NOTE_BYTES_STEP = 64

_DIGITS = re.compile(rb"\x10\x00\x00\x00([0-9a-f]{16})\x00")
_JSON_START = b'{"commit":'


__all__ = ["END", "HEAD", "SCHEMA", "CommitNote", "Damaged", "Encoder", "TopicRows", "rows_of"]


class CommitNote(msgspec.Struct, frozen=True):
    """What `polybus.commit` says. `commit` must stay the first field: the JSON begins with it."""

    commit: int
    synced: int
    mark: str
    topics: tuple[TopicRows, ...]


class Damaged(Exception):
    """The bytes are not a whole, unchanged commit; the argument says what is wrong."""


class Encoder:
    """Turns batches into commits, in a buffer of its own that the next commit overwrites."""

    def __init__(self) -> None:
        self._messages = MessageWriter()

    def encode(
        self, commit: int, synced: int, batches: Iterable[Batch], *, mark: str = ""
    ) -> Encoded:
        """One commit of the batches, their rows grouped by topic in the order of the batches."""
        rows = Rows(batches)
        note = msgspec.json.encode(CommitNote(commit, synced, mark, rows.topics))
        pieces, digits_at = self._messages.write(rows, _padded(note))
        state = xxhash.xxh3_64()
        for piece in pieces:
            state.update(piece)
        digits = b"%016x" % state.intdigest()
        pieces[0][digits_at : digits_at + len(digits)] = digits
        return Encoded(pieces, rows.topics)


def _padded(note: bytes) -> bytes:
    """The note with spaces at its end, so that there are few sizes: the writer knows them by size.

    They add a sixteenth at most to a large note.
    """
    step = max(NOTE_BYTES_STEP, 1 << len(note).bit_length() - 5)
    return note.ljust(-(-len(note) // step) * step)


class Encoded(NamedTuple):
    """A commit ready to be written: its bytes, in order, are valid until the next is encoded."""

    pieces: list[memoryview]
    topics: tuple[TopicRows, ...]


def _check_of(mark: str) -> str:
    return str(xxhash.xxh3_64_hexdigest(mark.encode()))


def head_of(mark: str) -> bytes:
    """The head of a segment with this mark."""
    metadata = {"polybus.mark": mark + _check_of(mark)}
    return bytes(SCHEMA.with_metadata(metadata).serialize().to_pybytes())


def new_mark() -> str:
    return os.urandom(8).hex()


HEAD = head_of(DIGITS.decode())
"""A head: all have this size."""


def read_head(start: bytes) -> tuple[int, str] | None:
    """The size and mark of the head that a file starts with; None if it is damaged."""
    source = pa.BufferReader(start)
    try:
        schema = pa.ipc.read_schema(source)
    except (OSError, pa.ArrowException):
        return None
    text = (schema.metadata or {}).get(b"polybus.mark", b"").decode(errors="replace")
    mark = text[:16]
    if not schema.equals(SCHEMA) or text[16:] != _check_of(mark):
        return None
    return int(source.tell()), mark


def verify(message: Buffer) -> None:
    """Check the checksum of a commit's bytes. Raises Damaged."""
    view = memoryview(message)
    digits = _find_digits(view)
    state = xxhash.xxh3_64(view[: digits.start(1)])
    state.update(DIGITS)
    state.update(view[digits.end(1) :])
    if b"%016x" % state.intdigest() != digits[1]:
        raise Damaged("the checksum does not match")


def note_of(message: Buffer) -> CommitNote:
    """What a verified commit says about itself."""
    metadata = _metadata(memoryview(message))
    start = metadata.find(_JSON_START)
    size = int.from_bytes(metadata[start - 4 : start], "little")
    try:
        return msgspec.json.decode(metadata[start : start + size], type=CommitNote)
    except msgspec.DecodeError as error:
        raise Damaged(f"the commit's own description is unreadable: {error}") from error


def size_of(start: Buffer) -> int:
    """The size of the message that `start` begins with; its metadata must be there as a whole.

    Nothing is verified yet: the answer is where to look, not what to believe. Raises Damaged.
    """
    metadata = _metadata(memoryview(start))
    try:
        # The flatbuffer table `Message`: its fourth field is bodyLength.
        (table,) = struct.unpack_from("<I", metadata, 0)
        (to_fields,) = struct.unpack_from("<i", metadata, table)
        (field,) = struct.unpack_from("<H", metadata, table - to_fields + 10)
        (body_bytes,) = struct.unpack_from("<q", metadata, table + field)
    except struct.error as error:
        raise Damaged("the message header is unreadable") from error
    if body_bytes < 0:
        raise Damaged("the message header is unreadable")
    return 8 + len(metadata) + int(body_bytes)


def _metadata(view: memoryview) -> bytes:
    """The flatbuffer part of a message."""
    if len(view) < 8 or view[:4] != CONTINUATION:
        raise Damaged("no message begins here")
    size = int.from_bytes(view[4:8], "little", signed=True)
    if size <= 0 or 8 + size > len(view):
        raise Damaged("the message is incomplete")
    return bytes(view[8 : 8 + size])


def _find_digits(view: memoryview) -> re.Match[bytes]:
    size = 8 + len(_metadata(view))
    found = list(_DIGITS.finditer(view[:size]))
    if len(found) != 1:
        raise Damaged("the message has no checksum")
    return found[0]
