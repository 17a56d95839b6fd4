"""What is between a connection's socket and its protocol: detection, and the layers TLS and gzip.

The first bytes tell what a peer speaks. That is a protocol, or a layer with bytes inside that tell
it again: gzip inside TLS is two layers. Once a protocol is known and nothing is around it, the
connection does without all of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING

from polybus.batch import Buffer
from polybus.edges.http.transport import HttpTranslator
from polybus.edges.protocols.boson_frames import BosonFramesTranslator
from polybus.edges.protocols.boson_properties import BosonPropertiesTranslator
from polybus.edges.protocols.goms import GomsTranslator
from polybus.edges.protocols.queue import QueueTranslator
from polybus.edges.tcp.layers import GzipLayer, Layer, TlsLayer
from polybus.errors import PeerError
from polybus.wire.detect import detect

if TYPE_CHECKING:
    from polybus.edges.tcp.connection import Connection
    from polybus.edges.tcp.listener import Listener

READ_S_MAX = 0.025
"""How long one connection may keep the loop from the others."""
LAYERS_GATE = "layers"

TRANSLATORS = {
    "boson-frames": BosonFramesTranslator,
    "boson-properties": BosonPropertiesTranslator,
    "goms": GomsTranslator,
    "http": HttpTranslator,
    "queue": QueueTranslator,
}
# What a connector may speak alone, before its peer has said anything.
UNDETECTED = ("goms", "queue")


class Wrapping:
    """The layers around one connection's protocol, and the bytes that do not show it yet."""

    __slots__ = ("_connection", "_head", "_listener", "_pieces", "layers")

    def __init__(self, connection: Connection, listener: Listener) -> None:
        self._connection = connection
        self._listener = listener
        # The lowest first.
        self.layers: list[Layer] = []
        # What the layers have not given yet of the bytes at hand.
        self._pieces: Iterator[bytes] | None = None
        self._head = b""

    # Up: from the socket to the codec

    def receive(self, data: Buffer) -> None:
        """Hand on what the bytes mean. Raises PeerError, always final."""
        if self.layers:
            self._pieces = self._unwrap(data, 0)
        else:
            self._connection.understand(data)
        if self._pieces is not None:
            self._pull()

    def _unwrap(self, data: Buffer, level: int) -> Iterator[bytes]:
        """What bytes mean above the layers, from `level` on."""
        for plain in self.layers[level].receive(data):
            if level + 1 < len(self.layers):
                yield from self._unwrap(plain, level + 1)
            else:
                yield plain

    def _pull(self) -> None:
        """Hand on what the layers give, as long as nobody has to wait.

        A little gzip may be a lot of messages: between two pieces all that stops reading counts,
        and after a moment it is the others' turn.
        """
        connection = self._connection
        began = perf_counter()
        while self._pieces is not None and not connection.is_closing():
            if connection.is_held_besides(LAYERS_GATE):
                # Whoever holds us back lets us go on here.
                connection.hold(LAYERS_GATE)
                break
            if perf_counter() - began > READ_S_MAX:
                connection.hold(LAYERS_GATE)
                self._listener.server.loop.call_soon(self.go_on)
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
        """Nobody else holds the connection any more: hand on what is left."""
        if self._pieces is None or self._connection.is_closing():
            return
        try:
            self._pull()
        except PeerError as error:
            self._connection.answer_last(error)

    def detect(self, data: Buffer) -> None:
        """Bytes of a protocol that is not known: hand them on as soon as they show it."""
        connection, listener = self._connection, self._listener
        self._head += data
        limit = listener.server.config.limits.message_bytes_max
        wrapped = {layer.name for layer in self.layers}
        speaks = listener.protocols
        if "gzip" in wrapped:
            speaks = tuple(one for one in speaks if one.startswith("boson"))
        found = detect(self._head, speaks, limit)
        assembly = listener.server.assembly
        if found is None:
            if len(self._head) == len(data):
                assembly.detecting(connection)
            return
        head, self._head = self._head, b""
        if found == "tls" and listener.tls is not None and not wrapped:
            assembly.detecting(connection)
            self.layers.append(TlsLayer(listener.tls))
            self._pieces = self._unwrap(head, 0)
        elif found == "gzip" and "gzip" not in wrapped:
            assembly.detecting(connection)
            self.layers.append(GzipLayer())
            # The pieces that are still to come from below go through the new layer by themselves.
            inside = self._unwrap(head, len(self.layers) - 1)
            self._pieces = chain(inside, self._pieces or ())
        elif found in TRANSLATORS:
            connection.speak(found)
            connection.understand(head)
        else:
            listener.reject(connection, found)

    # Down: from the outbox to the socket

    def wrap(self, data: Buffer) -> Buffer:
        for layer in reversed(self.layers):
            data = layer.send(data)
        return data

    def finish(self) -> bytes:
        """The layers' last words."""
        last = b""
        for layer in reversed(self.layers):
            # A peer that ended its TLS takes no more data in it.
            last = (b"" if layer.ended else layer.send(last)) + layer.finish()
        return last
