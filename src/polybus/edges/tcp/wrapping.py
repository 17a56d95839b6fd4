"""Between a connection's socket and its protocol: detection, and the layers TLS and gzip.

The first bytes show what a peer speaks: a protocol, or a layer whose content is detected again
(gzip inside TLS is two layers). Once a protocol is known and no layer is around it, the connection
drops its `Wrapping`.
"""

import asyncio
import ssl
from collections.abc import Iterator, Sequence
from itertools import chain
from time import perf_counter
from typing import Protocol

from polybus.batch import Buffer
from polybus.edges.tcp.assembly import Assembling
from polybus.edges.tcp.layers import GzipLayer, Layer, TlsLayer
from polybus.edges.tcp.shared import TcpShared
from polybus.errors import PeerError
from polybus.wire.detect import detect

READ_S_MAX = 0.025
"""How long one connection may occupy the loop."""
LAYERS_GATE = "layers"


class Wrapped(Assembling, Protocol):
    """The connection inside the layers."""

    @property
    def transport(self) -> asyncio.Transport: ...

    def understand(self, data: Buffer) -> None: ...

    def speak(self, protocol: str) -> None: ...

    def reject(self, found: str) -> None: ...

    def answer_last(self, error: PeerError) -> None: ...

    def eof_received(self) -> bool: ...

    def is_closing(self) -> bool: ...

    def is_held_besides(self, gate: str) -> bool: ...


class Wrapping:
    """The layers around one connection's protocol, and bytes that are not enough to detect it."""

    __slots__ = ("_connection", "_head", "_limit", "_pieces", "_speaks", "_tcp", "_tls", "layers")

    def __init__(
        self,
        connection: Wrapped,
        tcp: TcpShared,
        speaks: Sequence[str],
        tls: ssl.SSLContext | None,
        message_bytes_max: int,
    ) -> None:
        self._connection = connection
        self._tcp = tcp
        self._speaks = tuple(speaks)
        self._tls = tls
        self._limit = message_bytes_max
        # The lowest first.
        self.layers: list[Layer] = []
        # What the layers have not produced yet from the bytes read.
        self._pieces: Iterator[bytes] | None = None
        self._head = b""

    # Up: from the socket to the codec

    def receive(self, data: Buffer) -> None:
        """Unwrap bytes and hand them on. Raises PeerError, always final."""
        if self.layers:
            self._pieces = self._unwrap(data, 0)
        else:
            self._connection.understand(data)
        if self._pieces is not None:
            self._pull()

    def _unwrap(self, data: Buffer, level: int) -> Iterator[bytes]:
        """Unwrap bytes through the layers from `level` on."""
        for plain in self.layers[level].receive(data):
            if level + 1 < len(self.layers):
                yield from self._unwrap(plain, level + 1)
            else:
                yield plain

    def _pull(self) -> None:
        """Hand on what the layers produce, until a gate holds us or READ_S_MAX has passed.

        A few bytes of gzip may be many messages, so backpressure applies between two pieces too.
        """
        connection = self._connection
        began = perf_counter()
        while self._pieces is not None and not connection.is_closing():
            if connection.is_held_besides(LAYERS_GATE):
                # The release of the last other gate continues here.
                connection.hold(LAYERS_GATE)
                break
            if perf_counter() - began > READ_S_MAX:
                connection.hold(LAYERS_GATE)
                self._tcp.loop.call_soon(self.go_on)
                break
            piece = next(self._pieces, None)
            if piece is None:
                self._pieces = None
                connection.release(LAYERS_GATE)
            else:
                connection.understand(piece)
        owed = self.layers[0].owed()
        if owed:
            connection.transport.write(owed)
        if self._pieces is None and self.layers[0].ended:
            connection.eof_received()

    def go_on(self) -> None:
        """No other gate holds the connection: hand on what is left."""
        if self._pieces is None or self._connection.is_closing():
            return
        try:
            self._pull()
        except PeerError as error:
            self._connection.answer_last(error)

    def detect(self, data: Buffer) -> None:
        """Collect first bytes until they show the protocol, then hand them on."""
        connection, assembly = self._connection, self._tcp.assembly
        self._head += data
        wrapped = {layer.name for layer in self.layers}
        speaks = self._speaks
        if "gzip" in wrapped:
            speaks = tuple(one for one in speaks if one.startswith("boson"))
        found = detect(self._head, speaks, self._limit)
        if found is None:
            if len(self._head) == len(data):
                assembly.detecting(connection)
            return
        head, self._head = self._head, b""
        if found == "tls" and self._tls is not None and not wrapped:
            assembly.detecting(connection)
            self.layers.append(TlsLayer(self._tls))
            self._pieces = self._unwrap(head, 0)
        elif found == "gzip" and "gzip" not in wrapped:
            assembly.detecting(connection)
            self.layers.append(GzipLayer())
            # Pieces that are still to come from below pass through the new layer.
            inside = self._unwrap(head, len(self.layers) - 1)
            self._pieces = chain(inside, self._pieces or ())
        elif found in self._tcp.translators:
            connection.speak(found)
            connection.understand(head)
        else:
            connection.reject(found)

    # Down: from the outbox to the socket

    def wrap(self, data: Buffer) -> Buffer:
        for layer in reversed(self.layers):
            data = layer.send(data)
        return data

    def finish(self) -> bytes:
        """The layers' final bytes."""
        last = b""
        for layer in reversed(self.layers):
            # A peer that ended its TLS accepts no more data in it.
            last = (b"" if layer.ended else layer.send(last)) + layer.finish()
        return last
