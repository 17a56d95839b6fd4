"""The messages of Boson properties: where they begin and end, and what is in them.

A message is an int32 count of properties, then per property uint16 key length, key, int32 value
length, value (big-endian). `Framer` follows lengths and reads nothing else, so a message of an
unknown version, or one with errors in it, is skipped like any other.

`decode` reads a message by its version, which is the first property. The specification asks readers
to read the count and the first property, and to pass the rest to a decoder for that version.
`DECODERS` has one per major version; a minor version needs no new one.
"""

import math
import re
import struct
import sys
from array import array
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from polybus import scan
from polybus.batch import Buffer
from polybus.errors import PeerError

VERSION = b"hbfv"
TOPIC = b"topic"
CONTENT = b"content"
FLAG_PREFIX = b"hbf"
INT32 = struct.Struct(">i")
UINT16 = struct.Struct(">H")
LENGTH_BYTES = INT32.size
KEY_BYTES_MAX = (1 << 16) - 1

Span = tuple[int, int]
PropertyOffsets = list[int]
"""Three numbers per property: its key's start and end, and its value's end. The value's length is
between key and value."""

Cut = tuple[Buffer, "PropertyOffsets | None", "array[int] | None"]
"""A buffer, and either the offsets of one message or the spans of a run: its last values.

With neither, the buffer is a piece of a large content, which the message that follows lacks."""

_HEAD_BYTES_MAX = 4 << 10
# Room for a topic, flags and some headers beside a value of the largest size.
_ROOM_BYTES = 64 << 10
# Offsets become C ints, and a message may begin anywhere in a read.
_MESSAGE_BYTES_MOST = (1 << 31) - (16 << 20)
_FLOAT = struct.Struct(">f")
_ASCII = re.compile(rb"([0-9]{1,9})(\.[0-9]{0,9})?")
_VERSION_BYTES_MAX = 40


class Framer:
    """Cuts a stream into messages, in any chunking, in linear time.

    Memory is allocated only for bytes that have arrived, never for a length.
    """

    def __init__(
        self,
        message_bytes_max: int,
        properties_max: int,
        steps_max: int = sys.maxsize,
        *,
        inline_bytes_max: int | None = None,
        hands_on: bool = False,
    ) -> None:
        """`hands_on`: whether a content over `inline_bytes_max` comes in pieces."""
        self._steps_max = steps_max
        self._inline_bytes_max = min(inline_bytes_max or message_bytes_max, message_bytes_max)
        self._hands_on = hands_on
        self._content_left = 0
        self.backlog = False
        self._value_bytes_max = min(message_bytes_max, _MESSAGE_BYTES_MOST)
        self._whole_bytes_max = self._value_bytes_max + _ROOM_BYTES
        self._properties_max = properties_max
        self._head = b""
        self._carry = bytearray()
        self._begin()

    def _begin(self) -> None:
        # How far the unfinished message has been read, relative to its start, so that no byte is
        # read twice when a peer sends one byte at a time.
        self._offsets: PropertyOffsets = []
        self._left = -1
        self._at = 0
        self._needed_bytes = LENGTH_BYTES
        self._is_cut = False

    @property
    def held_bytes(self) -> int:
        return len(self._carry)

    def take_carry(self) -> bytes:
        """Hand out the unfinished message's bytes; the caller puts them before the next data."""
        if self._is_cut:
            return b""
        carry, self._carry = self._carry, bytearray()
        return bytes(carry)

    def drop(self) -> None:
        """Drop the unfinished message."""
        self.backlog = False
        self._carry = bytearray()
        self._content_left = 0
        self._begin()

    def feed(self, data: Buffer) -> Iterator[Cut]:
        """Yield the messages that these bytes complete, one by one or in runs (`learn`).

        Exhaust the iterator before the next call. A yielded buffer no longer changes.

        Raises:
            PeerError: final, after the messages before it.
        """
        if self._content_left:
            data = yield from self._feed_content(data)
            if self._content_left:
                return
        buffer: Buffer = data
        if self._carry:
            self._carry += data
            buffer = self._carry
        start = steps = 0
        self.backlog = False
        try:
            while len(buffer) - start >= self._needed_bytes:
                if steps == self._steps_max:
                    self.backlog = True
                    break
                if self._head and self._left < 0:
                    end, spans = scan.scan_values(
                        buffer, start, len(buffer), self._head, self._inline_bytes_max
                    )
                    if spans:
                        yield buffer, [], spans
                        start = end
                        continue
                end = self._follow(buffer, start)
                if end < 0:
                    content = self._cut_content(buffer, start)
                    if content is not None:
                        yield content, None, None
                        return
                    break
                offsets = self._offsets
                self._begin()
                yield buffer, offsets, None
                start = end
                steps += 1
        except PeerError:
            self.drop()
            raise
        if start or buffer is not self._carry:
            self._carry = bytearray(memoryview(buffer)[start:])

    def _feed_content(self, data: Buffer) -> Generator[Cut, None, Buffer]:
        """Pass on a large content; return what follows it."""
        piece = memoryview(data)[: self._content_left]
        self._content_left -= len(piece)
        yield piece, None, None
        if not self._content_left and not self._left:
            whole, offsets = bytes(self._carry), self._offsets
            self._carry = bytearray()
            self._begin()
            yield whole, offsets, None
        return memoryview(data)[len(piece) :]

    def _cut_content(self, buffer: Buffer, start: int) -> Buffer | None:
        """Take what has arrived of a large content out of the unfinished message."""
        at, stop = start + self._at, len(buffer)
        if stop - at < UINT16.size or not self._hands_on:
            return None
        value = at + UINT16.size + UINT16.unpack_from(buffer, at)[0] + LENGTH_BYTES
        if value > stop or bytes(buffer[at + UINT16.size : value - LENGTH_BYTES]) != CONTENT:
            return None
        length: int = INT32.unpack_from(buffer, value - LENGTH_BYTES)[0]
        if length <= self._inline_bytes_max:
            return None
        self._carry = bytearray(memoryview(buffer)[start : value - LENGTH_BYTES])
        self._carry += bytes(LENGTH_BYTES)
        end = value - start
        self._offsets += (self._at + UINT16.size, end - LENGTH_BYTES, end)
        self._left -= 1
        self._at = end
        self._needed_bytes = end + UINT16.size
        self._is_cut = True
        content = memoryview(buffer)[value:stop]
        self._content_left = length - len(content)
        return content

    def learn(self, head: bytes) -> None:
        """Yield later messages that are `head` and one more value as runs; empty: no runs.

        A head is a message's bytes up to the length of its last value.
        """
        self._head = head if len(head) <= _HEAD_BYTES_MAX else b""

    def _follow(self, buffer: Buffer, start: int) -> int:
        """Read the lengths of the message at `start`; return its end, or -1 if it is incomplete."""
        stop = len(buffer)
        offsets, left, at = self._offsets, self._left, start + self._at
        if left < 0:
            left = self._read_count(buffer, at)
            at += LENGTH_BYTES
        while left:
            value = needed = at + 2
            if value <= stop:
                value = needed = at + 2 + UINT16.unpack_from(buffer, at)[0] + LENGTH_BYTES
            if needed <= stop:
                needed = value + self._read_length(buffer, start, value)
            if needed > stop:
                break
            offsets += (at + 2, value - LENGTH_BYTES, needed)
            at = needed
            left -= 1
        else:
            return at
        self._offsets = [offset - start for offset in offsets] if start else offsets
        self._left = left
        self._at = at - start
        self._needed_bytes = needed - start
        return -1

    def _read_count(self, buffer: Buffer, at: int) -> int:
        count: int = INT32.unpack_from(buffer, at)[0]
        if count < 0:
            raise PeerError("boson.count-invalid", f"the number of properties is negative: {count}")
        if count > self._properties_max:
            text = f"{count} properties, over {self._properties_max} (properties-max)"
            raise PeerError("boson.count-invalid", text)
        return count

    def _read_length(self, buffer: Buffer, start: int, value: int) -> int:
        length: int = INT32.unpack_from(buffer, value - LENGTH_BYTES)[0]
        if length < 0:
            raise PeerError("boson.length-negative", f"the length of a value is negative: {length}")
        if length > self._value_bytes_max or value + length - start > self._whole_bytes_max:
            text = f"the message is over {self._value_bytes_max} bytes (message-bytes-max)"
            raise PeerError("boson.message-too-large", text)
        return length


@dataclass(slots=True)
class Properties:
    """A message's properties after the version, by kind.

    Flags and content are spans of the buffer. The last of several equal keys counts.
    """

    flags: dict[bytes, Span] = field(default_factory=dict)
    topic: bytes = b""
    content: Span = (0, 0)
    headers: dict[str, bytes] = field(default_factory=dict)


def decode(buffer: Buffer, offsets: PropertyOffsets) -> Properties:
    """Decode a complete message of any supported version.

    Raises:
        PeerError: not final, `boson.version-missing`, `boson.version-invalid`,
            `boson.version-unknown` or `boson.key-not-text`.
    """
    if not offsets or bytes(buffer[offsets[0] : offsets[1]]) != VERSION:
        text = "the first property is not the version, hbfv"
        raise PeerError("boson.version-missing", text, final=False)
    start, end = offsets[1] + LENGTH_BYTES, offsets[2]
    major = _major(bytes(buffer[start : min(end, start + _VERSION_BYTES_MAX)]))
    return DECODERS[major](buffer, offsets)


def _major(value: bytes) -> int:
    """The major version, if it is supported."""
    # Four digits or dots could be a float, but not a sensible one (`1.00` is 2.5e-9): text wins.
    text_like = not value.strip(b"0123456789.")
    found = _ASCII.fullmatch(value) if text_like else None
    if found:
        major, said = int(found[1]), value.decode()
    elif len(value) == _FLOAT.size and not text_like and math.isfinite(_FLOAT.unpack(value)[0]):
        number: float = _FLOAT.unpack(value)[0]
        major, said = math.floor(number), str(round(number, 1))
    else:
        text = f"the version is neither a float nor a number in ASCII: {value.hex() or 'empty'}"
        raise PeerError("boson.version-invalid", text, final=False)
    if major not in DECODERS:
        spoken = ", ".join(f"{known}.x" for known in DECODERS)
        text = f"version {said} is not supported, only {spoken}"
        raise PeerError("boson.version-unknown", text, final=False)
    return major


def _decode_1(buffer: Buffer, offsets: PropertyOffsets) -> Properties:
    """Version 1: `hbf…` are flags, `topic` and `content` are the message, all others headers.

    Flags should precede user properties, but are accepted anywhere.
    """
    found = Properties()
    try:
        for index in range(3, len(offsets), 3):
            key = bytes(buffer[offsets[index] : offsets[index + 1]])
            start, end = offsets[index + 1] + LENGTH_BYTES, offsets[index + 2]
            if key == CONTENT:
                found.content = (start, end)
            elif key == TOPIC:
                found.topic = bytes(buffer[start:end])
            else:
                name = key.decode()
                if key.startswith(FLAG_PREFIX):
                    found.flags[key] = (start, end)
                else:
                    found.headers[name] = bytes(buffer[start:end])
    except UnicodeDecodeError as error:
        text = "the key of a property is not UTF-8"
        raise PeerError("boson.key-not-text", text, final=False) from error
    return found


DECODERS: dict[int, Callable[[Buffer, PropertyOffsets], Properties]] = {1: _decode_1}
