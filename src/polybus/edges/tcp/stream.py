"""A connection's socket, without its protocol: writing, closing, and holding back reads.

Sent bytes wait in the outbox and pass through the layers around the protocol.

A connection, its outbox, its timers, its translator and the layer above it refer to each other.
When it is lost it releases all of them, so that its memory is free at once: `polybus serve`
hardly ever looks for reference cycles.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Hashable, Sequence

from polybus.batch import Batch, Buffer
from polybus.bus.subscriptions import Publisher
from polybus.edges.tcp.context import TcpContext
from polybus.edges.tcp.layers import Layer, finish, wrap
from polybus.edges.tcp.outbox import Outbox
from polybus.edges.tcp.transport import SocketTransport

CLOSE_TIMEOUT_S = 2.0
LAYERS_GATE = "layers"
# SO_LINGER with zero seconds: closing the socket then sends a reset.
NO_LINGER = struct.pack("ii", 1, 0)


class Stream:
    """The half of a connection that writes and closes. Implements bus.Holdable."""

    transport: SocketTransport
    outbox: Outbox

    def __init__(self, tcp: TcpContext) -> None:
        self.tcp = tcp
        # The lowest first; None once the protocol is known and no layer is around it.
        self._layers: list[Layer] | None = []
        # The gates, as keys: an empty set has 216 bytes, an empty dict 48.
        self._held_by: dict[Hashable, None] = {}
        self._timers: tuple[asyncio.TimerHandle, ...] = ()
        self._closing = False
        self._peer_ended = False
        self._is_lost = False
        # While a large payload is streamed: whether the transport takes more of it.
        self._room: asyncio.Event | None = None

    # The transport calls these

    def pause_writing(self) -> None:
        if self._room is not None:
            self._room.clear()
        else:
            self.outbox.pause()

    def resume_writing(self) -> None:
        if self._room is not None:
            self.outbox.quiet_s = 0.0
            self._room.set()
            return
        self.outbox.resume()
        if self._closing and not self.outbox.held_bytes:
            self._end_stream()

    # Writing

    def flush(self) -> None:
        self.outbox.flush()

    async def drained(self) -> None:
        await self.outbox.drained()

    def send(
        self, data: Buffer, batches: Sequence[Batch] = (), publisher: Publisher | None = None
    ) -> None:
        self.outbox.send(data, batches, publisher)

    def write_now(self, data: Buffer) -> None:
        """Write without the outbox: the caller handles backpressure itself."""
        if self._layers is not None:
            data = wrap(self._layers, data)
        if data:
            self.transport.write(data)

    async def stream_out(self, pieces: AsyncIterator[bytes]) -> None:
        """Write pieces with nothing between them; whatever else is sent waits in the outbox."""
        outbox, ledger = self.outbox, self.tcp.memory.ledger
        outbox.flush()
        while outbox.paused and not self._closing:
            await outbox.drained()
            outbox.flush()
        if self._closing:
            return
        room = self._room = asyncio.Event()
        room.set()
        outbox.pause()
        try:
            async for piece in pieces:
                if self._closing:
                    break
                self.write_now(piece)
                if not room.is_set():
                    ledger.hold(piece)
                    await room.wait()
                    ledger.release(piece)
        finally:
            self._room = None
            if not self._is_lost:
                outbox.resume()
                if self._closing and not outbox.held_bytes:
                    self._end_stream()

    # Closing

    def is_closing(self) -> bool:
        return self._closing

    def _close_stream(self) -> None:
        """Close when everything sent is out, or after CLOSE_TIMEOUT_S if the peer does not read.

        Until then the outbox counts what the transport holds: many peers that do not read their
        last answer would fill our memory.
        """
        if self._held_by:
            self._held_by = {}
            self.transport.resume_reading()
        self.outbox.flush()
        if not self.outbox.held_bytes:
            self._end_stream()
        self.later(CLOSE_TIMEOUT_S, self._abort_if_open)

    def _end_stream(self) -> None:
        """Everything is sent: send EOF, and close at the peer's EOF.

        Until then its bytes are read and discarded. If we closed with unread bytes, TCP would
        discard what the peer has not read yet: the error that says why we close.
        """
        if self.outbox.closed:
            return
        self.outbox.close()
        if self._layers is not None and (last := finish(self._layers)):
            self.transport.write(last)
        if self._peer_ended:
            self.transport.close()
            return
        try:
            self.transport.write_eof()
        except OSError:
            self.transport.abort()

    def abort(self) -> None:
        self._closing = True
        self.transport.abort()

    def reset(self) -> None:
        """End at once with a reset, which cannot be mistaken for an orderly end."""
        if self._is_lost:
            return  # Its socket is closed.
        self.outbox.flush()
        self.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER
        )
        self.abort()

    def _abort_if_open(self) -> None:
        """The peer did not read everything in time."""
        if not self._is_lost:
            self.transport.abort()

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call this after a time, unless the connection is lost before."""
        self._timers += (self.tcp.loop.call_later(delay_s, call),)

    def _forget_stream(self) -> None:
        """The connection is lost: refer to nothing that refers to it."""
        for timer in self._timers:
            timer.cancel()
        self._timers = ()
        self._held_by.clear()
        if self._room is not None:
            self._room.set()
        self.outbox.forget_peer()

    # Backpressure: this connection as a publisher

    def hold(self, gate: Hashable) -> bool:
        """Stop reading until the gate is released; return False if it already holds us."""
        if gate in self._held_by or self._closing:
            return False
        if not self._held_by:
            self.transport.pause_reading()
        self._held_by[gate] = None
        return True

    def release(self, gate: Hashable) -> None:
        self._held_by.pop(gate, None)
        if self._closing:
            return
        if not self._held_by:
            self.transport.resume_reading()
        elif self._held_by.keys() == {LAYERS_GATE}:
            self.tcp.loop.call_soon(self.pull_on)

    def pull_on(self) -> None:
        """Only LAYERS_GATE holds us: pass on what the layers have left."""
        raise NotImplementedError

    def stop_reading(self) -> None:
        """Stop for good: the bus shuts down."""
        self.hold("shutdown")
