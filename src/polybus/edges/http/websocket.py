"""msgstream over WebSocket: the `websockets` library handles frames, this module packs.

A connection gets each pack once. Text frames from the client are lists of ids that it confirms; a
binary frame ends the connection.

The library handles the handshake, control frames, fragments and errors. Packs and short
confirmations bypass it (sending), the latter only between two frames. The library does not report
that, so `ends_between_frames` tracks it.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import cast
from urllib.parse import parse_qs, urlsplit

from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from polybus.edges.http.sending import SHORT_BYTES_MAX, PackEncodings, PackSender, text_frame
from polybus.edges.http.state import HttpState
from polybus.edges.http.upper import Upper
from polybus.edges.tcp.outbox import Outbox
from polybus.errors import StorageError
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import PATHS, SESSION_UNSET, parse_confirm_ids

CLOSE_TIMEOUT_S = 2.0
_FIN = 0x80
# The bus counts and logs peers' errors itself, at a limited rate and without their URLs.
QUIET_LOGGER = logging.getLogger("polybus.http")
QUIET_LOGGER.setLevel(logging.CRITICAL)


class WebSocketTransport(asyncio.Transport):
    """What a WebSocket needs of its connection; see edge."""

    outbox: Outbox


class WebSocketPeer(PackSender, Upper):
    """One WebSocket and the session it is for. Implements contents.Receiver."""

    __slots__ = (
        "_closing",
        "_state",
        "_text",
        "_transport",
        "_waiting_bytes",
        "_ws",
        "awaits_pong",
    )

    def __init__(self, state: HttpState, frames: PackEncodings) -> None:
        super().__init__(state.inboxes, state.context.memory, frames)
        self._state = state
        self._ws = ServerProtocol(max_size=state.config.msgstream.websocket_message_bytes_max)
        self._ws.logger = QUIET_LOGGER
        self._transport: WebSocketTransport
        self._text = bytearray()
        self.awaits_pong = False
        self._waiting_bytes = 0
        self._closing: asyncio.TimerHandle | None = None

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

    def data_received(self, data: bytes) -> None:
        if self.take(data, 0, len(data)):
            return
        self._between_frames = self._between_frames and ends_between_frames(data)
        ws = self._ws
        ws.receive_data(data)
        for event in ws.events_received():
            if isinstance(event, Request):
                self._open(event)
                # The library's parser keeps the request as long as the connection.
                event.headers.clear()
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
            self._answer(ws.reject(HTTPStatus.NOT_FOUND, "Not found\n"))
        elif not key:
            text = "Missing parameter: sessionKey"
            self._answer(ws.reject(HTTPStatus.BAD_REQUEST, text))
        elif self._state.stopping:
            self._answer(ws.reject(HTTPStatus.SERVICE_UNAVAILABLE, "The bus is stopping\n"))
        else:
            self._answer(ws.accept(request))
            if ws.state is State.OPEN:
                self._write_owed()
                self._begin(key)

    def _answer(self, response: Response) -> None:
        response.headers.update(self._state.door.answer_headers)
        self._ws.send_response(response)

    def _begin(self, key: str) -> None:
        session = self._state.inboxes.find(key)
        if session is None:
            self._end_unset()
            return
        self._session = session
        self._state.inboxes.attach(session, self)
        # In the next turn: until uvicorn has put this above the connection, nobody notifies it that
        # the peer does not read, and it would send the whole backlog. The answer is out then, too.
        self._state.loop.call_soon(self._start)

    def _start(self) -> None:
        self._outbox = self._transport.outbox
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
        self._confirm(session, ids)

    def _fail(self, code: CloseCode, reason: str) -> None:
        self._ws.fail(code, reason)
        self._leave()
        self._write_owed()

    # Writing

    def _collect_later(self, session: Session) -> None:
        self._collecting = self._state.loop.create_task(self._collect(session))

    async def _collect(self, session: Session) -> None:
        """`wake`, when something must be read or saved first, or there is no room yet."""
        await self._memory.uncrowded()
        try:
            packs = await self._state.inboxes.collect(session, self._sent_to)
        except StorageError:
            self._collecting = None
            self._close(CloseCode.INTERNAL_ERROR, "the bus cannot save the session")
            return
        self._collected(session, packs)

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
        if self._paused:
            # What waits here goes to the newer connection too. A client that connects again and
            # again without reading would fill our memory.
            self._leave()
            self._transport.abort()
        else:
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
        if self._collecting is not None:
            self._collecting.cancel()
            # Its error refers to a frame that refers to this.
            self._collecting = None
        session, self._session = self._session, None
        if session is not None:
            self._state.inboxes.detach(session, self)


def ends_between_frames(data: bytes) -> bool:
    """Whether data that begins at a frame ends at one, outside of a fragmented message."""
    at = 0
    while at + 2 <= len(data):
        if not data[at] & _FIN:
            return False
        size = data[at + 1] & 0x7F
        at += 2
        if size > SHORT_BYTES_MAX:
            length_bytes = 2 if size == 126 else 8
            size = int.from_bytes(data[at : at + length_bytes], "big")
            at += length_bytes
        # The mask; a frame without one ends the connection.
        at += 4 + size
    return at == len(data)
