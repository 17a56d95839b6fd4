"""A gzip layer around a stream, both ways, with a bound on what little input may become.

The first Boson program gzipped its whole TCP stream and flushed after each message; we read such a
stream and answer in kind.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from polybus.batch import Buffer
from polybus.errors import PeerError

CHUNK_BYTES_MAX = 256 << 10
_GZIP_WBITS = 31
_LEVEL = 1
# zlib copies what is left of its input at the end of each member and each full chunk. Small slices
# keep a stream of tiny members from making that quadratic.
_SLICE_BYTES = 4 << 10


class GzipStream:
    """One connection's gzip, in and out.

    Args:
        ratio_max, slack_bytes: the output may be at most `ratio_max` times the input plus
            `slack_bytes`, both counted from the connection's beginning.
    """

    def __init__(self, ratio_max: int = 256, slack_bytes: int = 1 << 20) -> None:
        self._ratio_max = ratio_max
        self._slack_bytes = slack_bytes
        self._input_bytes = 0
        self._output_bytes = 0
        self._inflater = zlib.decompressobj(_GZIP_WBITS)
        self._deflater: zlib._Compress | None = None

    def decompress(self, data: Buffer) -> Iterator[bytes]:
        """Give what the data holds, in chunks of at most 256 KiB, none of them empty.

        Use the iterator up before the next call. Members may follow each other without end.

        Raises:
            PeerError: final, `gzip.invalid` or `gzip.bomb`; chunks given before are good.
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
                # A full chunk may leave output inside zlib even when it has taken all input.
                more = bool(part) or len(chunk) == CHUNK_BYTES_MAX

    def compress(self, data: Buffer) -> bytes:
        """Give the data as gzip that a reader can inflate at once; nothing for nothing."""
        if not data:
            return b""
        if self._deflater is None:
            self._deflater = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WBITS)
        return self._deflater.compress(data) + self._deflater.flush(zlib.Z_SYNC_FLUSH)

    def finish(self) -> bytes:
        """Give the end of our stream, if it has begun; what is compressed later begins anew."""
        if self._deflater is None:
            return b""
        deflater, self._deflater = self._deflater, None
        return deflater.flush()
