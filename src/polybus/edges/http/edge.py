"""HTTP on the shared port: uvicorn and Starlette in the bus's own loop, on its own connections.

The connection keeps the socket, TLS and the limits that all protocols share. `HttpTranslator` is a
translator to the connection and a transport to uvicorn's protocol, which gets the bus's limits on
heads, bodies, pipelines and their time here.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from polybus.batch import Buffer
from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.edges.http.app import make_app
from polybus.edges.http.calls import problem
from polybus.edges.http.live.hub import LiveHub
from polybus.edges.http.live.page import PATH as LIVE_PATH
from polybus.edges.http.live.page import LivePeer
from polybus.edges.http.logins import Caller
from polybus.edges.http.metrics.otlp import OtlpExport
from polybus.edges.http.origin_check import RequestHead
from polybus.edges.http.routes import CHANNELS
from polybus.edges.http.sending import PackEncodings, packs_frame
from polybus.edges.http.state import HttpState
from polybus.edges.http.upper_layer import UpperLayer
from polybus.edges.http.uvicorn_parts import LazyFlowControl, ListPipeline
from polybus.edges.http.websocket import WebSocketPeer
from polybus.edges.protocols.peer import DroppedMessages
from polybus.edges.protocols.translator import Translator
from polybus.edges.tcp.connection import Connection
from polybus.edges.tcp.outbox import Outbox
from polybus.services.accounts.access import AccountAccess

DRAIN_S = 3.0
PIPELINE_MAX = 100
JOINED_BYTES_MAX = 64 << 10
"""Up to this size a body is copied after its head."""
HEAD_TOO_LARGE = "the headers are too large (head-bytes-max)"
READING_GATE = "http"
HTTP_VERSIONS = ("1.0", "1.1")

OverflowCall = Callable[[DroppedMessages], None]


class ParserStopped(Exception):
    """Stops the parser; `HttpProtocol.refusal` says why."""


class BodyUse:
    """How the application uses the body of a request.

    It sets `is_streamed` if it passes the bytes on as they arrive, and keeps none of them.
    """

    __slots__ = ("is_streamed",)

    def __init__(self) -> None:
        self.is_streamed = False


class HttpProtocol(HttpToolsProtocol, UpperLayer):
    """One connection's requests. A request that exceeds a limit is answered, then closed."""

    # Beyond 30 attributes an object has a table of its own for their names, of 1.5 KiB.
    __slots__ = (
        "_assembly",
        "_bad_peers",
        "_body",
        "_body_bytes",
        "_connection",
        "_origin_check",
        "_first_head_s",
        "_head_bytes",
        "_head_bytes_max",
        "_in_head",
        "_when_lost",
        "refusal",
    )

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        state: HttpState,
        connection: Connection,
    ) -> None:
        self._when_lost: list[Callable[[], None]] = []
        self._body = BodyUse()
        # Requests have it as their `state`.
        shared = {
            "is_admin": connection.is_admin,
            "ip": connection.ip,
            "certificate_name": connection.certificate_name,
            "when_lost": self._when_lost,
            "count_for": connection.count_for,
            "body": self._body,
        }
        super().__init__(config=config, server_state=server_state, app_state=shared)
        self.pipeline = ListPipeline()  # type: ignore[assignment]
        self._bad_peers = state.bad_peers
        self._origin_check = state.origin_check
        self._head_bytes_max = state.config.http.head_bytes_max
        self._connection = connection
        self._assembly = connection.tcp.assembly
        self._head_bytes = 0
        self._body_bytes = 0
        self._in_head = False
        # The first head began with the bytes that showed the protocol.
        self._first_head_s = self._assembly.deadline_s(connection)
        self.refusal = (400, "http.invalid", "this is not an HTTP request")

    # The parser calls these

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._assembly.detecting(self._connection, no_later_s=self._first_head_s)
        self._first_head_s = math.inf
        if len(self.pipeline) > PIPELINE_MAX:
            self._stop(503, "http.too-many-requests", f"over {PIPELINE_MAX} requests at once")

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > self._head_bytes_max:
            self._stop(414, "http.url-too-long", "the URL is too long (head-bytes-max)")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._head_bytes_max:
            self._stop(431, "http.head-too-large", HEAD_TOO_LARGE)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if version not in HTTP_VERSIONS:
            self._stop(505, "http.invalid", f"HTTP/{version} is not supported; use HTTP/1.1")
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            self._stop(400, "http.invalid", "a request must have exactly one Host header")
        if not self._connection.is_admin:
            self._check_origin(hosts[0] if hosts else None)
        self._in_head = False
        # Expect a body. Without one the message is complete at once.
        self._body_bytes = 1
        self._body.is_streamed = False
        self._assembly.update(self._connection, 0, self._body_bytes, completed=True)
        super().on_headers_complete()

    def _check_origin(self, host: bytes | None) -> None:
        local_ip = self.server[0] if self.server else ""
        head = RequestHead(
            method=self.parser.get_method(),
            url=self.url,
            headers=self.headers,
            host=host,
            scheme=self.scheme or "http",
            local_ip=local_ip,
            upgrades=self.parser.should_upgrade(),
        )
        refusal = self._origin_check.refusal(head)
        if refusal is not None:
            self._stop(*refusal)

    def on_body(self, body: bytes) -> None:
        if self._body.is_streamed:
            if self._body_bytes > 1:
                self._assembly.update(self._connection, self._body_bytes, 1, completed=True)
                self._body_bytes = 1
            self._assembly.progressed(self._connection, len(body))
            super().on_body(body)
            return
        before, self._body_bytes = self._body_bytes, self._body_bytes + len(body)
        self._assembly.update(self._connection, before, self._body_bytes, completed=False)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._forget_body()
        super().on_message_complete()
        self._forget_request()

    # uvicorn calls this

    def handle_websocket_upgrade(self) -> None:
        # The factory of WebSockets gets this.
        self.app_state["path"] = self.url.partition(b"?")[0].decode("latin-1")
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._forget_request()

    # The connection calls these

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = LazyFlowControl(transport)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head_bytes + len(data) > 2 * self._head_bytes_max:
            # The parser does not report an unfinished head.
            if len(self.url) > self._head_bytes_max // 2:
                self.refuse(414, "http.url-too-long", "the URL is too long (head-bytes-max)")
            else:
                self.refuse(431, "http.head-too-large", HEAD_TOO_LARGE)
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_body()
        super().connection_lost(exc)
        for call in self._when_lost:
            call()

    def let_go(self) -> None:
        self._unset_keepalive_if_required()
        # uvicorn's own attributes that refer back to this.
        self.parser = self.cycle = None  # type: ignore[assignment]
        self.pipeline.clear()

    def _forget_request(self) -> None:
        """Drop a request when it and its answer are complete: most connections are idle."""
        if self.cycle is not None and self.cycle.response_complete and not self.cycle.more_body:
            self.scope = self.headers = self.cycle = None  # type: ignore[assignment]

    def _forget_body(self) -> None:
        before, self._body_bytes = self._body_bytes, 0
        self._assembly.update(self._connection, before, 0, completed=True)

    # Refusing

    def _stop(self, status: int, code: str, text: str) -> None:
        self.refusal = (status, code, text)
        raise ParserStopped

    def send_400_response(self, msg: str) -> None:
        status, code, text = self.refusal
        self._bad_peers.record(self._connection.name, "http", code, text)
        self.refuse(status, code, text)

    def refuse(self, status: int, code: str, text: str) -> None:
        """Answer with a problem, unless an answer has begun, and close."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = bytes(problem(status, code, text).body)
            always = [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/problem+json\r\nconnection: close\r\n"
                b"content-length: %d\r\n%b\r\n%b"
                % (status, HTTPStatus(status).phrase.encode(), len(body), b"".join(always), body)
            )
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore, as uvicorn does, an upgrade to anything but WebSocket."""


class HttpOutbox(Outbox):
    """Passes a slow peer's backpressure on to the writer of the answer.

    An answer is written whole, and counts as waiting while the transport holds it. When memory is
    short, a peer that does not read is disconnected; a session keeps what is not confirmed.
    """

    __slots__ = ("_codec",)

    def __init__(
        self, connection: Connection, codec: "HttpCodec", on_overflow: OverflowCall
    ) -> None:
        super().__init__(connection.tcp.outboxes, connection.write_now, on_overflow)
        self._codec = codec

    def pause(self) -> None:
        super().pause()
        self._codec.upper.pause_writing()

    def resume(self) -> None:
        super().resume()
        if not self.closed:
            self._codec.upper.resume_writing()


class HttpCodec:
    """Passes bytes to the layer above, uvicorn's protocol or a WebSocket; it returns no events."""

    backlog = False
    is_held = False
    unfinished_bytes = 0

    def __init__(self, upper: UpperLayer) -> None:
        self.upper = upper

    def receive(self, data: Buffer) -> list[Any]:
        if data:
            self.upper.data_received(bytes(data))
        return []

    def take_carry(self) -> bytes:
        return b""

    def close(self) -> list[Any]:
        return []


class HttpTranslator(Translator):
    """One HTTP peer: a translator below, a transport above."""

    protocol: ClassVar[str] = "http"
    codec: HttpCodec

    def __init__(self, edge: Edge, connection: Connection, upper: UpperLayer) -> None:
        super().__init__(edge, connection)
        self.connection = connection
        self.codec = HttpCodec(upper)
        self._lost = False
        # The account that the connection counts for: that of its last request.
        self._counted = self.access
        # The head of an answer, until its body comes or the turn ends.
        self._head = b""
        self.outbox = HttpOutbox(connection, self.codec, self._on_overflow)
        connection.outbox = self.outbox
        upper.connection_made(cast(asyncio.Transport, self))

    # The connection calls these

    @property
    def is_known(self) -> bool:
        """True: each request authenticates its sender."""
        return True

    def enter_by_certificate(self) -> None:
        """Ignored: each request checks the certificate."""

    def count_for(self, access: AccountAccess) -> None:
        """Count the connection for the account of a request. Raises UsageError as `enter`."""
        if access.account != self._counted.account:
            self.edge.accounts.join(access)
            self._uncount()
            self._counted = access

    def _uncount(self) -> None:
        if self._counted is not self.access:
            self.edge.accounts.leave(self._counted)
            self._counted = self.access

    def send_error(self, code: str, text: str) -> None:
        """The connection is closing: the peer was too slow, a layer failed, or TLS is required."""
        refuse = getattr(self.codec.upper, "refuse", None)
        if refuse is not None:
            refuse(403 if code == "tls.required" else 408, code, text)

    def leave_all(self) -> None:
        """The connection is lost."""
        if not self._lost:
            self._lost = True
            self.codec.upper.connection_lost(None)

    def let_go(self) -> None:
        self._uncount()
        upper, self.codec.upper = self.codec.upper, UpperLayer()
        upper.let_go()

    def _on_overflow(self, lost: DroppedMessages) -> None:
        # Close at once, so that its memory counts as free.
        self.outbox.close()
        self.abort()

    # uvicorn, and the WebSocket, call these as on an asyncio transport

    def write(self, data: Buffer) -> None:
        if self.connection.is_closing():
            return
        if self._head:
            head, self._head = self._head, b""
            if len(data) > JOINED_BYTES_MAX:
                self.outbox.put(head)
            else:
                data = head + data
        elif data[:5] == b"HTTP/":
            # Its body follows in the same turn: one write is half the work of two.
            self._head = bytes(data)
            self.edge.context.loop.call_soon(self._write_head)
            return
        if len(data):
            self.outbox.put(data)

    def _write_head(self) -> None:
        if self._head:
            self.write(b"")

    def writelines(self, pieces: Sequence[Buffer]) -> None:
        self.write(b"".join(pieces))

    def close(self) -> None:
        self._write_head()
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

    def set_protocol(self, protocol: WebSocketPeer | LivePeer) -> None:
        upper, self.codec.upper = self.codec.upper, protocol
        upper.let_go()
        self.connection.intercept_reads(protocol)
        if self._lost:
            # It refused the handshake and closed the connection while another layer was above.
            protocol.connection_lost(None)
        elif self.outbox.paused:
            protocol.pause_writing()


class HttpEdge:
    """Everything HTTP of one bus."""

    def __init__(self, state: HttpState) -> None:
        self._state = state
        always = [
            (name.encode(), value.encode()) for name, value in state.origin_check.answer_headers
        ]
        self._uvicorn_state = ServerState()
        self._uvicorn_state.default_headers = always
        self._uvicorn_config = uvicorn.Config(
            make_app(state),
            log_config=None,
            access_log=False,
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            http=HttpProtocol,
            ws="none",
            timeout_keep_alive=int(state.config.http.keep_alive_s) or 1,
        )
        self._uvicorn_config.load()
        self._uvicorn_config.ws_protocol_class = self._websocket  # type: ignore[assignment]
        # The bus counts and logs peers' errors itself, at a limited rate and without their URLs.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        logging.getLogger("uvicorn.access").disabled = True
        self._live = LiveHub(state, CHANNELS)
        self._otlp = OtlpExport(state)
        self._frames = PackEncodings(state.loop, packs_frame)
        self._pings: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._state.figures.start()
        self._otlp.start()
        self._ping_later()

    def _ping_later(self) -> None:
        interval_s = self._state.config.msgstream.ping_interval_s
        self._pings = self._state.loop.call_later(interval_s, self._ping_all)

    async def stop(self) -> None:
        """Release clients as msgstream specifies; finish begun answers."""
        state = self._state
        state.stopping = True
        if self._pings is not None:
            self._pings.cancel()
        state.figures.stop()
        self._otlp.stop()
        self._live.stop()
        state.inboxes.stop()
        for peer in list(state.websockets):
            peer.shut_down()
        for waiter in state.waiters:
            waiter.set()
        for protocol in list(self._uvicorn_state.connections):
            protocol.shutdown()
        ending = (state.queries.close(), state.redrives.close(), state.pipelines.close())
        await asyncio.gather(*ending)
        tasks = set(self._uvicorn_state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN_S)

    def translator(self, connection: Connection, connector: Connector) -> HttpTranslator:
        """The translator of a connection that speaks HTTP."""
        state = self._state
        upper = HttpProtocol(self._uvicorn_config, self._uvicorn_state, state, connection)
        return HttpTranslator(state.edge, connection, upper)

    def _websocket(
        self, *, app_state: dict[str, Any], **_of_uvicorn: object
    ) -> WebSocketPeer | LivePeer:
        if app_state.pop("path", "") != LIVE_PATH:
            return WebSocketPeer(self._state, self._frames)
        caller = Caller(app_state["is_admin"], app_state["ip"], app_state["certificate_name"])
        return LivePeer(self._state, self._live, caller)

    def _ping_all(self) -> None:
        for peer in list(self._state.websockets):
            peer.ping()
        self._ping_later()
