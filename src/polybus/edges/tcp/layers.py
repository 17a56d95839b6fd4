"""The layers TLS and gzip around a protocol: bytes in, bytes out, no socket."""

import contextlib
import ssl
from collections.abc import Iterator, Sequence

from polybus.batch import Buffer
from polybus.config import Tls
from polybus.errors import ConfigError, PeerError
from polybus.wire.gzip_stream import GzipStream

_CHUNK_BYTES = 256 << 10


class GzipLayer:
    name = "gzip"
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
        self._shaken = False
        # Whether the peer has ended the layer: it sends no more.
        self.ended = False

    def receive(self, data: Buffer) -> Iterator[bytes]:
        """Unwrap bytes, piece by piece. Raises PeerError, always final."""
        self._incoming.write(data)
        try:
            if not self._shaken:
                self._tls.do_handshake()
                self._shaken = True
            while plain := self._tls.read(_CHUNK_BYTES):
                yield plain
            self.ended = True
        except ssl.SSLWantReadError:
            return
        except ssl.SSLZeroReturnError:
            self.ended = True
        except ssl.SSLError as error:
            raise PeerError("tls.failed", f"TLS: {error.reason or 'handshake failed'}") from error

    def send(self, data: Buffer) -> bytes:
        # A peer that broke its TLS takes no more; what it sent ends the connection.
        with contextlib.suppress(ssl.SSLError):
            if self._shaken and len(data):
                self._tls.write(data)
        return self._outgoing.read()

    def owed(self) -> bytes:
        """Bytes that the layer itself must send: a handshake."""
        return self._outgoing.read()

    def finish(self) -> bytes:
        """The final bytes of the layer."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        return self._outgoing.read()


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


def tls_context(settings: Tls) -> ssl.SSLContext:
    """Load a connector's certificate. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.cert, settings.key)
    except (OSError, ssl.SSLError) as error:
        text = f"tls: cannot load {settings.cert} and {settings.key}: {error}"
        raise ConfigError("config.tls", text) from error
    return context
