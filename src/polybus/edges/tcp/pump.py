# cython: annotation_typing=False
"""The pump decides when a socket is read and written: many in one turn of the loop.

The sockets are in an epoll of their own, and its descriptor is the one thing of them that the
event loop watches. When it is ready, the pump takes a turn:

    1. one read of every ready socket, one behind the other, into the shared buffer
    2. the plain messages of neighbouring reads are published together, with one call of the bus;
       everything else goes to its connection
    3. every subscriber is written to, once
    4. again, while sockets are ready, for at most TURN_S_MAX

Nothing here waits. A socket that is always ready is read once a pass, like every other, so a flood
delays another peer by one read of it. That is at most SHARED_READ_BYTES while several peers send. A
peer that sends alone is read in larger pieces, which is faster, as long as each takes less than
READ_S_MAX to handle.

Peers that write single messages as fast as they can make the pump read them one by one, and each
write wakes it: that costs both sides more than the message. So when more than SMALL_MESSAGES_MAX
came in small reads within a tick (GATHER_S), a socket that was read in this tick is read again at
its end. Everybody's first message of a tick is read at once, and nobody waits below 150,000 single
writes a second. Peers that write much at once are never made to wait.

Backpressure: a socket that is not read from, or that takes no more bytes, is out of the epoll, or
only watched for what it lacks. An exception that a connection does not handle is a bug of ours; it
costs that connection.

Compiled as it is (pump.pxd), or run as it is.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Hashable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython
if not cython.compiled:
    from polybus.batch import Batch
    from polybus.edges.tcp.sockets_py import READABLE, WRITABLE, Readiness, receive, transmit
from polybus.bus.subscriptions import Publisher
from polybus.edges.tcp.buffers import ReadBuffers

if TYPE_CHECKING:
    from polybus.batch import Buffer
    from polybus.bus.bus import Bus
    from polybus.edges.tcp.outbox import Outbox, Outboxes
    from polybus.errors import PolybusError
    from polybus.services.memory import MemoryGate
    from polybus.wire.codec import PlainCodec

logger = logging.getLogger("polybus.tcp")

TURN_S_MAX = 200e-6
"""How long the pump goes on before the loop's other work."""
READ_BYTES_FIRST = 64 << 10
READ_BYTES_LEAST = 8 << 10
SHARED_READ_BYTES = 64 << 10
SHARED_S = 0.01
"""How long a peer's last message counts as sending."""
READ_S_MAX = 0.025
"""How long the messages of one read may take."""
CARRY_BYTES_MAX = 64 << 10
GATHER_S = 1e-3
SMALL_MESSAGES_MAX = 150
SMALL_READ_BYTES = 4 << 10
GATHERS_MAX = 64
"""After this many ticks in a row a socket is watched again: its peer may write more at once now."""
# A pass whose reads are small is copied, so that few messages do not keep a read buffer alive.
SMALL_BYTES = 128 << 10


class PumpedPublisher(Publisher, Protocol):
    """What the pump needs of a connection's translator."""

    def publish(self, batches: Sequence[Batch], whole: Buffer | None = None) -> None: ...


class PumpedConnection(Protocol):
    """What the pump needs of a connection."""

    name: str
    carry: bytes
    """Bytes of an unfinished message; they belong before the next read."""
    unfinished_bytes: int
    translator: Any

    def receive(self, data: Buffer) -> None:
        """Handle bytes, the carry included."""
        ...

    def eof_received(self) -> bool:
        """The peer sends no more; whether to keep the socket open."""
        ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, error: Exception | None) -> None: ...

    def hold(self, gate: Hashable) -> bool: ...

    def release(self, gate: Hashable) -> None: ...


@cython.cclass
class Channel:
    """A connection's socket, with the methods of an asyncio transport.

    `plain` is the connection's codec while its messages may be published with those of others.
    """

    __slots__ = (
        "_ends_output",
        "_gathers",
        "_has_ended",
        "_is_closed",
        "_is_closing",
        "_is_gathering",
        "_is_reading",
        "_pump",
        "_tick",
        "_waiting",
        "connection",
        "fd",
        "plain",
        "read_bytes",
        "socket",
        "watched",
    )

    def __init__(self, pump: Pump, connected: socket.socket, connection: PumpedConnection) -> None:
        self._pump = pump
        self.socket = connected
        self.fd = connected.fileno()
        self.connection: PumpedConnection = connection
        self.plain: PlainCodec[Any] | None = None
        self.read_bytes = READ_BYTES_FIRST
        # What the socket has not taken yet.
        self._waiting: deque[Buffer] = deque()
        self.watched = 0
        # The tick of the last small read, and the ticks in a row of which the end was waited for.
        self._tick = 0
        self._is_gathering = False
        self._gathers = 0
        self._is_reading = True
        self._has_ended = False
        self._ends_output = False
        self._is_closing = False
        self._is_closed = False

    # Reading

    def pause_reading(self) -> None:
        self._is_reading = False
        self._watch()

    def resume_reading(self) -> None:
        self._is_reading = True
        self._watch()

    def _may_read(self) -> bool:
        return self._is_reading and not (self._has_ended or self._is_closing or self._is_closed)

    def _watch(self) -> None:
        """Be in the epoll for what this can do now."""
        events = 0
        if not self._is_closed:
            if self._may_read() and not self._is_gathering:
                events = READABLE
            if self._waiting:
                events |= WRITABLE
        if events != self.watched:
            self._pump.readiness.watch(self.fd, events, self.watched)
            self.watched = events

    def ended(self) -> None:
        """The peer sends no more."""
        self._has_ended = True
        self._watch()
        if not self.connection.eof_received():
            self.close()

    # Writing

    def write(self, data: Buffer) -> None:
        """Write what the socket takes; the rest when it takes more."""
        if self._is_closed or self._ends_output:
            return
        if not self._waiting:
            sent = transmit(self.fd, data)
            if sent == len(data):
                return
            if sent < 0:
                if sent != -errno.EAGAIN:
                    self.fail(-sent)
                    return
                sent = 0
            self._waiting.append(memoryview(data)[sent:] if sent else data)
            self._watch()
            self.connection.pause_writing()
        elif len(data):
            self._waiting.append(data)

    def writable(self) -> None:
        """The socket takes more."""
        waiting = self._waiting
        while waiting:
            data = waiting[0]
            sent = transmit(self.fd, data)
            if sent < 0:
                if sent != -errno.EAGAIN:
                    self.fail(-sent)
                return
            if sent < len(data):
                waiting[0] = memoryview(data)[sent:]
                return
            waiting.popleft()
        self._watch()
        self.connection.resume_writing()
        if self._waiting or self._is_closed:
            return
        if self._is_closing:
            self._end(None)
        elif self._ends_output:
            self._shut_down()

    def get_write_buffer_size(self) -> int:
        return sum([len(data) for data in self._waiting])

    # Ending

    def write_eof(self) -> None:
        """Send EOF after what was written. Raises OSError."""
        if not self._ends_output and not self.is_closing():
            self._ends_output = True
            if not self._waiting:
                self.socket.shutdown(socket.SHUT_WR)

    def _shut_down(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        """Close after what was written."""
        if self.is_closing():
            return
        self._is_closing = True
        if self._waiting:
            self._watch()
        else:
            self._end(None)

    def abort(self) -> None:
        """Close at once."""
        self._end(None)

    def fail(self, number: int) -> None:
        """A system call failed: the connection is lost."""
        self._end(OSError(number, os.strerror(number)))

    def _end(self, error: Exception | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._waiting.clear()
        self._watch()
        # Not from here: whoever closes a connection may be in the middle of its work.
        self._pump.loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        connection, self.connection = self.connection, _NOBODY
        self.plain = None
        self._pump.remove(self)
        self.socket.close()
        connection.connection_lost(error)

    def is_closing(self) -> bool:
        return self._is_closing or self._is_closed

    # About the socket

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        try:
            match name:
                case "socket":
                    return self.socket
                case "peername":
                    return self.socket.getpeername()
                case "sockname":
                    return self.socket.getsockname()
        except OSError:
            # The peer is gone.
            pass
        return default


class _Nobody:
    """Stands for the connection of a channel that is closed."""

    name = ""
    carry = b""
    unfinished_bytes = 0
    translator = None

    def receive(self, data: Buffer) -> None:
        return

    def eof_received(self) -> bool:
        return True

    def pause_writing(self) -> None:
        return

    def resume_writing(self) -> None:
        return

    def connection_lost(self, error: Exception | None) -> None:
        return

    def hold(self, gate: Hashable) -> bool:
        return False

    def release(self, gate: Hashable) -> None:
        return


_NOBODY = _Nobody()


class JointPublisher:
    """The publishers of messages that were published together. Implements bus.Publisher."""

    __slots__ = ("_by_name",)

    def __init__(self, by_name: dict[str, PumpedPublisher]) -> None:
        self._by_name = by_name

    def receipt(self, batches: Sequence[Batch]) -> None:
        by_sender: dict[str, list[Batch]] = {}
        for batch in batches:
            by_sender.setdefault(batch.sender, []).append(batch)
        for sender, its_batches in by_sender.items():
            self._by_name[sender].receipt(its_batches)

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        self._by_name[batch.sender].refuse(batch, error)

    def hold(self, gate: Hashable) -> bool:
        held = [publisher.hold(gate) for publisher in self._by_name.values()]
        return any(held)

    def release(self, gate: Hashable) -> None:
        for publisher in self._by_name.values():
            publisher.release(gate)


@cython.cclass
class Pump:
    """Reads and writes the sockets of one bus; see the module docstring."""

    __slots__ = (
        "_buffers",
        "_bus",
        "_channels",
        "_gathering",
        "_is_shared",
        "_lane_boxes",
        "_lane_of",
        "_last_reader",
        "_memory",
        "_outboxes",
        "_pieces",
        "_shared_until_s",
        "_small_messages",
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
        self._bus = bus
        self._memory = memory
        self._outboxes = outboxes
        self._buffers = ReadBuffers()
        self._channels: dict[int, Channel] = {}
        # What this pass has read: channel, start and stop in the buffer.
        self._pieces: list[tuple[Channel, int, int]] = []
        self._used = 0
        self._gathering: list[Channel] = []
        self._last_reader: Channel | None = None
        # The subscribers of the last batches, and their outboxes.
        self._lane_of: object = None
        self._lane_boxes: list[Outbox] | None = None
        self._shared_until_s = 0.0
        self._is_shared = False
        self._tick = 0
        self._tick_end_s = 0.0
        self._small_messages = 0
        loop.add_reader(self.readiness.fileno(), self.turn)

    def add(self, connected: socket.socket, connection: PumpedConnection) -> Channel:
        """Take over a connected socket that does not block; reading begins in the next turn."""
        channel = Channel(self, connected, connection)
        self._channels[channel.fd] = channel
        channel._watch()  # noqa: SLF001
        return channel

    def remove(self, channel: Channel) -> None:
        self._channels.pop(channel.fd, None)
        if self._last_reader is channel:
            self._last_reader = None
        # It may be among these, and would not be freed.
        self._lane_of = self._lane_boxes = None

    def close(self) -> None:
        """Stop for good; every channel is closed."""
        if self.readiness.fileno() >= 0:
            self.loop.remove_reader(self.readiness.fileno())
            self.readiness.close()

    def turn(self) -> None:
        """Read what has arrived, publish it, and write to the subscribers."""
        began_s = perf_counter()
        if began_s >= self._tick_end_s:
            self._next_tick(began_s)
        self._is_shared = began_s < self._shared_until_s
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
        others: list[tuple[Channel, int]] = []
        for index in range(count):
            channel = self._channels[self.readiness.fd(index)]
            events = self.readiness.events(index)
            if events & WRITABLE:
                others.append((channel, 1))
            if events == WRITABLE or not channel.watched & READABLE:
                continue
            got = self._read(channel)
            if got > 0:
                if got < SMALL_READ_BYTES:
                    if self._small_messages > SMALL_MESSAGES_MAX and channel._tick == self._tick:  # noqa: SLF001
                        self._wait_for_tick(channel)
                    channel._tick = self._tick  # noqa: SLF001
                if self._is_full():
                    # The others are still ready in the next pass.
                    break
            elif got != -errno.EAGAIN:
                others.append((channel, got))
        self._handle_pieces()
        for channel, what in others:
            self._tell(channel, what)

    def _tell(self, channel: Channel, what: int) -> None:
        """The socket takes more (1), has ended (0) or failed (a negative errno)."""
        try:
            if what > 0:
                channel.writable()
            elif what == 0:
                channel.ended()
            else:
                channel.fail(-what)
        except Exception:
            self._drop(channel)

    def _read(self, channel: Channel) -> int:
        """Read a socket once, behind what was read before; return the result of the call."""
        view = self._buffers.view
        start = self._used
        carry = channel.connection.carry
        if carry:
            view[start : start + len(carry)] = carry
            start += len(carry)
        size = SHARED_READ_BYTES if self._is_shared else channel.read_bytes
        got = receive(channel.fd, view, start, min(start + size, len(view)))
        if got > 0:
            if carry:
                channel.connection.carry = b""
            self._pieces.append((channel, self._used, start + got))
            self._used = start + got
        return got

    def _is_full(self) -> bool:
        """Whether the buffer has no room for a carry and a read."""
        return len(self._buffers.view) - self._used < 2 * CARRY_BYTES_MAX

    # Gathering

    def _next_tick(self, now_s: float) -> None:
        self._tick += 1
        self._tick_end_s = now_s + GATHER_S
        self._small_messages = 0

    def _wait_for_tick(self, channel: Channel) -> None:
        """Read a socket again when the tick ends."""
        channel._is_gathering = True  # noqa: SLF001
        channel._watch()  # noqa: SLF001
        if not self._gathering:
            self.loop.call_later(GATHER_S, self._gather)
        self._gathering.append(channel)

    def _gather(self) -> None:
        """A tick has ended: read what peers that write single messages have sent meanwhile."""
        self._next_tick(perf_counter())
        channels, self._gathering = self._gathering, []
        others: list[tuple[Channel, int]] = []
        outboxes = self._outboxes
        outboxes.in_turn = True
        try:
            for channel in channels:
                channel._tick = self._tick  # noqa: SLF001
                if channel._may_read():  # noqa: SLF001
                    if self._is_full():
                        self._handle_pieces()
                    got = self._read(channel)
                    if got <= 0 and got != -errno.EAGAIN:
                        others.append((channel, got))
            self._handle_pieces()
            for channel, what in others:
                self._tell(channel, what)
        finally:
            outboxes.in_turn = False
            outboxes.flush()
            self._go_on_gathering(channels)

    def _go_on_gathering(self, channels: list[Channel]) -> None:
        """Wait for the next tick if this one brought as much again."""
        is_much = self._small_messages > SMALL_MESSAGES_MAX
        for channel in channels:
            channel._gathers += 1  # noqa: SLF001
            if is_much and channel._gathers < GATHERS_MAX and channel._may_read():  # noqa: SLF001
                self._gathering.append(channel)
            else:
                channel._gathers = 0  # noqa: SLF001
                channel._is_gathering = False  # noqa: SLF001
                channel._watch()  # noqa: SLF001
        if self._gathering:
            self.loop.call_later(GATHER_S, self._gather)

    # Handling

    def _handle_pieces(self) -> None:
        pieces, used = self._pieces, self._used
        self._pieces, self._used = [], 0
        if pieces:
            last = pieces[-1][0]
            if last is not self._last_reader or len(pieces) > 1:
                self._shared_until_s = perf_counter() + SHARED_S
                self._last_reader = last
            self._handle(pieces, used)

    def _handle(self, pieces: list[tuple[Channel, int, int]], used: int) -> None:
        buffers = self._buffers
        data: Buffer
        if used <= SMALL_BYTES:
            data = bytes(buffers.view[:used])
        else:
            data = buffers.view[:used]
            buffers.replace()
        began_s = perf_counter()
        run: list[tuple[Channel, list[Batch]]] = []
        run_start = run_stop = 0
        for channel, start, stop in pieces:
            end, batches = self._scan(channel, data, start, stop)
            if batches:
                if run and start != run_stop:
                    self._publish(run, data, run_start, run_stop)
                    run = []
                if not run:
                    run_start = start
                run.append((channel, batches))
                run_stop = end
            if end < stop or channel.connection.unfinished_bytes:
                if run:
                    self._publish(run, data, run_start, run_stop)
                    run = []
                try:
                    channel.connection.receive(data if stop - end == used else data[end:stop])
                except Exception:
                    self._drop(channel)
        if run:
            self._publish(run, data, run_start, run_stop)
        self._adapt(pieces, perf_counter() - began_s)
        if self._memory.is_full():
            for channel, _, _ in pieces:
                self._memory.hold(channel.connection)

    def _scan(
        self, channel: Channel, data: Buffer, start: int, stop: int
    ) -> tuple[int, list[Batch]]:
        """Where the plain messages of a read end, and their batches."""
        codec = channel.plain
        if codec is None:
            return start, []
        try:
            end, batches = codec.scan_plain(data, start, stop)
        except Exception:
            self._drop(channel)
            return stop, []
        if channel._is_gathering or stop - start < SMALL_READ_BYTES:  # noqa: SLF001
            self._small_messages += sum([len(batch) for batch in batches])
        return end, batches

    def _publish(
        self, run: list[tuple[Channel, list[Batch]]], data: Buffer, start: int, stop: int
    ) -> None:
        """Publish the messages of neighbouring reads.

        If all their subscribers take them as they arrived, those are written to first, and the
        log, which has said that it takes them, and the figures come after.
        """
        channel, batches = run[0]
        codec = channel.plain
        if codec is None:
            # It was closed while an earlier one was handled.
            return
        try:
            publisher = channel.connection.translator
            if len(run) > 1:
                by_name: dict[str, PumpedPublisher] = {}
                batches = []
                for channel, its_batches in run:
                    by_name[channel.connection.name] = channel.connection.translator
                    batches += its_batches
                publisher = JointPublisher(by_name)
            for channel, its_batches in run:
                for batch in its_batches:
                    batch.sender = channel.connection.name
            whole = codec.whole_of(batches, data, start, stop)
            lane = self._lane(batches)
            if whole is None or lane is None:
                self._bus.publish(batches, publisher, whole)
                return
            for outbox in lane:
                outbox.send(whole, batches, publisher)
            self._outboxes.flush()
            self._bus.publish_delivered(batches, publisher)
        except Exception:
            for channel, _ in run:
                self._drop(channel)

    def _lane(self, batches: list[Batch]) -> list[Outbox] | None:
        """The outboxes of the batches' subscribers, if all of them take the bytes as they are."""
        subscribers = self._bus.subscribers_of(batches)
        if subscribers is None:
            return None
        if subscribers is not self._lane_of:
            found: list[Any] = [getattr(one, "plain_outbox", None) for one in subscribers]
            self._lane_of = subscribers
            self._lane_boxes = None if None in found else found
        return self._lane_boxes

    def _adapt(self, pieces: list[tuple[Channel, int, int]], elapsed_s: float) -> None:
        """Read more at once while that is cheap, less when a read delays the others."""
        for channel, start, stop in pieces:
            if stop - start >= channel.read_bytes:
                if elapsed_s > READ_S_MAX:
                    channel.read_bytes = max(channel.read_bytes // 2, READ_BYTES_LEAST)
                elif elapsed_s < READ_S_MAX / 2:
                    most = len(self._buffers.view) - 2 * CARRY_BYTES_MAX
                    channel.read_bytes = min(channel.read_bytes * 2, most)

    def _drop(self, channel: Channel) -> None:
        """A bug of ours: it costs the connection, and nobody else."""
        logger.exception("an error in a connection")
        channel.abort()
