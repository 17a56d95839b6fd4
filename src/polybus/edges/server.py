"""The server: the bus, its listeners, and the bounds that all connections share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.config import Config, Connector
from polybus.edges.admin.token import AdminToken
from polybus.edges.bad_peers import BadPeers
from polybus.edges.http.edge import HttpEdge
from polybus.edges.tcp.assembly import Assembly
from polybus.edges.tcp.buffers import ReadBuffers
from polybus.edges.tcp.connection import Connection
from polybus.edges.tcp.listener import Listener
from polybus.edges.tcp.outbox import STANDSTILL_S, Flusher, Ledger, Outboxes
from polybus.edges.tcp.pace import Pace
from polybus.edges.udp import UdpEdge
from polybus.errors import ConfigError, StorageError
from polybus.log.interface import Log
from polybus.services.replay import ReplayTurns
from polybus.services.system_topics import EventWriter

logger = logging.getLogger("polybus.server")

TICK_S = 0.1
MEMORY_POLL_S = 0.002
MEMORY_GATE = "memory"
SHORT_PATIENCE_S = 0.3
STARVING_PATIENCE_S = 3.0
LAST_WORD_S = 5.0
BACKLOG = 4096
# Open files that are not connections: segments, history, databases, libraries.
FILES_KEPT = 256


class Server:
    """Owns the loop's side of everything; one per process as a rule, any number in tests."""

    def __init__(self, config: Config, log: Log) -> None:
        self.config = config
        self.loop = asyncio.get_running_loop()
        self.bus = Bus(log, clock_us=_clock_us, topics_max=config.limits.topics_max)
        self.buffers = ReadBuffers()
        self.pace = Pace()
        self.ledger = Ledger()
        self.outboxes = Outboxes(
            flusher=Flusher(self.loop.call_soon, self.pace.before_writes, self.pace.after_writes),
            ledger=self.ledger,
            policy=config.slow_subscriber,
            bytes_max=config.limits.outbox_bytes_max,
        )
        self.clock_us = _clock_us
        self.events: EventWriter | None = None
        if config.system.events:
            self.events = EventWriter(self.bus, self.loop, _clock_us)
        self.bad_peers = BadPeers(
            lines_per_s=config.limits.error_lines_per_s,
            clock_s=time.monotonic,
            on_slow=self._tell_slow,
        )
        self.assembly = Assembly(config.limits, self.loop.time)
        self.connections: set[Connection] = set()
        self.publishing: Connection | None = None
        self.storage_error: StorageError | None = None
        self.http: HttpEdge | None = None
        # Without one, nobody on the network is the administrator.
        self.admin_token: AdminToken | None = None
        self._memory_bytes_max = config.limits.memory_bytes_max
        self._memory_waiters: list[Connection] = []
        self._over_memory_s = 0.0
        self.replay_turns = ReplayTurns(self._has_room_for_replays)
        self._tcp: list[asyncio.Server] = []
        self._udp: list[UdpEdge] = []
        self._tick: asyncio.TimerHandle | None = None
        self._ticks = 0
        self._stopping = False
        self._connections_max = min(config.limits.connections_max, _files_max() - FILES_KEPT)
        self._all_gone = asyncio.Event()

    # Life

    async def start(self) -> list[str]:
        """Listen on every connector; return the addresses, `tcp://127.0.0.1:55545` and so on."""
        log = self.bus.log
        log.on_durable = lambda ticket: self._call_in_loop(self._durable, ticket)
        log.on_failed = lambda error: self._call_in_loop(self._failed, error)
        addresses = []
        try:
            for connector in self.config.connectors:
                addresses.append(await self._listen(connector))
        except ConfigError as error:
            await self.stop()
            raise ConfigError(error.code, f"connectors[{len(addresses)}]: {error.text}") from error
        except OSError as error:
            await self.stop()
            where = f"{connector.protocol} {connector.ip}:{connector.port}"
            text = f"connectors[{len(addresses)}]: cannot listen on {where}: {error}"
            raise ConfigError("config.address", text) from error
        self._tick = self.loop.call_later(TICK_S, self._on_tick)
        return addresses

    async def _listen(self, connector: Connector) -> str:
        if connector.protocol == "udp":
            edge = UdpEdge(self, connector)
            self._udp.append(edge)
            port = await edge.listen()
            return f"udp://{connector.ip}:{port}"
        listener = Listener(self, connector)
        server = await self.loop.create_server(
            listener.connect, connector.ip, connector.port, backlog=BACKLOG
        )
        self._tcp.append(server)
        bound: socket.socket = server.sockets[0]
        return f"tcp://{connector.ip}:{bound.getsockname()[1]}"

    async def stop(self) -> None:
        """Stop accepting, let what was read reach log and subscribers, close every connection.

        The log is the caller's to close. Returns within `shutdown-timeout-s`.
        """
        self._stopping = True
        for server in self._tcp:
            server.close()
        for edge in self._udp:
            edge.stop_reading()
        if self._tick is not None:
            self._tick.cancel()
        for connection in self.connections:
            connection.stop_reading()
        patience_s = self.config.limits.shutdown_timeout_s / 3
        # Everything appended gets its receipt before its connection goes.
        settled = asyncio.Event()
        self.bus.when_all_durable(_Signal(settled.set))
        await _wait(settled, patience_s)
        for connection in list(self.connections):
            connection.close()
        for edge in self._udp:
            edge.close()
        if self.connections:
            self._all_gone.clear()
            await _wait(self._all_gone, patience_s)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)

    def _call_in_loop(self, callback: Callable[..., None], argument: object) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(callback, argument)

    def tell_event(self, kind: str, **fields: Any) -> None:
        """Tell in `$events` that something happened."""
        if self.events is not None:
            self.events.book.tell(kind, **fields)

    def _tell_slow(self, peer: str, protocol: str, code: str) -> None:
        self.tell_event("subscriber-slow", peer=peer, protocol=protocol, code=code)

    # Connections

    def admit(self, connection: Connection) -> bool:
        """Count a new connection in, unless there are too many."""
        limit = self._connections_max
        if self._stopping or len(self.connections) >= limit:
            text = f"there are {limit} connections (connections-max, or the limit of open files)"
            self.bad_peers.note(connection.name, "unknown", "connections.too-many", text)
            return False
        self.connections.add(connection)
        self.assembly.connected(connection)
        return True

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.assembly.forget(connection)
        self.pace.forget(connection)
        if not self.connections:
            self._all_gone.set()

    def half_closed(self, connection: Connection) -> None:
        """The peer sends no more: give what is owed, then close."""
        if connection.translator is None:
            connection.close()
            return
        self.loop.call_later(LAST_WORD_S, connection.close)
        self.bus.when_all_durable(_Signal(connection.close))

    # Memory

    def over_memory(self) -> bool:
        return self.ledger.bytes + self.bus.log.pending_bytes > self._memory_bytes_max

    def _has_room_for_replays(self) -> bool:
        return 2 * self.ledger.bytes <= self.config.limits.memory_bytes_max

    def hold_for_memory(self, connection: Connection) -> None:
        """Do not read from a publisher until there is room again."""
        if not self._memory_waiters:
            self.loop.call_later(MEMORY_POLL_S, self._look_at_memory)
        if connection.hold(MEMORY_GATE):
            self._memory_waiters.append(connection)

    def _look_at_memory(self) -> None:
        if self.over_memory():
            self.loop.call_later(MEMORY_POLL_S, self._look_at_memory)
            return
        waiters, self._memory_waiters = self._memory_waiters, []
        for connection in waiters:
            connection.release(MEMORY_GATE)

    def _shed(self) -> None:
        """Memory has been short for a while: let the slowest pay for it, not the publishers.

        Whoever still reads gives memory back by itself. Those who stand still meet their policy,
        the ones with the most waiting for them first; all of them if it is replays that starve.
        """
        over = self.over_memory()
        patience_s = SHORT_PATIENCE_S if over else STARVING_PATIENCE_S
        if self.outboxes.policy == "wait":
            patience_s = STANDSTILL_S
        still = [one for one in self.outboxes.congested if one.quiet_s >= patience_s]
        for outbox in sorted(still, key=lambda one: -one.held_bytes):
            outbox.give_up()
            if over and not self.over_memory():
                return

    # What happens by itself

    def _on_tick(self) -> None:
        self._tick = self.loop.call_later(TICK_S, self._on_tick)
        for outbox in list(self.outboxes.congested):
            if outbox.tick(TICK_S):
                outbox.give_up()
        self._over_memory_s = self._over_memory_s + TICK_S if self.over_memory() else 0.0
        if self._over_memory_s > SHORT_PATIENCE_S or self.replay_turns.starving:
            self._shed()
        self._ticks += 1
        if self._ticks % 10 == 0:
            for connection in self.assembly.overdue():
                connection.too_slow()

    def _durable(self, ticket: int) -> None:
        self.storage_error = None
        self.bus.settle(ticket)

    def _failed(self, error: StorageError) -> None:
        self.storage_error = error
        logger.error("the log takes no writes: %s", error)


def _files_max() -> int:
    """As many open files as the system lets this process have; the soft limit is raised to that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def _clock_us() -> int:
    return time.time_ns() // 1000


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


class _Signal:
    """Calls back when everything published so far is durable and its receipts are out."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback

    def receipt(self, batch: Batch) -> None:
        self._callback()
