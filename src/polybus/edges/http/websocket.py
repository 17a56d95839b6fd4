"""msgstream over WebSocket: the `websockets` library handles frames, this module packs.

A connection gets each pack once. Text frames from the client are lists of ids that it confirms; a
binary frame ends the connection. The library parses incoming frames. Outgoing packs are framed
here, so that a thousand sessions that get the same pack under the same number share one buffer.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import cast
from urllib.parse import parse_qs, urlsplit

from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from polybus.edges.http.frames import ends_between_frames, short_text, text_frame
from polybus.edges.http.state import HttpState
from polybus.errors import StorageError
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import SESSION_UNSET, parse_confirm_ids

PATHS = ("/msgstream", "/msgstream/")
CLOSE_TIMEOUT_S = 2.0
# The bus counts and logs peers' errors itself, at a limited rate and without their URLs.
QUIET_LOGGER = logging.getLogger("polybus.http")
QUIET_LOGGER.setLevel(logging.CRITICAL)


class WebSocketPeer(asyncio.Protocol):
    """One WebSocket and the session it is for. Implements feeds.Receiver."""

    def __init__(self, state: HttpState) -> None:
        self._state = state
        self._inboxes = state.inboxes
        self._ws = ServerProtocol(max_size=state.config.msgstream.websocket_message_bytes_max)
        self._ws.logger = QUIET_LOGGER
        self._transport: asyncio.Transport
        self._session: Session | None = None
        self._sent_to = 0
        self._paused = False
        self._collecting: asyncio.Task[None] | None = None
        self._again = False
        self._text = bytearray()
        self._between_frames = False
        self.awaits_pong = False
        self._waiting_bytes = 0

    # The connection calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._state.websockets.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.websockets.discard(self)
        if self._collecting is not None:
            self._collecting.cancel()
        self._leave()

    def data_received(self, data: bytes) -> None:
        if self._between_frames and self._session is not None:
            # Nearly all incoming frames are confirmations of a few bytes.
            text = short_text(data)
            if text is not None:
                self._on_text(text)
                return
        self._between_frames = self._between_frames and ends_between_frames(data)
        ws = self._ws
        ws.receive_data(data)
        for event in ws.events_received():
            if isinstance(event, Request):
                self._open(event)
                self._between_frames = data.endswith(b"\r\n\r\n")
            elif isinstance(event, Frame):
                self._on_frame(event)
        self._write_owed()

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
        self.wake()

    # Opening

    def _open(self, request: Request) -> None:
        url = urlsplit(request.path)
        ws = self._ws
        # The first of repeated parameters counts, as for polls.
        key = parse_qs(url.query).get("sessionKey", [""])[0]
        if url.path not in PATHS:
            ws.send_response(ws.reject(HTTPStatus.NOT_FOUND, "Not found\n"))
        elif not key:
            text = "Missing parameter: sessionKey"
            ws.send_response(ws.reject(HTTPStatus.BAD_REQUEST, text))
        elif self._state.stopping:
            ws.send_response(ws.reject(HTTPStatus.SERVICE_UNAVAILABLE, "The bus is stopping\n"))
        else:
            ws.send_response(ws.accept(request))
            if ws.state is State.OPEN:
                self._write_owed()
                self._begin(key)

    def _begin(self, key: str) -> None:
        session = self._inboxes.find(key)
        if session is None:
            self._end_unset()
            return
        self._session = session
        self._inboxes.attach(session, self)
        self.wake()

    # Reading

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self.awaits_pong = False
        elif frame.opcode is Opcode.BINARY:
            self._fail(CloseCode.UNSUPPORTED_DATA, "text only")
        elif frame.opcode in (Opcode.TEXT, Opcode.CONT) and self._session is not None:
            self._text += frame.data
            if frame.fin:
                text, self._text = self._text, bytearray()
                self._on_text(text)
        elif frame.opcode is Opcode.CLOSE:
            self._leave()

    def _on_text(self, text: bytes | bytearray) -> None:
        session = self._session
        if session is None:
            return
        try:
            ids = parse_confirm_ids(text.decode())
        except UnicodeDecodeError:
            self._fail(CloseCode.INVALID_DATA, "not UTF-8")
            return
        self._inboxes.confirm(session, ids)
        if session.wants_catch_up() is not None:
            self.wake()

    def _fail(self, code: CloseCode, reason: str) -> None:
        self._ws.fail(code, reason)
        self._leave()
        self._write_owed()

    # Writing

    def wake(self) -> None:
        """Send the packs that this connection has not got yet."""
        session = self._session
        if session is None or self._paused:
            return
        if self._collecting is not None:
            self._again = True
            return
        while not self._paused:
            packs = self._inboxes.collect_now(session, self._sent_to)
            if packs is None:
                self._collecting = self._state.loop.create_task(self._collect(session))
                return
            if not packs:
                return
            self._send_packs(packs)
            if self._sent_to + 1 == session.next_id:
                return

    async def _collect(self, session: Session) -> None:
        """`wake`, when something must be read or saved first."""
        try:
            packs = await self._inboxes.collect(session, self._sent_to)
        except StorageError:
            self._collecting = None
            self._close(CloseCode.INTERNAL_ERROR, "the bus cannot save the session")
            return
        self._collecting = None
        if session is self._session:
            if packs:
                self._send_packs(packs)
            if packs or self._again:
                self._again = False
                self.wake()

    def _send_packs(self, packs: list[tuple[int, bytes]]) -> None:
        self._sent_to = max(self._sent_to, packs[-1][0])
        self._transport.write(self._state.frame(packs))

    def _write_owed(self) -> None:
        for data in self._ws.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._transport.close()
        if self._ws.close_expected():
            # Give the peer time to close first.
            self._state.loop.call_later(CLOSE_TIMEOUT_S, self._transport.close)

    def ping(self) -> None:
        """Check that the peer is alive; abort the connection of one that is not."""
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

    # Called by the inboxes

    def replaced(self) -> None:
        self._session = None
        self._close(CloseCode.NORMAL_CLOSURE, "")

    def ended(self) -> None:
        self._session = None
        self._end_unset()

    def shut_down(self) -> None:
        self._leave()
        self._close(CloseCode.GOING_AWAY, "")

    def _end_unset(self) -> None:
        if self._ws.state is State.OPEN:
            self._transport.write(text_frame(SESSION_UNSET))
        self._close(CloseCode.NORMAL_CLOSURE, "")

    def _close(self, code: CloseCode, reason: str) -> None:
        self._leave()
        if self._ws.state is State.OPEN:
            try:
                self._ws.send_close(code, reason)
            except ProtocolError:  # pragma: no cover - a close in the middle of fragments
                self._transport.close()
            self._write_owed()

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._inboxes.detach(session, self)
