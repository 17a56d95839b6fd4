"""What every WebSocket of the bus does: handshake, pings, waiting for peers that do not read, end.

The `websockets` library handles frames; its subclasses here decide what they mean.
"""

# The slots are in the subclasses: two bases with slots of their own cannot be combined.
# mypy: disable-error-code="misc"

import asyncio
import logging
from typing import cast

from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from polybus.edges.http.state import HttpState
from polybus.edges.http.upper_layer import UpperLayer
from polybus.edges.tcp.outbox import Outbox
from polybus.services.accounts.access import AccountAccess

CLOSE_TIMEOUT_S = 2.0
# The bus counts and logs peers' errors itself, at a limited rate and without their URLs.
QUIET_LOGGER = logging.getLogger("polybus.http")
QUIET_LOGGER.setLevel(logging.CRITICAL)


class WebSocketTransport(asyncio.Transport):
    """What a WebSocket needs of its connection; see edge."""

    outbox: Outbox

    def count_for(self, access: AccountAccess) -> None:
        raise NotImplementedError


class WebSocketConnection(UpperLayer):
    """A WebSocket above a connection. Subclasses have the slots, and say how they leave."""

    __slots__ = ()
    _state: HttpState
    _ws: ServerProtocol
    _transport: WebSocketTransport
    _closing: asyncio.TimerHandle | None
    _waiting_bytes: int
    _paused: bool
    awaits_pong: bool

    def _begin_protocol(self, state: HttpState, bytes_max: int) -> None:
        self._state = state
        self._ws = ServerProtocol(max_size=bytes_max)
        self._ws.logger = QUIET_LOGGER
        self._closing = None
        self._waiting_bytes = 0
        self._paused = self.awaits_pong = False

    def _leave(self) -> None:
        """Give up what the connection was for."""
        raise NotImplementedError

    # The connection calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(WebSocketTransport, transport)
        self._state.websockets.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.websockets.discard(self)
        if self._closing is not None:
            self._closing.cancel()
        self._leave()

    def let_go(self) -> None:
        # The library's parser is a generator that refers to its protocol, and so do errors.
        self._ws.parser.close()
        for error in (self._ws.parser_exc, self._ws.handshake_exc):
            if error is not None:
                error.__traceback__ = error.__context__ = error.__cause__ = None

    def eof_received(self) -> None:
        self._transport.close()

    def pause_writing(self) -> None:
        self._paused = True
        # A peer that pings and does not read the pongs would fill our memory.
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._transport.resume_reading()
        # It has read something, so it is alive.
        self.awaits_pong = False
        self._waiting_bytes = 0

    # Writing

    def _answer(self, response: Response) -> None:
        response.headers.update(self._state.origin_check.answer_headers)
        self._ws.send_response(response)

    def _write_owed(self) -> None:
        for data in self._ws.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._transport.close()
        if self._closing is not None or self._transport.is_closing():
            return
        if self._ws.close_expected():
            # Give the peer time to close first.
            self._closing = self._state.loop.call_later(CLOSE_TIMEOUT_S, self._transport.close)

    def ping(self) -> None:
        """Check that the peer is alive and reads; abort the connection of one that does not."""
        if self._ws.state is not State.OPEN:
            return
        if self._paused:
            # A ping would wait behind other bytes. On a slow line that takes long.
            before_bytes = self._waiting_bytes
            self._waiting_bytes = self._transport.get_write_buffer_size()
            if self._waiting_bytes == before_bytes:
                self._transport.abort()
            return
        if self.awaits_pong:
            self._transport.abort()
            return
        self.awaits_pong = True
        self._ws.send_ping(b"")
        self._write_owed()

    def close(self, code: CloseCode, reason: str) -> None:
        self._leave()
        if self._ws.state is State.OPEN:
            try:
                self._ws.send_close(code, reason)
            except ProtocolError:  # pragma: no cover - a close in the middle of fragments
                self._transport.close()
            self._write_owed()

    def shut_down(self) -> None:
        self.close(CloseCode.GOING_AWAY, "")
