"""HTTP on the shared port: uvicorn's protocol above one of the bus's own connections.

The connection stays in charge of the socket, of TLS and of the limits that all protocols share. To
it this looks like any translator; to uvicorn it looks like a transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from polybus.batch import Buffer
from polybus.config import Connector
from polybus.edges.outbox import Outbox
from polybus.errors import PeerError

if TYPE_CHECKING:
    from polybus.edges.connection import Connection
    from polybus.edges.server import Server

READING_GATE = "http"


class HttpOutbox(Outbox):
    """Passes a slow peer's backpressure on to whoever writes the answer."""

    __slots__ = ("_http",)

    def __init__(self, before: Outbox, http: HttpTranslator, server: Server) -> None:
        super().__init__(server.outboxes, http.write, lambda lost: None)
        self._http = http

    def pause(self, *args: Any, **named: Any) -> None:
        super().pause(*args, **named)
        self._http.upper.pause_writing()

    def resume(self) -> None:
        super().resume()
        if not self.closed:
            self._http.upper.resume_writing()


class HttpTranslator:
    """One HTTP peer. Stands in for a translator and its codec."""

    protocol: ClassVar[str] = "http"
    takes_own = True
    backlog = False
    unfinished_bytes = 0

    def __init__(self, server: Server, connection: Connection, connector: Connector) -> None:
        self.server = server
        self.connection = connection
        self.codec = self
        self._lost = False
        assert server.http is not None
        self.upper: asyncio.Protocol = server.http.protocol(self)
        connection.outbox = HttpOutbox(connection.outbox, self, server)
        self.upper.connection_made(cast(asyncio.Transport, self))

    # The connection calls these

    def receive(self, data: Buffer) -> Sequence[Any]:
        if data:
            self.upper.data_received(bytes(data))
        return ()

    def handle(self, event: Any) -> None:
        raise AssertionError("HTTP has no events")

    def take_carry(self) -> bytes:
        return b""

    def close_input(self) -> None:
        """The peer sends no more."""

    def bad(self, error: PeerError) -> None:
        """The connection is given up: too slow, or a broken layer."""
        self.server.bad_peers.note(self.connection.name, self.protocol, error.code, error.text)
        refuse = getattr(self.upper, "refuse", None)
        if refuse is not None:
            refuse(408, error.code, error.text)

    def leave_all(self) -> None:
        """The connection is lost, or about to be."""
        if not self._lost:
            self._lost = True
            self.upper.connection_lost(None)

    # uvicorn, and the WebSocket, call these as on an asyncio transport

    def write(self, data: Buffer) -> None:
        if len(data) and not self.connection.is_closing():
            self.connection.write_now(data)

    def writelines(self, pieces: Sequence[Buffer]) -> None:
        self.write(b"".join(pieces))

    def close(self) -> Sequence[Any]:
        """Close the connection. (As a codec: the peer ended its stream, and nothing is owed.)"""
        self.connection.close()
        return ()

    def abort(self) -> None:
        self.connection.abort()

    def is_closing(self) -> bool:
        return self.connection.is_closing()

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
