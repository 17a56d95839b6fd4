"""WebSocket /v1/live: one connection of a page, with all its subscriptions.

Text frames are JSON. The client subscribes to channels under numbers of its choice, and gets
`{"id", "channel", "data"}` for each; `hub` has the channels. A client that does not
read gets nothing more until it does, and is disconnected when it has read nothing between two
pings. So a slow page costs the bus only its socket's buffer.
"""

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State

from polybus.edges.http.calls import Viewer
from polybus.edges.http.live.hub import ENDED, LiveHub, LiveSubscription, ended
from polybus.edges.http.logins import Caller, access_by
from polybus.edges.http.sending import text_frame
from polybus.edges.http.state import HttpState
from polybus.edges.http.websocket_connection import WebSocketConnection
from polybus.edges.tcp.transport import ReadInterceptor
from polybus.errors import PeerError, PolybusError, UsageError
from polybus.services.accounts.access import AccountAccess

PATH = "/v1/live"
REQUEST_BYTES_MAX = 16 << 10
LOGINS_MAX = 8


class LiveRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What a client sends."""

    op: str
    id: int = 0
    channel: str = ""
    topic: str = ""
    text: str = ""
    replay: str = ""
    token: str = ""
    user: str = ""
    password: str = ""


_requests = msgspec.json.Decoder(LiveRequest)


class LivePeer(ReadInterceptor, WebSocketConnection):
    """One WebSocket of /v1/live."""

    __slots__ = (
        "_caller",
        "_closing",
        "_hub",
        "_logging_in",
        "_login_timer",
        "_logins",
        "_paused",
        "_state",
        "_text",
        "_transport",
        "_waiting_bytes",
        "_ws",
        "awaits_pong",
        "subscriptions",
        "viewer",
    )

    def __init__(self, state: HttpState, hub: LiveHub, caller: Caller) -> None:
        self._begin_protocol(state, REQUEST_BYTES_MAX)
        self._hub = hub
        self._caller = caller
        self._text = b""
        self._logging_in: asyncio.Task[None] | None = None
        self._login_timer: asyncio.TimerHandle | None = None
        self._logins = 0
        self.viewer: Viewer | None = None
        self.subscriptions: dict[int, LiveSubscription] = {}

    # The connection calls these

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read."""
        return self._paused

    def data_received(self, data: bytes) -> None:
        self._ws.receive_data(data)
        for event in self._ws.events_received():
            if isinstance(event, Request):
                self._open(event)
                event.headers.clear()
            elif isinstance(event, Frame):
                self._on_frame(event)
        self._write_owed()

    # Opening

    def _open(self, request: Request) -> None:
        header = request.headers.get("Authorization")
        if self._state.stopping:
            self._answer(self._ws.reject(HTTPStatus.SERVICE_UNAVAILABLE, "The bus is stopping\n"))
            return
        self._answer(self._ws.accept(request))
        if self._ws.state is not State.OPEN:
            return
        self._write_owed()
        known = self._state.accounts.by_certificate(self._caller.certificate_name)
        known = known or self._state.accounts.without_login(self._caller.ip)
        if header is not None or self._caller.is_admin:
            self._log_in(header)
        elif known is not None:
            self._enter(known)
        if self.viewer is None:
            timeout_s = self._state.config.limits.login_timeout_s
            self._login_timer = self._state.loop.call_later(timeout_s, self._expect_login)

    def _enter(self, access: AccountAccess) -> None:
        """Use the account without a login, if that may have one more connection."""
        try:
            self._transport.count_for(access)
        except PolybusError as error:
            self.refuse(None, error.without_traceback())
            self.close(CloseCode.POLICY_VIOLATION, error.code)
        else:
            self.viewer = Viewer(self._state, access)

    def _expect_login(self) -> None:
        if self.viewer is None:
            timeout_s = self._state.config.limits.login_timeout_s
            text = f"no login came within {timeout_s:g} s (login-timeout-s)"
            self.refuse(None, UsageError("auth.needed", text))
            self.close(CloseCode.POLICY_VIOLATION, "auth.needed")

    # Reading

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self.awaits_pong = False
        elif frame.opcode is Opcode.BINARY:
            self.close(CloseCode.UNSUPPORTED_DATA, "text only")
        elif frame.opcode in (Opcode.TEXT, Opcode.CONT):
            self._text += frame.data
            if frame.fin:
                text, self._text = self._text, b""
                self._on_text(text)
        elif frame.opcode is Opcode.CLOSE:
            self._leave()

    def _on_text(self, text: bytes) -> None:
        try:
            text.decode()
            request = _requests.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.refuse(None, PeerError("live.invalid", str(error)[:200]))
            return
        try:
            self._do(request)
        except PolybusError as error:
            self.refuse(request.id, error)
            self._close_ended(error)

    def _do(self, request: LiveRequest) -> None:
        """Raises PolybusError."""
        if request.op == "login":
            self._log_in(None, request)
        elif request.op == "unsubscribe":
            self._end(request.id)
        elif request.op != "subscribe":
            text = f"op is {request.op[:40]!r}; it must be login, subscribe or unsubscribe"
            raise PeerError("live.invalid", text)
        elif self.viewer is None:
            raise UsageError("auth.needed", "a login is required; log in first")
        elif self.viewer.access.is_ended:
            raise ended()
        else:
            self._end(request.id)
            limit = self._state.config.http.live_subscriptions_max
            if len(self.subscriptions) >= limit:
                text = f"over {limit} subscriptions (http.live-subscriptions-max); end some first"
                raise UsageError("live.too-many", text)
            about = {"topic": request.topic, "text": request.text, "replay": request.replay}
            subscription = LiveSubscription(self, request.id, request.channel, about)
            self._hub.join(subscription, self.viewer)
            self.subscriptions[request.id] = subscription

    def _log_in(self, header: str | None, request: LiveRequest | None = None) -> None:
        self._logins += 1
        if self._logging_in is not None or self._logins > LOGINS_MAX:
            self.close(CloseCode.POLICY_VIOLATION, "too many logins")
            return
        self._logging_in = self._state.loop.create_task(self._logged_in(header, request))

    async def _logged_in(self, header: str | None, request: LiveRequest | None) -> None:
        accounts, address = self._state.accounts, self._caller.ip
        try:
            if request is None:
                access = await access_by(self._state, self._caller, header)
            elif request.token:
                is_admin = self._state.token.is_in(f"Bearer {request.token}")
                access = (
                    accounts.admin
                    if is_admin
                    else accounts.by_token(request.token)
                    or await accounts.log_in_by_token(request.token, address)
                )
            else:
                access = await accounts.log_in(request.user, request.password, address)
            self._transport.count_for(access)
        except PolybusError as error:
            self._logging_in = None
            self.refuse(None, error.without_traceback())
            return
        self._logging_in = None
        for number in list(self.subscriptions):
            self._end(number)
        self.viewer = Viewer(self._state, access)
        self.send(msgspec.json.encode({"op": "login", "account": access.account}))

    # Writing

    def send(self, json: bytes) -> None:
        """Send one text, unless the client does not read."""
        if self._ws.state is State.OPEN and not self._transport.is_closing():
            self._transport.write(text_frame(json))

    def refuse(self, number: int | None, error: PolybusError) -> None:
        """Report why a request, or the data of a subscription, is refused."""
        about: dict[str, Any] = {} if number is None else {"id": number}
        about["error"] = {"code": error.code, "detail": error.text}
        self.send(msgspec.json.encode(about))

    def drop(self, number: int, error: PolybusError) -> None:
        """End a subscription, and report why."""
        if number in self.subscriptions:
            self._end(number)
            self.refuse(number, error)
            self._close_ended(error)

    def _close_ended(self, error: PolybusError) -> None:
        """Close, as every protocol does, when the login has ended and all errors were sent."""
        if error.code == ENDED and not self.subscriptions:
            self.close(CloseCode.POLICY_VIOLATION, ENDED)

    def _end(self, number: int) -> None:
        subscription = self.subscriptions.pop(number, None)
        if subscription is not None:
            self._hub.leave(subscription)

    def _leave(self) -> None:
        if self._login_timer is not None:
            self._login_timer.cancel()
        if self._logging_in is not None:
            self._logging_in.cancel()
            self._logging_in = None
        for number in list(self.subscriptions):
            self._end(number)
        self.viewer = None
