"""The layers TLS and gzip around a protocol: bytes in, bytes out, no socket."""

import contextlib
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

from polybus.batch import Buffer
from polybus.errors import PeerError
from polybus.wire.gzip_stream import GzipStream

_CHUNK_BYTES = 256 << 10
_ALERT = b"\x15\x03\x01\x00\x02\x02\x28"
"""The record of the fatal alert handshake_failure."""


class GzipLayer:
    name = "gzip"
    is_open = True
    ended = False

    def __init__(self) -> None:
        self._stream = GzipStream()

    def receive(self, data: Buffer) -> Iterator[bytes]:
        return self._stream.decompress(data)

    def send(self, data: Buffer) -> bytes:
        return self._stream.compress(data)

    def owed(self) -> bytes:
        return b""

    def finish(self) -> bytes:
        return self._stream.finish()


class TlsLayer:
    """TLS over memory buffers, so that it can begin after the first bytes were examined."""

    name = "tls"

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        # Whether the handshake is done.
        self.is_open = False
        # Whether the peer has ended the layer: it sends no more.
        self.ended = False

    def receive(self, data: Buffer) -> Iterator[bytes]:
        """Unwrap bytes, piece by piece. Raises PeerError, always final."""
        self._incoming.write(data)
        try:
            if not self.is_open:
                self._tls.do_handshake()
                self.is_open = True
            while plain := self._tls.read(_CHUNK_BYTES):
                yield plain
            self.ended = True
        except ssl.SSLWantReadError:
            return
        except ssl.SSLZeroReturnError:
            self.ended = True
        except ssl.SSLError as error:
            raise PeerError("tls.failed", f"TLS: {error.reason or 'handshake failed'}") from error

    @property
    def certificate_name(self) -> str | None:
        """The common name of the peer's verified certificate; None if it has none or several."""
        found: dict[str, Any] | None = self._tls.getpeercert() if self.is_open else None
        subject = found["subject"] if found else ()
        names = [value for part in subject for key, value in part if key == "commonName"]
        return names[0] if len(names) == 1 else None

    def send(self, data: Buffer) -> bytes:
        # A peer that broke its TLS takes no more; what it sent ends the connection.
        with contextlib.suppress(ssl.SSLError):
            if self.is_open and len(data):
                self._tls.write(data)
        return self._outgoing.read()

    def owed(self) -> bytes:
        """Bytes that the layer itself must send: a handshake."""
        return self._outgoing.read()

    def finish(self) -> bytes:
        """The final bytes of the layer."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        rest = self._outgoing.read()
        # A peer without TLS sees by it what the port speaks. OpenSSL sends nothing then.
        return rest if rest or self.is_open else _ALERT


Layer = GzipLayer | TlsLayer


def unwrap(layers: Sequence[Layer], data: Buffer, level: int = 0) -> Iterator[bytes]:
    """Unwrap bytes through the layers from `level` on, also those that are added meanwhile."""
    for plain in layers[level].receive(data):
        if level + 1 < len(layers):
            yield from unwrap(layers, plain, level + 1)
        else:
            yield plain


def wrap(layers: Sequence[Layer], data: Buffer) -> Buffer:
    for layer in reversed(layers):
        data = layer.send(data)
    return data


def finish(layers: Sequence[Layer]) -> bytes:
    """The layers' final bytes."""
    last = b""
    for layer in reversed(layers):
        # A peer that ended its TLS accepts no more data in it.
        last = (b"" if layer.ended else layer.send(last)) + layer.finish()
    return last
