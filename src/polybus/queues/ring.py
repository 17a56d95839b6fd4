"""Ring: a bounded buffer of bytes, one end writes and the other reads."""

from __future__ import annotations

from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview


class Ring:
    """First in, first out, never more than `size` bytes.

    Attributes:
        held_bytes: how much there is to read.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # Taken when first needed: an idle channel costs nothing.
        self._bytes = memoryview(b"")
        self._read_at = 0
        self.held_bytes = 0

    def push(self, buffers: Sequence[Buffer]) -> int:
        """Take as much as there is room for, in order; return how many bytes that is."""
        if not self._bytes:
            self._bytes = memoryview(bytearray(self._size))
        taken = 0
        for data in buffers:
            count = min(len(data), self._size - self.held_bytes)
            self._write(memoryview(data)[:count])
            taken += count
            if count < len(data):
                break
        return taken

    def _write(self, data: memoryview) -> None:
        start = (self._read_at + self.held_bytes) % self._size
        first = min(len(data), self._size - start)
        self._bytes[start : start + first] = data[:first]
        self._bytes[: len(data) - first] = data[first:]
        self.held_bytes += len(data)

    def pull(self, size: int) -> bytes:
        """Give up to `size` bytes."""
        count = min(size, self.held_bytes)
        start = self._read_at
        first = min(count, self._size - start)
        data = bytes(self._bytes[start : start + first])
        if first < count:
            data += self._bytes[: count - first]
        self.held_bytes -= count
        # An empty ring begins at the front again: the next write then needs no second piece.
        self._read_at = (start + count) % self._size if self.held_bytes else 0
        return data
