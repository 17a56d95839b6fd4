# cython: annotation_typing=False
"""The pump decides when a socket is read and written: many in one turn of the loop.

The sockets are in an epoll of their own, and its descriptor is the only one that the event loop
watches. When it is ready, the pump takes a turn:

    1. one read of every ready socket, one after the other, into the shared buffer
    2. small reads first: the plain messages of neighbouring reads are published together, with one
       call of the bus, and their subscribers written to; everything else goes to its connection
    3. every other outbox is written, once
    4. again, while sockets are ready, for at most TURN_S_MAX

Nothing here waits. A socket that is always ready is read once a pass, like every other, so a flood
delays another peer by one read of it. That is at most SHARED_READ_BYTES while several peers send,
and BESIDE_SINGLE_BYTES while one of them sends single messages: if all send much at once, larger
reads are faster, and no peer waits for a single message. A peer that sends alone is read in pieces
that are larger still, as long as each takes less than READ_S_MAX to handle.

Peers that write single messages as fast as they can make the pump read them one by one, and each
write wakes it: that costs both sides more than the message. So when more than SMALL_MESSAGES_MAX
came in small reads within a tick (GATHER_S), the socket of such a peer that was read in this tick
is read again at its end, and gets a TCP window that it fills meanwhile (window.py). The first
message of each peer in a tick is read at once, and no peer waits below 150,000 single writes a
second. A peer whose wait brought no second message, such as one that waits for answers, is not made
to wait again soon. Peers that write much at once never wait.

Backpressure: a socket that is not read from, or that takes no more bytes, is out of the epoll, or
only watched for what it lacks. An exception that a connection does not handle is a bug of ours; it
costs that connection.

Compiled as it is (pump.pxd), or run as it is.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from time import perf_counter
from typing import TYPE_CHECKING

try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython
if not cython.compiled:
    from polybus.edges.tcp.handling import ReadHandler, drop
    from polybus.edges.tcp.sockets_py import READABLE, WRITABLE, Readiness, receive
    from polybus.edges.tcp.transport import SocketTransport
from polybus.edges.tcp import window
from polybus.edges.tcp.buffers import ReadBuffers
from polybus.edges.tcp.handling import SMALL_READ_BYTES, SMALL_READS_MIN

if TYPE_CHECKING:
    from polybus.batch import Buffer
    from polybus.bus.bus import Bus
    from polybus.edges.tcp.outbox import Outboxes
    from polybus.edges.tcp.transport import PumpedConnection
    from polybus.services.memory import MemoryGate

TURN_S_MAX = 200e-6
"""How long the pump continues before the loop's other work."""
READ_BYTES_LEAST = 8 << 10
SHARED_READ_BYTES = 64 << 10
BESIDE_SINGLE_BYTES = 16 << 10
SHARED_S = 0.01
"""How long a peer's last message counts as sending."""
READ_S_MAX = 0.025
"""How long the messages of one read may take."""
CARRY_BYTES_MAX = 64 << 10
GATHER_S = 2e-3
SMALL_MESSAGES_MAX = 300
GATHERS_MAX = 64
"""After this many ticks in a row a socket is watched again: its peer may write more at once now."""
BULK_BYTES = 8 << 20
"""So much without a wait means that a peer writes much at once: a send buffer holds less."""
# Small reads are copied, so that few messages do not keep a read buffer alive.
SMALL_BYTES = 128 << 10
CHUNK_BYTES = 8 << 10
# An error or the end of a socket, as in sys/epoll.h.
HANGUP = 0x18


@cython.cclass
class Pump:
    """Reads and writes the sockets of one bus; see the module docstring."""

    __slots__ = (
        "_buffers",
        "_sockets",
        "_gathering",
        "_handler",
        "_last_reader",
        "_memory",
        "_outboxes",
        "_pieces",
        "_shared_bytes",
        "_shared_until_s",
        "_single_until_s",
        "_tick",
        "_tick_end_s",
        "_used",
        "loop",
        "readiness",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bus: Bus,
        memory: MemoryGate,
        outboxes: Outboxes,
    ) -> None:
        self.loop = loop
        self.readiness = Readiness()
        self._memory = memory
        self._outboxes = outboxes
        self._buffers = ReadBuffers()
        self._handler = ReadHandler(bus, outboxes)
        self._sockets: dict[int, SocketTransport] = {}
        # What this pass has read: transport, start and stop in the buffer.
        self._pieces: list[tuple[SocketTransport, int, int]] = []
        self._used = 0
        self._gathering: list[SocketTransport] = []
        self._last_reader: SocketTransport | None = None
        self._shared_until_s = 0.0
        # How much is read at once from each of several peers that send; 0 while only one does.
        self._shared_bytes = 0
        self._single_until_s = 0.0
        self._tick = 0
        self._tick_end_s = 0.0
        loop.add_reader(self.readiness.fileno(), self.turn)

    def add(self, connected: socket.socket, connection: PumpedConnection) -> SocketTransport:
        """Take over a connected socket that does not block; reading begins in the next turn."""
        transport = SocketTransport(self.loop, self.readiness, connected, connection, self.remove)
        transport.watch()
        self._sockets[transport.fd] = transport
        return transport

    def remove(self, transport: SocketTransport) -> None:
        self._sockets.pop(transport.fd, None)
        if self._last_reader is transport:
            self._last_reader = None
        self._handler.forget()

    def close(self) -> None:
        """Stop for good; every transport is closed."""
        if self.readiness.fileno() >= 0:
            self.loop.remove_reader(self.readiness.fileno())
            self.readiness.close()

    def turn(self) -> None:
        """Read what has arrived, publish it, and write to the subscribers."""
        began_s = perf_counter()
        if began_s >= self._tick_end_s:
            self._next_tick(began_s)
        if self._handler.single_came:
            self._handler.single_came = False
            self._single_until_s = began_s + SHARED_S
        self._shared_bytes = 0
        if began_s < self._shared_until_s:
            are_single = began_s < self._single_until_s
            self._shared_bytes = BESIDE_SINGLE_BYTES if are_single else SHARED_READ_BYTES
        outboxes = self._outboxes
        outboxes.in_turn = True
        try:
            while True:
                count = self.readiness.find()
                if not count:
                    break
                self._pass(count)
                outboxes.flush()
                if perf_counter() - began_s > TURN_S_MAX:
                    break
        finally:
            outboxes.in_turn = False
            outboxes.flush()

    def _pass(self, count: int) -> None:
        """Read every ready socket once, then handle what was read."""
        others: list[tuple[SocketTransport, int]] = []
        for index in range(count):
            transport = self._sockets[self.readiness.fd(index)]
            events = self.readiness.events(index)
            if events & WRITABLE or (events & HANGUP and transport.watched & WRITABLE):
                others.append((transport, 1))
            if events == WRITABLE or not transport.watched & READABLE:
                continue
            got = self._read(transport)
            if got > 0:
                if got < SMALL_READ_BYTES:
                    if self._are_many() and self._should_wait(transport):
                        self._wait_for_tick(transport)
                    transport.tick = self._tick
                elif transport.is_narrow:
                    self._widen_for_bulk(transport, got)
                if self._is_full():
                    # Not in the next pass, which would begin with the same sockets.
                    self._handle_pieces()
            elif got != -errno.EAGAIN:
                others.append((transport, got))
        self._handle_pieces()
        for transport, what in others:
            self._tell(transport, what)

    def _tell(self, transport: SocketTransport, what: int) -> None:
        """The socket takes more (1), has ended (0) or failed (a negative errno)."""
        try:
            if what > 0:
                transport.writable()
            elif what == 0:
                transport.ended()
            else:
                transport.fail(-what)
        except Exception:
            drop(transport)

    def _read(self, transport: SocketTransport) -> int:
        """Read a socket once, after the data read before; return the result of the call."""
        view = self._buffers.view
        start = self._used
        carry = transport.connection.carry
        if carry:
            view[start : start + len(carry)] = carry
            start += len(carry)
        size = transport.read_bytes
        if self._shared_bytes and transport.connection.unfinished_bytes < CARRY_BYTES_MAX:
            # In the middle of a large message there is nothing to handle yet.
            size = SHARED_READ_BYTES if transport.is_gathering else self._shared_bytes
        got = receive(transport.fd, view, start, min(start + size, len(view)))
        if got > 0:
            if carry:
                transport.connection.carry = b""
            self._pieces.append((transport, self._used, start + got))
            self._used = start + got
        return got

    def _is_full(self) -> bool:
        """Whether the buffer has no room for a carry and a read."""
        return len(self._buffers.view) - self._used < 2 * CARRY_BYTES_MAX

    # Gathering

    def _next_tick(self, now_s: float) -> None:
        self._tick += 1
        self._tick_end_s = now_s + GATHER_S
        self._handler.small_messages = 0

    def _are_many(self) -> bool:
        """Whether this tick has brought many single messages."""
        return self._handler.small_messages > SMALL_MESSAGES_MAX

    def _should_wait(self, transport: SocketTransport) -> bool:
        """Whether its peer writes single messages, more than one in a tick."""
        is_single = transport.small_reads >= SMALL_READS_MIN
        return is_single and transport.exempt_until <= self._tick == transport.tick

    def _wait_for_tick(self, transport: SocketTransport) -> None:
        """Read a socket again when the tick ends."""
        transport.is_gathering = True
        transport.watch()
        if not self._gathering:
            self.loop.call_later(GATHER_S, self._gather)
        self._gathering.append(transport)
        transport.large_bytes = 0
        if not transport.is_narrow:
            transport.is_narrow = window.narrow(transport.socket)

    def _widen_for_bulk(self, transport: SocketTransport, got: int) -> None:
        """Give a peer that writes much at once a large window again."""
        transport.large_bytes += got
        if transport.large_bytes > BULK_BYTES:
            transport.is_narrow = False
            window.widen(transport.socket)

    def _gather(self) -> None:
        """A tick has ended: read what peers that write single messages have sent meanwhile."""
        self._next_tick(perf_counter())
        sockets, self._gathering = self._gathering, []
        others: list[tuple[SocketTransport, int]] = []
        outboxes = self._outboxes
        outboxes.in_turn = True
        try:
            for transport in sockets:
                transport.tick = self._tick
                transport.messages = 0
                if transport.may_read():
                    if self._is_full():
                        self._handle_pieces()
                    got = self._read(transport)
                    if got >= window.NARROW_BYTES:
                        # More waits at its peer.
                        transport.gathers = GATHERS_MAX
                    elif got <= 0 and got != -errno.EAGAIN:
                        others.append((transport, got))
            self._handle_pieces()
            for transport, what in others:
                self._tell(transport, what)
        finally:
            outboxes.in_turn = False
            self._continue_gathering(sockets)
            outboxes.flush()

    def _continue_gathering(self, sockets: list[SocketTransport]) -> None:
        """Wait for the next tick if this one brought as much again."""
        are_many = self._are_many()
        for transport in sockets:
            transport.gathers += 1
            if transport.messages < 2:
                transport.exempt_until = self._tick + GATHERS_MAX
            elif are_many and transport.gathers < GATHERS_MAX and transport.may_read():
                self._gathering.append(transport)
                continue
            transport.gathers = 0
            transport.is_gathering = False
            transport.watch()
        if self._gathering:
            self.loop.call_later(GATHER_S, self._gather)

    # Handling

    def _handle_pieces(self) -> None:
        """Handle what was read: small reads first, because they do not delay the others."""
        pieces, self._pieces, self._used = self._pieces, [], 0
        if pieces:
            last = pieces[-1][0]
            if last is not self._last_reader or len(pieces) > 1:
                self._shared_until_s = perf_counter() + SHARED_S
                self._last_reader = last
            if len(pieces) > 1:
                small = [piece for piece in pieces if piece[2] - piece[1] < SMALL_READ_BYTES]
                if 0 < len(small) < len(pieces):
                    self._handle(small)
                    pieces = [piece for piece in pieces if piece[2] - piece[1] >= SMALL_READ_BYTES]
            self._handle(pieces)

    def _handle(self, pieces: list[tuple[SocketTransport, int, int]]) -> None:
        """Handle reads; those that lie beside each other share a copy of up to CHUNK_BYTES.

        A message that waits for a slow subscriber keeps the bytes of its copy in memory: those of
        its own read, or of a few small ones.
        """
        buffers = self._buffers
        began_s = perf_counter()
        is_kept = False
        index, count = 0, len(pieces)
        while index < count:
            first, end, stop = pieces[index][1], pieces[index][2], index + 1
            while stop < count and pieces[stop][2] - first <= CHUNK_BYTES:
                end = pieces[stop][2]
                stop += 1
            data: Buffer = buffers.view[first:end]
            if end - first <= SMALL_BYTES:
                data = bytes(data)
            else:
                is_kept = True
            self._handler.handle(pieces[index:stop], data, first)
            index = stop
        if is_kept:
            buffers.replace()
        self._adapt(pieces, perf_counter() - began_s)
        if self._memory.is_full():
            for transport, _, _ in pieces:
                self._memory.hold(transport.connection)

    def _adapt(self, pieces: list[tuple[SocketTransport, int, int]], elapsed_s: float) -> None:
        """Read more at once while that is cheap, less when a read delays the others."""
        for transport, start, stop in pieces:
            if stop - start >= transport.read_bytes:
                if elapsed_s > READ_S_MAX:
                    transport.read_bytes = max(transport.read_bytes // 2, READ_BYTES_LEAST)
                elif elapsed_s < READ_S_MAX / 2:
                    most = len(self._buffers.view) - 2 * CARRY_BYTES_MAX
                    transport.read_bytes = min(transport.read_bytes * 2, most)
