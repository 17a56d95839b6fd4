"""Finds where messages and their properties begin and end.

A message is an int32 count of properties, then per property uint16 key length, key, int32 value
length, value (big-endian). This module follows lengths and reads nothing else, so a message of an
unknown version, or one with errors in it, is skipped like any other.
"""

import struct
import sys
from array import array
from collections.abc import Iterator

from polybus import scan
from polybus.batch import Buffer
from polybus.errors import PeerError

INT32 = struct.Struct(">i")
UINT16 = struct.Struct(">H")
LENGTH_BYTES = INT32.size
KEY_BYTES_MAX = (1 << 16) - 1

PropertyOffsets = list[int]
"""Three numbers per property: its key's start and end, and its value's end. The value's length is
between key and value."""

Cut = tuple[Buffer, PropertyOffsets, "array[int] | None"]
"""A buffer, and either the offsets of one message or the spans of a run: its last values."""

_HEAD_BYTES_MAX = 4 << 10
# Room for a topic, flags and some headers beside a value of the largest size.
_ROOM_BYTES = 64 << 10
# Offsets become C ints, and a message may begin anywhere in a read.
_MESSAGE_BYTES_MOST = (1 << 31) - (16 << 20)


class Framer:
    """Cuts a stream into messages, in any chunking, in linear time.

    Memory is allocated only for bytes that have arrived, never for a length.
    """

    def __init__(
        self, message_bytes_max: int, properties_max: int, steps_max: int = sys.maxsize
    ) -> None:
        self._steps_max = steps_max
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

    @property
    def held_bytes(self) -> int:
        return len(self._carry)

    def take_carry(self) -> bytes:
        """Hand out the unfinished message's bytes; the caller puts them before the next data."""
        carry, self._carry = self._carry, bytearray()
        return bytes(carry)

    def drop(self) -> None:
        """Drop the unfinished message."""
        self.backlog = False
        self._carry = bytearray()
        self._begin()

    def feed(self, data: Buffer) -> Iterator[Cut]:
        """Yield the messages that these bytes complete, one by one or in runs (`learn`).

        Exhaust the iterator before the next call. A yielded buffer no longer changes.

        Raises:
            PeerError: final, after the messages before it.
        """
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
                    end, spans = scan.scan_properties(
                        buffer, start, len(buffer), self._head, self._value_bytes_max
                    )
                    if spans:
                        yield buffer, [], spans
                        start = end
                        continue
                end = self._follow(buffer, start)
                if end < 0:
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
            raise PeerError("boson.count-invalid", f"the number of properties is {count}")
        if count > self._properties_max:
            text = f"{count} properties, over {self._properties_max} (properties-max)"
            raise PeerError("boson.count-invalid", text)
        return count

    def _read_length(self, buffer: Buffer, start: int, value: int) -> int:
        length: int = INT32.unpack_from(buffer, value - LENGTH_BYTES)[0]
        if length < 0:
            raise PeerError("boson.length-negative", f"the length of a value is {length}")
        if length > self._value_bytes_max or value + length - start > self._whole_bytes_max:
            text = f"the message is over {self._value_bytes_max} bytes (message-bytes-max)"
            raise PeerError("boson.message-too-large", text)
        return length
