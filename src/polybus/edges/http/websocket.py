"""msgstream over WebSocket: the `websockets` library handles frames, this module packs.

A connection gets each pack once. Text frames from the client are lists of ids that it confirms; a
binary frame ends the connection.

The library handles the handshake, control frames, fragments and errors. Outgoing packs are framed
here, so that a thousand sessions that get the same pack under the same number share one buffer.
Short incoming confirmations are read here too: a frame may bypass the library only between two
frames. The library does not report that, so `ends_between_frames` tracks it.
"""

import asyncio
import logging
import struct
from http import HTTPStatus
from typing import cast
from urllib.parse import parse_qs, urlsplit

from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from polybus.edges.http.polls import PATHS
from polybus.edges.http.state import HttpState
from polybus.edges.http.upper import Upper
from polybus.errors import StorageError
from polybus.services.sessions.inboxes import Packs
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import SESSION_UNSET, encode_packs, parse_confirm_ids

CLOSE_TIMEOUT_S = 2.0
_TEXT = 0x81
_FIN = 0x80
_MASKED = 0x80
_SHORT_BYTES_MAX = 125
_SHORT_HEAD_BYTES = 6
# The bus counts and logs peers' errors itself, at a limited rate and without their URLs.
QUIET_LOGGER = logging.getLogger("polybus.http")
QUIET_LOGGER.setLevel(logging.CRITICAL)


class Frames:
    """The frames of this loop turn, by their packs.

    A thousand sessions that get the same packs under the same numbers share one buffer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # The packs are kept, so that their ids stay valid.
        self._frames: dict[tuple[int, ...], tuple[bytes, Packs]] = {}

    def get(self, packs: Packs) -> bytes:
        first, json = packs[0]
        if len(packs) == 1:
            key: tuple[int, ...] = (first, id(json))
        elif packs[-1][0] - first == len(packs) - 1:
            key = (first, *(id(json) for _, json in packs))
        else:
            # With a gap in the numbers, the first does not determine the others.
            return text_frame(encode_packs(packs))
        found = self._frames.get(key)
        if found is None:
            if not self._frames:
                self._loop.call_soon(self._frames.clear)
            found = self._frames[key] = (text_frame(encode_packs(packs)), packs)
        return found[0]


class WebSocketPeer(Upper):
    """One WebSocket and the session it is for. Implements feeds.Receiver."""

    def __init__(self, state: HttpState, frames: Frames) -> None:
        self._state = state
        self._frames = frames
        self._inboxes = state.inboxes
        self._memory = state.context.memory
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
        self._closing: asyncio.TimerHandle | None = None

    # The connection calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
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
        # In the next turn: until uvicorn has put this above the connection, nobody notifies it that
        # the peer does not read, and it would send the whole backlog.
        self._state.loop.call_soon(self.wake)

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
            packs = None
            if not self._memory.is_crowded():
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
        """`wake`, when something must be read or saved first, or there is no room yet."""
        await self._memory.uncrowded()
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

    def _send_packs(self, packs: Packs) -> None:
        self._sent_to = max(self._sent_to, packs[-1][0])
        self._transport.write(self._frames.get(packs))

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
            self._inboxes.detach(session, self)


def text_frame(text: bytes) -> bytes:
    """An unfragmented, unmasked text frame."""
    size = len(text)
    if size <= _SHORT_BYTES_MAX:
        return b"\x81%c%b" % (size, text)
    if size < 1 << 16:
        return b"\x81\x7e" + struct.pack("!H", size) + text
    return b"\x81\x7f" + struct.pack("!Q", size) + text


def short_text(data: bytes) -> bytes | None:
    """The text, if the data is exactly one short text frame."""
    size = len(data) - _SHORT_HEAD_BYTES
    if not 0 < size <= _SHORT_BYTES_MAX or data[0] != _TEXT or data[1] != _MASKED | size:
        return None
    mask = (data[2:6] * (size // 4 + 1))[:size]
    plain = int.from_bytes(data[6:], "little") ^ int.from_bytes(mask, "little")
    return plain.to_bytes(size, "little")


def ends_between_frames(data: bytes) -> bool:
    """Whether data that begins at a frame ends at one, outside of a fragmented message."""
    at = 0
    while at + 2 <= len(data):
        if not data[at] & _FIN:
            return False
        size = data[at + 1] & 0x7F
        at += 2
        if size > _SHORT_BYTES_MAX:
            length_bytes = 2 if size == 126 else 8
            size = int.from_bytes(data[at : at + length_bytes], "big")
            at += length_bytes
        # The mask; a frame without one ends the connection.
        at += 4 + size
    return at == len(data)
