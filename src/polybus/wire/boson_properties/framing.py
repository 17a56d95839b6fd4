"""Where messages and their properties begin and end.

A message is int32 count of properties, then per property uint16 key length, key, int32 value
length, value (big-endian). This file follows lengths and looks at nothing else, so a message of a
version we do not speak, or one with mistakes in it, is stepped over like any other.
"""

from __future__ import annotations

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

Places = list[int]
"""Three numbers per property: its key's start and end, and its value's end. The value's length
stands between key and value."""

Found = tuple[Buffer, Places, "array[int] | None"]
"""A buffer, and either one message's places or a run's spans: of its messages' last values."""

_HEAD_BYTES_MAX = 4 << 10
# Beside a value of the largest size there is room for a topic, flags and some headers.
_ROOM_BYTES = 64 << 10
# Places in a buffer become C ints, and a message begins anywhere in a read.
_MESSAGE_BYTES_MOST = (1 << 31) - (16 << 20)


class Framer:
    """Cuts a stream into messages, in any chunking, at a cost linear in its bytes.

    Memory is taken only for bytes that have arrived, never on the word of a length.
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
        # How far the unfinished message has been followed, from its own beginning, so that nothing
        # is looked at twice when a peer sends a byte at a time.
        self._places: Places = []
        self._left = -1
        self._at = 0
        self._needed_bytes = LENGTH_BYTES

    @property
    def held_bytes(self) -> int:
        return len(self._carry)

    def take_carry(self) -> bytes:
        """Give up the unfinished message's bytes; they will come again before the next data."""
        carry, self._carry = self._carry, bytearray()
        return bytes(carry)

    def drop(self) -> None:
        """Forget the unfinished message."""
        self.backlog = False
        self._carry = bytearray()
        self._begin()

    def feed(self, data: Buffer) -> Iterator[Found]:
        """Take bytes; give the messages they complete, one by one or in runs (`learn`).

        Use the iterator up before the next call. The buffer of a message does not change any more.

        Raises:
            PeerError: final, after the messages before it; nothing more can be cut.
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
                places = self._places
                self._begin()
                yield buffer, places, None
                start = end
                steps += 1
        except PeerError:
            self.drop()
            raise
        if start or buffer is not self._carry:
            self._carry = bytearray(memoryview(buffer)[start:])

    def learn(self, head: bytes) -> None:
        """From here on, messages of `head` and one more value come as runs; empty: none do.

        A head is a message's bytes up to the length of its last value.
        """
        self._head = head if len(head) <= _HEAD_BYTES_MAX else b""

    def _follow(self, buffer: Buffer, start: int) -> int:
        """Follow the message at `start`; return its end, or -1 if that has not arrived."""
        stop = len(buffer)
        places, left, at = self._places, self._left, start + self._at
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
            places += (at + 2, value - LENGTH_BYTES, needed)
            at = needed
            left -= 1
        else:
            return at
        self._places = [place - start for place in places] if start else places
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
