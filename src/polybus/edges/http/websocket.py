"""msgstream over WebSocket: the `websockets` library handles frames, this module packs.

A connection gets each pack once. Text frames from the client are lists of ids that it confirms; a
binary frame ends the connection.

The library handles the handshake, control frames, fragments and errors. Packs and short
confirmations bypass it (sending), the latter only between two frames. The library does not report
frame boundaries, so `ends_between_frames` tracks them.
"""

from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State

from polybus.edges.http.sending import SHORT_BYTES_MAX, PackEncodings, PackSender, text_frame
from polybus.edges.http.state import HttpState
from polybus.edges.http.websocket_connection import WebSocketConnection
from polybus.errors import StorageError, UsageError
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import PATHS, SESSION_UNSET, parse_confirm_ids

_FIN = 0x80


class WebSocketPeer(PackSender, WebSocketConnection):
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
        self._begin_protocol(state, state.config.msgstream.websocket_message_bytes_max)
        self._text = bytearray()

    # The connection calls these

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

    def resume_writing(self) -> None:
        super().resume_writing()
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

    def _begin(self, key: str) -> None:
        session = self._state.inboxes.find(key)
        if session is None and self._state.context.cluster_table is not None:
            self._collecting = self._state.loop.create_task(self._begin_elsewhere(key))
        else:
            self._begin_with(session)

    async def _begin_elsewhere(self, key: str) -> None:
        """The session may be at another node of the cluster."""
        try:
            session = await self._state.inboxes.find_anywhere(key)
        except StorageError:
            self._collecting = None
            self.close(CloseCode.TRY_AGAIN_LATER, "the bus cannot reach the session")
            return
        self._collecting = None
        if self._ws.state is State.OPEN:
            self._begin_with(session)

    def _begin_with(self, session: Session | None) -> None:
        if session is None:
            self._end_unset()
            return
        accounts = self._state.accounts
        try:
            self._transport.count_for(accounts.of(session.account) or accounts.nobody)
        except UsageError as error:
            self.close(CloseCode.TRY_AGAIN_LATER, error.code)
            return
        self._session = session
        self._state.inboxes.attach(session, self)
        # In the next turn: until uvicorn has put this above the connection, it is not notified if
        # the peer does not read, and would send the whole backlog. The handshake is sent by then,
        # too.
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
        """As `wake`, if something must be read or saved first, or there is no room yet."""
        await self._memory.uncrowded()
        try:
            packs = await self._state.inboxes.collect(session, self._sent_to)
        except StorageError:
            self._collecting = None
            self.close(CloseCode.INTERNAL_ERROR, "the bus cannot save the session")
            return
        self._collected(session, packs)

    # Called by the inboxes

    def replaced(self) -> None:
        self._session = None
        if self._paused:
            # The newer connection gets the waiting packs too. A client that reconnects repeatedly
            # without reading would fill our memory.
            self._leave()
            self._transport.abort()
        else:
            self.close(CloseCode.NORMAL_CLOSURE, "")

    def ended(self) -> None:
        self._session = None
        self._end_unset()

    def _end_unset(self) -> None:
        if self._ws.state is State.OPEN:
            self._transport.write(text_frame(SESSION_UNSET))
        self.close(CloseCode.NORMAL_CLOSURE, "")

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
