"""The HTTP edge: uvicorn and Starlette in the bus's own loop, on its own connections."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.server import ServerState

from polybus.config import Config
from polybus.edges.http.app import make_app
from polybus.edges.http.frames import Frames
from polybus.edges.http.polls import Polls
from polybus.edges.http.protocol import HttpProtocol
from polybus.edges.http.websocket import WebSocketPeer
from polybus.services.consumers.book import ConsumerBook
from polybus.services.sessions.inboxes import Inboxes
from polybus.services.transactions.transactions import Transactions

if TYPE_CHECKING:
    from polybus.edges.http.transport import HttpTranslator
    from polybus.edges.server import Server

DRAIN_S = 3.0


class HttpEdge:
    """Everything HTTP of one server."""

    close_timeout_s = 2.0

    def __init__(self, server: Server) -> None:
        self.server = server
        self.bus = server.bus
        self.config: Config = server.config
        self.loop = server.loop
        self.head_bytes_max = server.config.http.head_bytes_max
        self.inboxes = Inboxes(server.bus, server.config)
        self.consumers = ConsumerBook(server, self.inboxes.state)
        if server.events is not None:
            self.inboxes.events = server.events.book
        self.transactions = Transactions(server)
        self.polls = Polls(self)
        self.websockets: set[WebSocketPeer] = set()
        # Reads that wait for a topic to grow.
        self.waiters: set[asyncio.Future[None]] = set()
        self.stopping = False
        # Peers' mistakes are counted and noted by the bus, at a bounded rate; never their URLs.
        self.quiet_logger = logging.getLogger("polybus.http")
        self.quiet_logger.setLevel(logging.CRITICAL)
        self.uvicorn_state = ServerState()
        self.uvicorn_config = uvicorn.Config(
            make_app(self),
            log_config=None,
            access_log=False,
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            http=HttpProtocol,
            ws="none",
            timeout_keep_alive=int(server.config.http.keep_alive_s) or 1,
        )
        self.uvicorn_config.load()
        self.uvicorn_config.ws_protocol_class = self._websocket  # type: ignore[assignment]
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        logging.getLogger("uvicorn.access").disabled = True
        self._frames = Frames()
        self._frames_scheduled = False
        self._pings: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Take up the sessions, and transactions that were begun. Raises StorageError."""
        await self.inboxes.start()
        await self.consumers.start()
        await self.transactions.start()
        self._schedule_pings()

    async def stop(self) -> None:
        """Let clients go as msgstream says; answers that have begun are finished."""
        self.stopping = True
        if self._pings is not None:
            self._pings.cancel()
        await self.inboxes.stop()
        for peer in list(self.websockets):
            peer.shut_down()
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        for protocol in list(self.uvicorn_state.connections):
            protocol.shutdown()
        tasks = set(self.uvicorn_state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN_S)

    async def close(self) -> None:
        """Save the sessions; call this when nothing is connected any more."""
        await self.transactions.close()
        if self.server.events is not None:
            self.server.events.close()
        await self.consumers.close()
        await self.inboxes.close()

    def protocol(self, http: HttpTranslator) -> HttpProtocol:
        return HttpProtocol(self, http)

    def _websocket(self, **_of_uvicorn: object) -> WebSocketPeer:
        return WebSocketPeer(self)

    def frame(self, packs: list[tuple[int, bytes]]) -> bytes:
        """The packs as a WebSocket frame, made once for all who get the same in one loop turn."""
        if not self._frames_scheduled:
            self._frames_scheduled = True
            self.loop.call_soon(self._forget_frames)
        return self._frames.get(packs)

    def _forget_frames(self) -> None:
        self._frames_scheduled = False
        self._frames.clear()

    def _schedule_pings(self) -> None:
        interval_s = self.config.msgstream.ping_interval_s
        self._pings = self.loop.call_later(interval_s, self._ping_all)

    def _ping_all(self) -> None:
        for peer in list(self.websockets):
            peer.ping()
        self._schedule_pings()
