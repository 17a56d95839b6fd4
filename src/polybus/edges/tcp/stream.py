"""A connection's socket, without its protocol: what is sent goes out, and reading can be held.

What is sent waits in the outbox and goes down through what is around the protocol (wrapping).
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from polybus.batch import Batch, Buffer
from polybus.edges.tcp.outbox import Outbox
from polybus.edges.tcp.wrapping import LAYERS_GATE, Wrapping

if TYPE_CHECKING:
    from polybus.edges.server import Server

CLOSE_TIMEOUT_S = 2.0
LARGE_BYTES = 64 << 10
# On, and no time at all: then the end of a socket is a reset.
NO_LINGER = struct.pack("ii", 1, 0)


class _Drain:
    """Somebody who waits for an outbox to drain."""

    def __init__(self, drained: asyncio.Future[None]) -> None:
        self._drained = drained

    def release(self, gate: Hashable) -> None:
        if not self._drained.done():
            self._drained.set_result(None)


class Stream(asyncio.BufferedProtocol):
    """The half of a connection that writes and closes. Implements outbox.Waiter."""

    __slots__ = (
        "_closing",
        "_held_by",
        "_peer_ended",
        "_server",
        "_transport",
        "_wrapping",
        "outbox",
    )
    _transport: asyncio.Transport
    outbox: Outbox

    def __init__(self, server: Server, wrapping: Wrapping) -> None:
        self._server = server
        # None once the protocol is known and no layer is around it.
        self._wrapping: Wrapping | None = wrapping
        self._held_by: set[Hashable] = set()
        self._closing = False
        self._peer_ended = False

    # asyncio calls these

    def pause_writing(self) -> None:
        self.outbox.pause()

    def resume_writing(self) -> None:
        self.outbox.resume()
        if self._closing and not self.outbox.bytes:
            self._end_stream()

    # Writing

    def flush(self) -> None:
        self.outbox.flush()

    async def drained(self) -> None:
        if self.outbox.paused and not self.outbox.closed:
            drained = self._server.loop.create_future()
            self.outbox.add_drain(_Drain(drained))
            await drained

    def send(self, data: Buffer, batches: Sequence[Batch] = ()) -> None:
        self.outbox.send(data, batches)
        publisher = self._server.publishing
        if publisher is not None and self.outbox.wants_wait() and publisher.hold(self.outbox):
            self.outbox.add_waiter(publisher)

    def write_now(self, data: Buffer) -> None:
        """Write past the outbox: the caller minds the peer's pace itself."""
        if self._wrapping is not None:
            data = self._wrapping.wrap(data)
        if len(data) >= LARGE_BYTES:
            data = self._write_large(data)
        if data:
            self._transport.write(data)

    def _write_large(self, data: Buffer) -> Buffer:
        """Write as much as the socket takes at once; return the rest.

        A transport keeps the interpreter to itself while it writes. This lets go of it, so that
        the committer can work meanwhile.
        """
        transport = self._transport
        if self._closing or transport.is_closing() or transport.get_write_buffer_size():
            return data
        try:
            written = os.write(transport.get_extra_info("socket").fileno(), data)
        except OSError:
            # Full, or broken: the transport finds out by itself.
            return data
        return memoryview(data)[written:]

    @property
    def transport(self) -> asyncio.Transport:
        return self._transport

    # Closing

    def is_closing(self) -> bool:
        return self._closing

    def _close_stream(self) -> None:
        """Close once what was sent is out, or after a moment if the peer does not read."""
        if self._held_by:
            self._held_by.clear()
            self._transport.resume_reading()
        self.outbox.flush()
        if not self.outbox.bytes:
            self._end_stream()
        self._server.loop.call_later(CLOSE_TIMEOUT_S, self._abort_if_open)

    def _end_stream(self) -> None:
        """Everything is sent: say so, and close when the peer has said the same.

        Until then its bytes are read and thrown away. If we closed with bytes unread, TCP would
        throw away what the peer has not read of ours: the error that says why we close.
        """
        if self.outbox.closed:
            return
        self.outbox.close()
        if self._wrapping is not None and (last := self._wrapping.finish()):
            self._transport.write(last)
        if self._peer_ended:
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:
            self._transport.abort()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def reset(self) -> None:
        """End at once with a reset, which nobody takes for an orderly end."""
        self.outbox.flush()
        self._transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER
        )
        self.abort()

    def _abort_if_open(self) -> None:
        """The peer did not read the last of what it was sent."""
        if self in self._server.connections:
            self._transport.abort()

    # Backpressure: this connection as a publisher

    def hold(self, gate: Hashable) -> bool:
        """Stop reading until the gate lets go; say whether that is new."""
        if gate in self._held_by or self._closing:
            return False
        if not self._held_by:
            self._transport.pause_reading()
        self._held_by.add(gate)
        return True

    def is_held_besides(self, gate: Hashable) -> bool:
        """Whether any other gate holds it."""
        return not self._held_by <= {gate}

    def release(self, gate: Hashable) -> None:
        self._held_by.discard(gate)
        if self._closing:
            return
        if not self._held_by:
            self._transport.resume_reading()
        elif self._wrapping is not None and self._held_by == {LAYERS_GATE}:
            self._server.loop.call_soon(self._wrapping.go_on)

    def stop_reading(self) -> None:
        """For good: the bus shuts down."""
        self.hold("shutdown")
