"""The bytes of one commit: an Arrow IPC message with the rows of many topics, and its checksum.

A commit is one encapsulated record batch message. Its custom metadata has two entries:

    polybus.commit   JSON: the commit's number, the last commit number that was synced when it was
                     written (`synced`), the segment's mark, and which rows belong to which topic
    polybus.xxh3     16 hexadecimal digits: XXH3 (64 bits) of every byte of the message, header,
                     padding and body, with zeros in place of these digits

A segment begins with the stream's schema message, its head. The schema's metadata has an entry
`polybus.mark`: 16 random hexadecimal digits and a checksum of them. Each commit of the segment
repeats the digits. Clients do not know them, so a published value that looks like a commit is never
taken for one, even when a damaged segment is searched for intact commits.

The checksum digits are found without trusting the message: they are the only string of 16
characters between a flatbuffer length and terminator (JSON never has the zero bytes around it).
"""

import os
import re
import struct
from collections.abc import Iterable, Mapping

import msgspec
import pyarrow as pa
import xxhash

from polybus.batch import Batch, Buffer
from polybus.log.columns import SCHEMA, TopicRows
from polybus.log.journal.message import DIGITS, NO_OWNERS, GroupedRows, MessageWriter
from polybus.structs import decode

END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The end marker of the stream, at the end of a sealed segment."""
CONTINUATION = END[:4]
NOTE_BYTES_STEP = 64

_DIGITS = re.compile(rb"\x10\x00\x00\x00([0-9a-f]{16})\x00")
_JSON_START = b'{"commit":'


class CommitMetadata(msgspec.Struct, frozen=True):
    """The content of `polybus.commit`. `commit` must stay the first field of the JSON."""

    commit: int
    synced: int
    mark: str
    topics: tuple[TopicRows, ...]


class Damaged(Exception):
    """The bytes are not an intact commit or file; the argument says why."""


class Encoder:
    """Encodes batches as commits, in a buffer that the next commit overwrites."""

    def __init__(self, owners: Mapping[str, str] = NO_OWNERS) -> None:
        """`owners` has the accounts of topics, as they change; a missing one means `default`."""
        self._messages = MessageWriter()
        self._owners = owners

    def encode(
        self, commit: int, synced: int, batches: Iterable[Batch], *, mark: str = ""
    ) -> tuple[list[memoryview], tuple[TopicRows, ...]]:
        """Encode the batches as one commit, their rows grouped by topic in the order of batches.

        Returns its bytes, which are valid until the next one is encoded, and its topics.
        """
        rows = GroupedRows(batches, self._owners)
        note = msgspec.json.encode(CommitMetadata(commit, synced, mark, rows.topics))
        pieces, digits_at = self._messages.write(rows, _padded(note))
        digits = b"%016x" % _checksum(pieces)
        pieces[0][digits_at : digits_at + len(digits)] = digits
        return pieces, rows.topics


def _checksum(pieces: list[memoryview]) -> int:
    if len(pieces) == 1:
        return int(xxhash.xxh3_64_intdigest(pieces[0]))
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return int(state.intdigest())


def _padded(note: bytes) -> bytes:
    """The metadata padded with spaces to one of few sizes, because headers are cached by size.

    Padding adds at most a sixteenth to large metadata.
    """
    step = max(NOTE_BYTES_STEP, 1 << len(note).bit_length() - 5)
    return note.ljust(-(-len(note) // step) * step)


def _check_of(mark: str) -> str:
    return str(xxhash.xxh3_64_hexdigest(mark.encode()))


def head_of(mark: str) -> bytes:
    """The head of a segment that has this mark."""
    metadata = {"polybus.mark": mark + _check_of(mark)}
    return bytes(SCHEMA.with_metadata(metadata).serialize().to_pybytes())


def new_mark() -> str:
    return os.urandom(8).hex()


HEAD = head_of(DIGITS.decode())
"""A head; all heads have this size."""


def read_head(start: bytes) -> tuple[int, str] | None:
    """The size and mark of the head at the start of a file; None if it is damaged."""
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
    found = list(_DIGITS.finditer(view[: 8 + len(_metadata(view))]))
    if len(found) != 1:
        raise Damaged("the message has no checksum")
    digits = found[0]
    state = xxhash.xxh3_64(view[: digits.start(1)])
    state.update(DIGITS)
    state.update(view[digits.end(1) :])
    if b"%016x" % state.intdigest() != digits[1]:
        raise Damaged("the checksum does not match")


def note_of(message: Buffer) -> CommitMetadata:
    """The metadata of a verified commit. Raises Damaged."""
    metadata = _metadata(memoryview(message))
    start = metadata.find(_JSON_START)
    size = int.from_bytes(metadata[start - 4 : start], "little")
    try:
        return decode(metadata[start : start + size], CommitMetadata)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"its note cannot be decoded: {error}") from error


def size_of(start: Buffer) -> int:
    """The size of the message at `start`, which must include all its metadata. Raises Damaged.

    Nothing is verified yet, so the size is only a hint.
    """
    metadata = _metadata(memoryview(start))
    try:
        # The flatbuffer table `Message`: its fourth field is bodyLength.
        (table,) = struct.unpack_from("<I", metadata, 0)
        (to_fields,) = struct.unpack_from("<i", metadata, table)
        (field,) = struct.unpack_from("<H", metadata, table - to_fields + 10)
        (body_bytes,) = struct.unpack_from("<q", metadata, table + field)
    except struct.error as error:
        raise Damaged("the message header cannot be decoded") from error
    if body_bytes < 0:
        raise Damaged("the message header cannot be decoded")
    return 8 + len(metadata) + int(body_bytes)


def _metadata(view: memoryview) -> bytes:
    """The flatbuffer part of a message."""
    if len(view) < 8 or view[:4] != CONTINUATION:
        raise Damaged("no message begins here")
    size = int.from_bytes(view[4:8], "little", signed=True)
    if size <= 0 or 8 + size > len(view):
        raise Damaged("the message is incomplete")
    return bytes(view[8 : 8 + size])
