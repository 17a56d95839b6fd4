"""The HTTP edge: uvicorn and Starlette in the bus's own loop, on its own connections."""

import asyncio
import logging

import uvicorn
from uvicorn.server import ServerState

from polybus.config import Connector
from polybus.edges.http.app import make_app
from polybus.edges.http.protocol import HttpProtocol
from polybus.edges.http.state import HttpState
from polybus.edges.http.transport import HttpTranslator
from polybus.edges.http.websocket import WebSocketPeer
from polybus.edges.tcp.connection import Connection

DRAIN_S = 3.0


class HttpEdge:
    """Everything HTTP of one bus."""

    def __init__(self, state: HttpState) -> None:
        self._state = state
        self._uvicorn_state = ServerState()
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
        self._pings: asyncio.TimerHandle | None = None

    def start(self) -> None:
        interval_s = self._state.config.msgstream.ping_interval_s
        self._pings = self._state.loop.call_later(interval_s, self._ping_all)

    async def stop(self) -> None:
        """Release clients as msgstream says; finish answers that have begun."""
        state = self._state
        state.stopping = True
        if self._pings is not None:
            self._pings.cancel()
        state.inboxes.stop()
        for peer in list(state.websockets):
            peer.shut_down()
        for waiter in state.waiters:
            if not waiter.done():
                waiter.set_result(None)
        for protocol in list(self._uvicorn_state.connections):
            protocol.shutdown()
        tasks = set(self._uvicorn_state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN_S)

    def translator(self, connection: Connection, connector: Connector) -> HttpTranslator:
        """The translator of a connection that speaks HTTP."""
        state = self._state
        upper = HttpProtocol(self._uvicorn_config, self._uvicorn_state, state, connection)
        return HttpTranslator(state.edge, connection, upper)

    def _websocket(self, **_of_uvicorn: object) -> WebSocketPeer:
        return WebSocketPeer(self._state)

    def _ping_all(self) -> None:
        for peer in list(self._state.websockets):
            peer.ping()
        self.start()
