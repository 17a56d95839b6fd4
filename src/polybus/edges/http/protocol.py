"""uvicorn's HTTP/1.1 protocol with the bus's limits: heads, bodies, pipelines and their time."""

import json
from http import HTTPStatus

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from polybus.edges.http.state import HttpState
from polybus.edges.tcp.connection import Connection

PIPELINE_MAX = 100
HEAD_TOO_LARGE = "the headers are too large (head-bytes-max)"


class ParserStopped(Exception):
    """Stops the parser; `HttpProtocol.refusal` says why."""


class HttpProtocol(HttpToolsProtocol):
    """One connection's requests. A request that breaks a limit is answered, then closed."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        state: HttpState,
        connection: Connection,
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state={})
        self._bad_peers = state.bad_peers
        self._head_bytes_max = state.config.http.head_bytes_max
        self._connection = connection
        self._assembly = connection.assembly
        self._head_bytes = 0
        self._body_bytes = 0
        self._in_head = False
        self.refusal = (400, "http.invalid", "this is not an HTTP request")

    # The parser calls these

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._assembly.detecting(self._connection)
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
        self._in_head = False
        # Expect a body. Without one the message is complete at once.
        self._body_bytes = 1
        self._assembly.update(self._connection, 0, self._body_bytes, completed=True)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        before, self._body_bytes = self._body_bytes, self._body_bytes + len(body)
        self._assembly.update(self._connection, before, self._body_bytes, completed=False)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._forget_body()
        super().on_message_complete()

    # The connection calls these

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head_bytes + len(data) > 2 * self._head_bytes_max:
            # The parser reports nothing of a head that does not end.
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

    def _forget_body(self) -> None:
        before, self._body_bytes = self._body_bytes, 0
        self._assembly.update(self._connection, before, 0, completed=True)

    # Refusing

    def _stop(self, status: int, code: str, text: str) -> None:
        self.refusal = (status, code, text)
        raise ParserStopped

    def send_400_response(self, msg: str) -> None:
        status, code, text = self.refusal
        self._bad_peers.note(self._connection.name, "http", code, text)
        self.refuse(status, code, text)

    def refuse(self, status: int, code: str, text: str) -> None:
        """Answer with a problem, unless an answer has begun, and close."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            problem = {"type": "about:blank", "title": HTTPStatus(status).phrase}
            body = json.dumps(problem | {"status": status, "code": code, "detail": text}).encode()
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/problem+json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%b"
                % (status, HTTPStatus(status).phrase.encode(), len(body), body)
            )
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore, as uvicorn does, an upgrade to anything but WebSocket."""
