"""Buffers for socket reads."""

import sys
from collections import deque

import pyarrow as pa

# Large, because work is per batch and a read gives one batch per topic: with a thousand topics a
# read of 256 KiB has two messages per batch, a read of 2 MiB has nineteen.
READ_BYTES = 2 << 20
_SPARE_MAX = 12
_TRIES = 4


class ReadBuffers:
    """Hands out buffers for socket reads.

    A batch's messages stay in the buffer they were read into until slow subscribers have taken them
    and the committer has written them. So a buffer is reused only when its reference count says
    that nothing else refers to it.
    """

    def __init__(self, size_bytes: int = READ_BYTES) -> None:
        self._size_bytes = size_bytes
        self._spare: deque[pa.Buffer] = deque(maxlen=_SPARE_MAX)
        self._take(self._new())

    def _new(self) -> pa.Buffer:
        # Arrow does not zero its memory: zeroing 2 MiB takes as long as scanning them.
        return pa.allocate_buffer(self._size_bytes, memory_pool=pa.system_memory_pool())

    def _take(self, buffer: pa.Buffer) -> None:
        self.current = buffer
        self.view = memoryview(buffer).cast("B")

    def replace(self) -> None:
        """Leave the current buffer to the batches that refer to it, and take another."""
        self.view.release()
        self._spare.append(self.current)
        spare = self._spare
        for _ in range(min(len(spare), _TRIES)):
            buffer = spare.popleft()
            # Two references: the name `buffer` and the argument of getrefcount.
            if sys.getrefcount(buffer) == 2:
                break
            spare.append(buffer)
        else:
            buffer = self._new()
        self._take(buffer)
