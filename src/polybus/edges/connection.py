"""A TCP connection: detect the protocol, then read, decode, hand on, write.

One loop drives every stream protocol. Bytes go up through the layers (TLS, gzip) to the codec, its
events to the translator; what the translator sends goes down through the outbox and the layers.

An idle connection owns no buffer at all. A read lands behind the bytes its codec left over, in the
server's current buffer; if batches may refer to it afterwards, the server takes another one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, cast

from polybus.batch import Batch, Buffer
from polybus.edges import local
from polybus.edges.boson_frames import BosonFramesTranslator
from polybus.edges.boson_properties import BosonPropertiesTranslator
from polybus.edges.goms import GomsTranslator
from polybus.edges.http.transport import HttpTranslator
from polybus.edges.layers import GzipLayer, Layer, TlsLayer
from polybus.edges.outbox import Lost, Outbox
from polybus.edges.queue import QueueTranslator
from polybus.edges.translator import Translator
from polybus.errors import PeerError
from polybus.wire.detect import detect

if TYPE_CHECKING:
    from polybus.edges.listener import Listener

READ_BYTES_FIRST = 64 << 10
READ_BYTES_LEAST = 8 << 10
READ_S_MAX = 0.025
FULL_READS = 32
# A small read is copied, so that few messages do not keep a whole read buffer alive.
SMALL_BYTES = 128 << 10
CARRY_BYTES_MAX = 64 << 10
CLOSE_TIMEOUT_S = 2.0
BACKLOG_GATE = "backlog"
LAYERS_GATE = "layers"

TRANSLATORS = {
    "boson-frames": BosonFramesTranslator,
    "boson-properties": BosonPropertiesTranslator,
    "goms": GomsTranslator,
    "http": HttpTranslator,
    "queue": QueueTranslator,
}
# What a connector may speak alone, before its peer has said anything.
UNDETECTED = ("goms", "queue")


class _Drain:
    """Somebody who waits for an outbox to drain."""

    def __init__(self, drained: asyncio.Future[None]) -> None:
        self._drained = drained

    def release(self, gate: Hashable) -> None:
        if not self._drained.done():
            self._drained.set_result(None)


class Connection(asyncio.BufferedProtocol):
    """One peer over TCP. Implements translator.Peer and outbox.Waiter."""

    __slots__ = (
        "_carry",
        "_closing",
        "_full_reads",
        "_head",
        "_held_by",
        "_layers",
        "_listener",
        "_peer_ended",
        "_read_bytes",
        "_server",
        "_transport",
        "_unfinished",
        "_unwrapped",
        "name",
        "outbox",
        "translator",
    )
    _transport: asyncio.Transport
    proven = True

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._server = listener.server
        self.name = ""
        self.translator: Translator | None = None
        self._layers: list[Layer] = []
        # What the layers have not given yet of the bytes at hand.
        self._unwrapped: Iterator[bytes] | None = None
        self._head = b""
        self._carry = b""
        self._read_bytes = READ_BYTES_FIRST
        # In a row, while the receive buffer is narrow; afterwards FULL_READS.
        self._full_reads = FULL_READS
        self._held_by: set[Hashable] = set()
        self._unfinished = 0
        self._closing = False
        self._peer_ended = False

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is one in all but inheritance.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        server = self._server
        address = transport.get_extra_info("peername")
        self.name = f"{address[0]}:{address[1]}" if address else "unknown"
        self.outbox = Outbox(server.outboxes, self._write, self._on_overflow)
        # Be told as soon as the socket does not take all: what waits here is counted and shared.
        transport.set_write_buffer_limits(0)
        if local.is_local(transport.get_extra_info):
            local.narrow(transport.get_extra_info("socket"))
            self._full_reads = 0
        if not server.admit(self):
            self._closing = True
            transport.abort()
            return
        protocols = self._listener.protocols
        if len(protocols) == 1 and self._listener.tls is None and protocols[0] in UNDETECTED:
            self._speak_protocol(protocols[0])

    def get_buffer(self, sizehint: int) -> memoryview:
        self._server.pace.before_read(self)
        view = self._server.buffers.view
        carried = len(self._carry)
        if carried:
            view[:carried] = self._carry
        return view[carried : carried + self._read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        if self._closing:
            return
        if self._full_reads < FULL_READS:
            self._widen_if_full(nbytes)
        buffers = self._server.buffers
        size = len(self._carry) + nbytes
        self._carry = b""
        data: Buffer
        if size <= SMALL_BYTES:
            data = bytes(buffers.view[:size])
        else:
            data = buffers.view[:size]
            buffers.replace()
        began = perf_counter() if nbytes >= self._read_bytes else 0.0
        try:
            if self._layers:
                self._unwrapped = self._unwrap(data, 0)
            else:
                self._understand(data)
            if self._unwrapped is not None:
                self._pull()
        except PeerError as error:
            self._answer_last(error)
        if began:
            self._adapt(perf_counter() - began)
        self._server.pace.after_read(self, nbytes)

    def eof_received(self) -> bool:
        self._peer_ended = True
        if self._closing:
            return False
        if self.translator is not None:
            while self.translator.codec.backlog:
                self._understand(b"")
            for event in self.translator.codec.close():
                self.translator.handle(event)
        # The peer may still read: a publisher that shuts down its side waits for its receipts.
        self._server.half_closed(self)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        if self.translator is not None:
            self.translator.codec.close()
            self.translator.leave_all()
        self._count_unfinished(0)
        self.outbox.close()
        self._server.forget(self)

    def pause_writing(self) -> None:
        self.outbox.pause()

    def resume_writing(self) -> None:
        self.outbox.resume()
        if self._closing and not self.outbox.bytes:
            self._end_stream()

    # Reading

    def _unwrap(self, data: Buffer, level: int) -> Iterator[bytes]:
        """What bytes mean above the layers, from `level` on."""
        for plain in self._layers[level].receive(data):
            if level + 1 < len(self._layers):
                yield from self._unwrap(plain, level + 1)
            else:
                yield plain

    def _pull(self) -> None:
        """Understand what the layers give, as long as nobody has to wait.

        A little gzip may be a lot of messages: between two pieces all that stops reading counts,
        and after a moment it is the others' turn.
        """
        began = perf_counter()
        while self._unwrapped is not None and not self._closing:
            if self._held_by and self._held_by != {LAYERS_GATE}:
                # Whoever holds us back lets us go on here.
                self.hold(LAYERS_GATE)
                break
            if perf_counter() - began > READ_S_MAX:
                self.hold(LAYERS_GATE)
                self._server.loop.call_soon(self._pull_on)
                break
            piece = next(self._unwrapped, None)
            if piece is None:
                self._unwrapped = None
                self.release(LAYERS_GATE)
            else:
                self._understand(piece)
        owed = self._layers[0].owed()
        if owed:
            self._transport.write(owed)
        if self._unwrapped is None and self._layers[0].ended:
            self.eof_received()

    def _pull_on(self) -> None:
        if self._unwrapped is None or self._closing:
            return
        try:
            self._pull()
        except PeerError as error:
            self._answer_last(error)

    def _understand(self, data: Buffer) -> None:
        translator = self.translator
        if translator is None:
            self._detect(data)
            return
        server = self._server
        server.publishing = self
        codec = translator.codec
        try:
            events = codec.receive(data)
            for event in events:
                translator.handle(event)
        finally:
            server.publishing = None
        if codec.backlog:
            # Others first: the rest of this read waits for the next turn of the loop.
            self.hold(BACKLOG_GATE)
            server.loop.call_soon(self._go_on)
            return
        unfinished = codec.unfinished_bytes
        if unfinished or self._unfinished:
            if unfinished < CARRY_BYTES_MAX and not self._layers:
                self._carry = codec.take_carry()
            self._count_unfinished(unfinished, completed=bool(events))
        if server.over_memory():
            server.hold_for_memory(self)

    def _go_on(self) -> None:
        """Go on with a read that the codec did not finish."""
        if self._closing:
            return
        self._understand(b"")
        if self.translator is not None and not self.translator.codec.backlog:
            self.release(BACKLOG_GATE)

    def _detect(self, data: Buffer) -> None:
        self._head += data
        server = self._server
        limit = server.config.limits.message_bytes_max
        wrapped = {layer.name for layer in self._layers}
        speaks = self._listener.protocols
        if "gzip" in wrapped:
            speaks = tuple(one for one in speaks if one.startswith("boson"))
        found = detect(self._head, speaks, limit)
        if found is None:
            if len(self._head) == len(data):
                server.assembly.detecting(self)
            return
        head, self._head = self._head, b""
        if found == "tls" and self._listener.tls is not None and not wrapped:
            server.assembly.detecting(self)
            self._layers.append(TlsLayer(self._listener.tls))
            self._unwrapped = self._unwrap(head, 0)
        elif found == "gzip" and "gzip" not in wrapped:
            server.assembly.detecting(self)
            self._layers.append(GzipLayer())
            # The pieces that are still to come from below go through the new layer by themselves.
            inside = self._unwrap(head, len(self._layers) - 1)
            self._unwrapped = chain(inside, self._unwrapped or ())
        elif found in TRANSLATORS:
            self._speak_protocol(found)
            self._understand(head)
        else:
            self._listener.reject(self, found)

    def _speak_protocol(self, protocol: str) -> None:
        self.translator = TRANSLATORS[protocol](self._server, self, self._listener.connector)
        self._server.assembly.update(self, 0, 0, completed=True)

    def _widen_if_full(self, nbytes: int) -> None:
        """A peer that fills its window faster than we read it gets a larger one."""
        is_full = nbytes >= local.NARROW_BYTES and not self._server.pace.rested
        self._full_reads = self._full_reads + 1 if is_full else 0
        if self._full_reads == FULL_READS:
            local.widen(self._transport.get_extra_info("socket"))

    def _adapt(self, elapsed_s: float) -> None:
        """Read more at once while that is cheap, less when a read keeps the loop from others."""
        if elapsed_s > READ_S_MAX:
            self._read_bytes = max(self._read_bytes // 2, READ_BYTES_LEAST)
        elif elapsed_s < READ_S_MAX / 2:
            self._read_bytes = min(self._read_bytes * 2, self._listener.read_bytes_max)

    def _count_unfinished(self, unfinished: int, *, completed: bool = False) -> None:
        before, self._unfinished = self._unfinished, unfinished
        self._server.assembly.update(self, before, unfinished, completed=completed)

    def _answer_last(self, error: PeerError) -> None:
        """A layer broke: say so if anything can still be said, and close."""
        if self.translator is not None:
            self.translator.bad(error)
        else:
            self._server.bad_peers.note(self.name, "unknown", error.code, error.text)
        self.close()

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

    def _write(self, data: Buffer) -> None:
        for layer in reversed(self._layers):
            data = layer.send(data)
        self._transport.write(data)

    # What HTTP needs of a transport

    @property
    def transport(self) -> asyncio.Transport:
        return self._transport

    @property
    def tls(self) -> ssl.SSLContext | None:
        return self._listener.tls if self._layers else None

    def is_closing(self) -> bool:
        return self._closing

    def write_now(self, data: Buffer) -> None:
        """Write past the outbox: the caller minds the peer's pace itself."""
        self._write(data)

    def close(self) -> None:
        """Close once what was sent is out, or after a moment if the peer does not read."""
        if self._closing:
            return
        self._closing = True
        if self.translator is not None:
            self.translator.leave_all()
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
        last = b""
        for layer in reversed(self._layers):
            # A peer that ended its TLS takes no more data in it.
            last = (b"" if layer.ended else layer.send(last)) + layer.finish()
        if last:
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

    def _abort_if_open(self) -> None:
        """The peer did not read the last of what it was sent."""
        if self in self._server.connections:
            self._transport.abort()

    def _on_overflow(self, lost: Lost) -> None:
        if self.translator is None:
            return
        if self._server.config.slow_subscriber == "drop-oldest" and lost.messages:
            self.translator.lost(lost)
            return
        text = "you read too slowly and your outbox is full (outbox-bytes-max)"
        self._server.bad_peers.note(self.name, self.translator.protocol, "outbox.full", text)
        self.outbox.reopen()
        self.translator.send_error("outbox.full", text)
        self.translator.leave_all()
        self.close()

    # Backpressure: this connection as a publisher

    def hold(self, gate: Hashable) -> bool:
        """Stop reading until the gate lets go; say whether that is new."""
        if gate in self._held_by or self._closing:
            return False
        if not self._held_by:
            self._transport.pause_reading()
        self._held_by.add(gate)
        return True

    def release(self, gate: Hashable) -> None:
        self._held_by.discard(gate)
        if self._closing:
            return
        if not self._held_by:
            self._transport.resume_reading()
        elif self._held_by == {LAYERS_GATE}:
            self._server.loop.call_soon(self._pull_on)

    def stop_reading(self) -> None:
        """For good: the bus shuts down."""
        self.hold("shutdown")

    def too_slow(self) -> None:
        """An unfinished message, or an unknown protocol, has taken too long."""
        if self._held_by:
            # We did not let it go on.
            self._server.assembly.excuse(self)
            return
        error = PeerError("peer.too-slow", "what you began to send did not come in time")
        self._answer_last(error)
