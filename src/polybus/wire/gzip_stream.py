"""A gzip layer around a stream, in both directions, with a limit on the compression ratio.

The first Boson program compressed its whole TCP stream and flushed after each message; such a
stream is accepted and answered in gzip.
"""

import zlib
from collections.abc import Iterator

from polybus.batch import Buffer
from polybus.errors import PeerError

CHUNK_BYTES_MAX = 256 << 10
_GZIP_WBITS = 31
_LEVEL = 1
# zlib copies the rest of its input at the end of each member and each full chunk. Small slices
# prevent quadratic time for a stream of tiny members.
_SLICE_BYTES = 4 << 10


class GzipStream:
    """One connection's gzip, in and out.

    Args:
        ratio_max, slack_bytes: the output may be at most `ratio_max` times the input plus
            `slack_bytes`, both counted from the start of the connection.
    """

    def __init__(self, ratio_max: int = 256, slack_bytes: int = 1 << 20) -> None:
        self._ratio_max = ratio_max
        self._slack_bytes = slack_bytes
        self._input_bytes = 0
        self._output_bytes = 0
        self._inflater = zlib.decompressobj(_GZIP_WBITS)
        self._deflater: zlib._Compress | None = None

    def decompress(self, data: Buffer) -> Iterator[bytes]:
        """Yield the decompressed data in chunks of at most 256 KiB, none of them empty.

        Exhaust the iterator before the next call. A stream may have any number of members.

        Raises:
            PeerError: final, `gzip.invalid` or `gzip.bomb`; chunks yielded before are valid.
        """
        view = memoryview(data)
        for start in range(0, len(view), _SLICE_BYTES):
            part = bytes(view[start : start + _SLICE_BYTES])
            self._input_bytes += len(part)
            yield from self._inflate(part)

    def _inflate(self, part: bytes) -> Iterator[bytes]:
        more = True
        while more:
            if self._inflater.eof:
                self._inflater = zlib.decompressobj(_GZIP_WBITS)
            try:
                chunk = self._inflater.decompress(part, CHUNK_BYTES_MAX)
            except zlib.error as error:
                raise PeerError("gzip.invalid", "the stream is not valid gzip") from error
            self._output_bytes += len(chunk)
            if self._output_bytes > self._ratio_max * self._input_bytes + self._slack_bytes:
                text = f"the stream inflates by more than {self._ratio_max} times"
                raise PeerError("gzip.bomb", text)
            if chunk:
                yield chunk
            if self._inflater.eof:
                part = self._inflater.unused_data
                more = bool(part)
            else:
                part = self._inflater.unconsumed_tail
                # After a full chunk zlib may hold more output even if it has consumed all input.
                more = bool(part) or len(chunk) == CHUNK_BYTES_MAX

    def compress(self, data: Buffer) -> bytes:
        """Compress the data so that a reader can decompress it at once; empty for no data."""
        if not data:
            return b""
        if self._deflater is None:
            self._deflater = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WBITS)
        return self._deflater.compress(data) + self._deflater.flush(zlib.Z_SYNC_FLUSH)

    def finish(self) -> bytes:
        """The end of our stream, if it has begun; later data begins a new one."""
        if self._deflater is None:
            return b""
        deflater, self._deflater = self._deflater, None
        return deflater.flush()
