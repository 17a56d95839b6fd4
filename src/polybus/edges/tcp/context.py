"""State that all TCP connections of one bus share: buffers, outboxes, limits, connections."""

import asyncio
import contextlib
import math
import resource
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from polybus.bus.subscriptions import Holdable
from polybus.config import Connector, Limits
from polybus.edges.edge import Edge
from polybus.edges.protocols.translator import Translator
from polybus.edges.tcp.outbox import Outboxes
from polybus.edges.tcp.pump import Pump

TICK_S = 0.1
TICKS_PER_OVERDUE_CHECK = 2
# The part of a deadline after which it is checked: checks run up to two ticks late.
PROMPT = 0.98
LAST_WORD_S = 5.0
FREE_BYTES = 64 << 10
RATE_LEAST = 1 << 10
SILENT_S = 60.0
GATE = "assembly"
# Open files that are not connections: segments, history, databases, libraries.
FILES_KEPT = 256

TranslatorFactory = Callable[[Any, Connector], Translator]
"""Makes the translator of a connection, once its protocol is known."""


class Assembling(Holdable, Protocol):
    """A connection that receives messages."""

    def too_slow(self) -> None: ...


class Assembly:
    """Counts and times the unfinished messages of all connections.

    A connection may hold FREE_BYTES of an unfinished message. Beyond that all connections share one
    pool, `assembly-bytes-max`. When the pool is full, all connections that need more wait, except
    one: it can finish its message, so there is no deadlock.

    After `message-timeout-s` a message must have arrived at RATE_LEAST bytes a second on average. A
    connection must show its protocol within `detect-timeout-s` of its first byte, and send that
    byte within SILENT_S.
    """

    def __init__(self, limits: Limits, clock_s: Callable[[], float]) -> None:
        self._limits = limits
        self._clock_s = clock_s
        self._deadlines: dict[Assembling, float] = {}
        self._pool_bytes = 0
        self._leader: Assembling | None = None
        self._waiting: deque[Assembling] = deque()

    def connected(self, connection: Assembling) -> None:
        """Expect a first byte."""
        self._deadlines[connection] = self._clock_s() + SILENT_S

    def detecting(self, connection: Assembling, *, no_later_s: float = math.inf) -> None:
        """Its first byte has arrived: expect it to show its protocol, or a whole head of HTTP.

        Further steps, such as TLS, do not get more time.
        """
        deadline_s = self._clock_s() + PROMPT * self._limits.detect_timeout_s
        self._deadlines[connection] = min(deadline_s, no_later_s, self.deadline_s(connection))

    def deadline_s(self, connection: Assembling) -> float:
        return self._deadlines.get(connection, math.inf)

    def update(self, connection: Assembling, before: int, now: int, *, completed: bool) -> None:
        """Its unfinished message grew from `before` to `now` bytes; `completed`: one has ended."""
        if not now:
            self._deadlines.pop(connection, None)
        elif completed or not before:
            self._deadlines[connection] = self._clock_s() + self._limits.message_timeout_s
        elif connection in self._deadlines:
            # Bytes that arrived fast do not extend the deadline without limit.
            later_s = self._deadlines[connection] + max(now - before, 0) / RATE_LEAST
            latest_s = self._clock_s() + self._limits.message_timeout_s
            self._deadlines[connection] = min(later_s, latest_s)
        if before > FREE_BYTES or now > FREE_BYTES:
            self._count(connection, max(before - FREE_BYTES, 0), max(now - FREE_BYTES, 0))

    def progressed(self, connection: Assembling, size: int) -> None:
        """A part arrived of a message that is not kept in memory."""
        if connection in self._deadlines:
            later_s = self._deadlines[connection] + size / RATE_LEAST
            latest_s = self._clock_s() + self._limits.message_timeout_s
            self._deadlines[connection] = min(later_s, latest_s)

    def excuse(self, connection: Assembling) -> None:
        """It was not read from: its deadline starts again."""
        if connection in self._deadlines:
            self._deadlines[connection] = self._clock_s() + self._limits.message_timeout_s

    def forget(self, connection: Assembling) -> None:
        """It is closed; an update to 0 bytes came before."""
        self._deadlines.pop(connection, None)
        if connection in self._waiting:
            self._waiting.remove(connection)
        if self._leader is connection:
            self._leader = None
        self._let_in()

    def overdue(self) -> list[Assembling]:
        """The connections whose deadline has passed."""
        self._let_in()
        now = self._clock_s()
        return [one for one, deadline in self._deadlines.items() if deadline < now]

    def _count(self, connection: Assembling, before: int, now: int) -> None:
        self._pool_bytes += now - before
        if not now and self._leader is connection:
            self._leader = None
        if now > before and self._pool_bytes > self._limits.assembly_bytes_max:
            if self._leader is None:
                self._leader = connection
            elif self._leader is not connection and connection.hold(GATE):
                self._waiting.append(connection)
        else:
            self._let_in()

    def _let_in(self) -> None:
        """Release a waiting one, if there is room or no other connection can finish."""
        crowded = self._pool_bytes > self._limits.assembly_bytes_max
        if self._waiting and not (crowded and self._leader):
            connection = self._waiting.popleft()
            if crowded:
                self._leader = connection
            connection.release(GATE)


class OpenConnection(Assembling, Protocol):
    """A connection in the set of all open ones."""

    name: str
    translator: Translator | None

    @property
    def is_admin(self) -> bool: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def later(self, delay_s: float, call: Callable[[], None]) -> None: ...

    def stop_reading(self) -> None: ...


class TcpContext:
    """Admits connections, and runs the timers that limit them."""

    def __init__(self, edge: Edge, translators: Mapping[str, TranslatorFactory]) -> None:
        context = edge.context
        limits = context.config.limits
        self.edge = edge
        self.context = context
        self.loop = context.loop
        self.memory = context.memory
        self.translators = translators
        self.outboxes = Outboxes(
            self.loop.call_soon,
            context.memory,
            policy=context.config.slow_subscriber,
            bytes_max=limits.outbox_bytes_max,
        )
        self.pump = Pump(self.loop, context.bus, context.memory, self.outboxes)
        self.assembly = Assembly(limits, self.loop.time)
        self.connections: set[OpenConnection] = set()
        self._connections_max = min(limits.connections_max, _files_max() - FILES_KEPT)
        self._is_stopping = False
        self._all_gone = asyncio.Event()
        self._ticks = 0
        self._tick: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._tick = self.loop.call_later(TICK_S, self._on_tick)

    def admit(self, connection: OpenConnection) -> bool:
        """Add a new connection unless there are too many; administrators are always admitted."""
        limit = self._connections_max
        is_full = len(self.connections) >= limit and not connection.is_admin
        if self._is_stopping or is_full:
            text = f"there are {limit} connections (connections-max, or the limit of open files)"
            self.edge.bad_peers.record(connection.name, "unknown", "connections.too-many", text)
            return False
        self.connections.add(connection)
        self.assembly.connected(connection)
        return True

    def forget(self, connection: OpenConnection) -> None:
        self.connections.discard(connection)
        self.assembly.forget(connection)
        if not self.connections:
            self._all_gone.set()

    def half_closed(self, connection: OpenConnection) -> None:
        """The peer sends no more: close when its receipts are out."""
        if connection.translator is None:
            connection.close()
            return
        connection.later(LAST_WORD_S, connection.close)
        self.context.bus.when_durable(lambda _: connection.close())

    def stop_reading(self) -> None:
        """Stop for good: the bus shuts down."""
        self._is_stopping = True
        if self._tick is not None:
            self._tick.cancel()
        for connection in self.connections:
            connection.stop_reading()

    async def close(self, patience_s: float) -> None:
        """Close every connection; abort those that are still open after `patience_s`."""
        for connection in list(self.connections):
            connection.close()
        if self.connections:
            self._all_gone.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), patience_s)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)
        self.pump.close()

    def _on_tick(self) -> None:
        self._tick = self.loop.call_later(TICK_S, self._on_tick)
        self.outboxes.tick(TICK_S)
        self._ticks += 1
        if self._ticks % TICKS_PER_OVERDUE_CHECK == 0:
            for connection in self.assembly.overdue():
                connection.too_slow()


def _files_max() -> int:
    """The number of files this process may open; raises the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 30
