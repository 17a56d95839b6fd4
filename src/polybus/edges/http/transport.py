"""HTTP on the shared port: uvicorn's protocol above one of the bus's own connections.

The connection keeps the socket, TLS and the limits that all protocols share. To the connection this
is a translator; to uvicorn it is a transport.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from polybus.batch import Batch, Buffer
from polybus.edges.edge import Edge
from polybus.edges.protocols.translator import Translator
from polybus.edges.tcp.connection import Connection
from polybus.edges.tcp.outbox import Outbox

READING_GATE = "http"


class HttpOutbox(Outbox):
    """Passes a slow peer's backpressure on to the writer of the answer.

    An answer is written whole, and counts as waiting while the transport holds it. When memory is
    short, a peer that does not read is disconnected; a session keeps what is not confirmed.
    """

    __slots__ = ("_http",)

    def __init__(self, http: "HttpTranslator") -> None:
        connection = http.connection
        super().__init__(connection.outboxes, connection.write_now, lambda lost: self._let_go())
        self._http = http

    def put(self, data: Buffer) -> None:
        """Write at once: the caller stops while it is paused."""
        if self.paused or self.closed:
            self._write(data)
        else:
            self._put(data)

    def _let_go(self) -> None:
        # Close at once, so that its memory counts as free.
        self.close()
        self._http.abort()

    def pause(self) -> None:
        super().pause()
        self._http.upper.pause_writing()

    def resume(self) -> None:
        super().resume()
        if not self.closed:
            self._http.upper.resume_writing()


class HttpCodec:
    """Hands bytes to uvicorn's parser; it returns no events."""

    backlog = False
    unfinished_bytes = 0

    def __init__(self, http: "HttpTranslator") -> None:
        self._http = http

    def receive(self, data: Buffer) -> list[Any]:
        if data:
            self._http.upper.data_received(bytes(data))
        return []

    def encode(self, batch: Batch) -> Buffer:
        raise AssertionError("HTTP carries messages in answers")

    def take_carry(self) -> bytes:
        return b""

    def close(self) -> list[Any]:
        return []


class HttpTranslator(Translator):
    """One HTTP peer: a translator below, a transport above."""

    protocol: ClassVar[str] = "http"

    def __init__(self, edge: Edge, connection: Connection, upper: asyncio.Protocol) -> None:
        super().__init__(edge, connection)
        self.connection = connection
        self.codec = HttpCodec(self)
        self._lost = False
        self.upper = upper
        self._outbox = connection.outbox = HttpOutbox(self)
        self.upper.connection_made(cast(asyncio.Transport, self))

    # The connection calls these

    def send_error(self, code: str, text: str) -> None:
        """The connection is closing: the peer was too slow, or a layer failed."""
        refuse = getattr(self.upper, "refuse", None)
        if refuse is not None:
            refuse(408, code, text)

    def leave_all(self) -> None:
        """The connection is lost."""
        if not self._lost:
            self._lost = True
            self.upper.connection_lost(None)

    # uvicorn, and the WebSocket, call these as on an asyncio transport

    def write(self, data: Buffer) -> None:
        if len(data) and not self.connection.is_closing():
            self._outbox.put(data)

    def writelines(self, pieces: Sequence[Buffer]) -> None:
        self.write(b"".join(pieces))

    def close(self) -> None:
        self.connection.close()

    def abort(self) -> None:
        self.connection.abort()

    def is_closing(self) -> bool:
        return self.connection.is_closing()

    def get_write_buffer_size(self) -> int:
        return self.connection.transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self.connection.hold(READING_GATE)

    def resume_reading(self) -> None:
        self.connection.release(READING_GATE)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return self.connection.tls or default
        return self.connection.transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        self.upper = protocol
