"""A TCP connection: read, detect the protocol, decode, pass on.

One loop drives every stream protocol. Bytes go up through the layers around the protocol, TLS and
gzip, to the codec, and its events to the translator. What the translator sends goes down again
(stream).

The first bytes show what a peer speaks: a protocol, or a layer whose content is detected again
(gzip inside TLS is two layers). Once a protocol is known and no layer is around it, the connection
drops its list of layers.

The pump reads the socket (pump). An idle connection owns no buffer: a read goes into a shared one,
after the bytes that the codec has left.
"""

import ssl
from collections.abc import Iterator, Sequence
from itertools import chain
from time import perf_counter

from polybus.batch import Buffer
from polybus.config import Connector
from polybus.edges.protocols.peer import DroppedMessages
from polybus.edges.protocols.translator import PlainTranslator, Translator
from polybus.edges.tcp.context import TcpContext
from polybus.edges.tcp.layers import GzipLayer, Layer, TlsLayer, unwrap
from polybus.edges.tcp.outbox import Outbox
from polybus.edges.tcp.pump import CARRY_BYTES_MAX
from polybus.edges.tcp.stream import LAYERS_GATE, Stream
from polybus.edges.tcp.transport import ReadInterceptor, SocketTransport
from polybus.errors import PeerError, UsageError
from polybus.services.accounts.access import AccountAccess
from polybus.wire.codec import LargePiece
from polybus.wire.detect import detect

PULL_S_MAX = 0.025
"""How long the layers of one connection may occupy the loop."""
BACKLOG_GATE = "backlog"
STRANGER_BYTES_MAX = 16 << 10
"""An unfinished message of a peer that has not logged in may have this size."""


class Connection(Stream):
    """One peer over TCP. Implements translator.Peer."""

    def __init__(
        self,
        tcp: TcpContext,
        connector: Connector,
        tls: ssl.SSLContext | None = None,
        *,
        is_admin: bool = False,
    ) -> None:
        """`is_admin`: it came through the administrator's socket."""
        super().__init__(tcp)
        self._connector = connector
        self._tls = tls
        self._speaks_queue = connector.protocols == ("queue",)
        self._requires_tls = connector.tls is not None and connector.tls.required
        self.is_admin = is_admin
        self.name = self.ip = ""
        self.opened_s = int(tcp.loop.time())
        # First bytes, not enough to detect the protocol.
        self._head = b""
        # What the layers have not produced yet from the bytes read.
        self._pieces: Iterator[bytes] | None = None
        self.translator: Translator | None = None
        self.carry = b""
        self.unfinished_bytes = 0

    # The pump calls these

    def connection_made(self, transport: SocketTransport) -> None:
        self.transport = transport
        tcp = self.tcp
        address = transport.get_extra_info("peername")
        # Empty for a Unix socket. A peer that has disconnected must not look like a local one.
        self.ip = "unknown" if address is None else address[0] if address else ""
        where = f"{address[0]}:{address[1]}" if address else "unknown"
        self.name = where + tcp.edge.context.node
        self.outbox = Outbox(tcp.outboxes, self.write_now, self._on_overflow)
        if not tcp.admit(self):
            self._closing = True
            transport.abort()
            return
        if self._speaks_queue:
            # It gets messages before it has sent anything, so nothing can be detected.
            if self._tls is None:
                self.speak("queue")
            else:
                self._add_layer(TlsLayer(self._tls), b"")

    def receive(self, data: Buffer) -> None:
        """Handle bytes of the peer, `carry` included."""
        if self._closing:
            return
        try:
            if self._layers:
                self._pieces = unwrap(self._layers, data)
            else:
                self.understand(data)
            if self._pieces is not None:
                self._pull()
        except PeerError as error:
            self._answer_last(error)

    def message_completed(self) -> None:
        """A message has ended: the time for the next begins with its first byte."""
        if self.unfinished_bytes:
            self._count_unfinished(0, completed=True)

    def eof_received(self) -> bool:
        self._peer_ended = True
        if self._closing:
            return False
        if self.translator is not None:
            while self.translator.codec.backlog:
                self.understand(b"")
            for event in self.translator.codec.close():
                self.translator.take(event)
        # The peer may still read: a publisher that shuts down its side waits for its receipts.
        if self.translator is None:
            self.tcp.half_closed(self)
        else:
            self.translator.when_idle(lambda: self.tcp.half_closed(self))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = self._is_lost = True
        if self.translator is not None:
            self.translator.codec.close()
            self.translator.leave_all()
            self.translator.let_go()
            self.translator = None
        self._count_unfinished(0)
        self.carry = self._head = b""
        self._pieces = None
        self._layers = None
        self._forget_stream()
        self.tcp.forget(self)

    # Reading

    def understand(self, data: Buffer) -> None:
        """Decode bytes of the protocol, or detect the protocol first."""
        translator = self.translator
        if translator is None:
            self._detect(data)
            return
        tcp = self.tcp
        codec = translator.codec
        events = codec.receive(data)
        for event in events:
            translator.take(event)
        if codec.backlog:
            # Let others run: the rest of this read waits for the next turn of the loop.
            self.hold(BACKLOG_GATE)
            tcp.loop.call_soon(self._go_on)
            return
        unfinished = codec.unfinished_bytes
        if unfinished or self.unfinished_bytes:
            if unfinished < CARRY_BYTES_MAX and self._layers is None:
                self.carry = codec.take_carry()
            completed = any(not isinstance(event, LargePiece) for event in events)
            self._count_unfinished(unfinished, completed=completed)
            if unfinished > STRANGER_BYTES_MAX and not translator.is_known:
                raise PeerError("auth.needed", "a login is required; log in first")
        if tcp.memory.is_full():
            tcp.memory.hold(self)

    def _go_on(self) -> None:
        """Continue a read that the codec did not finish."""
        if self._closing:
            return
        self.understand(b"")
        if self.translator is not None and not self.translator.codec.backlog:
            self.release(BACKLOG_GATE)

    def _pull(self) -> None:
        """Pass on what the layers produce, until a gate holds us or PULL_S_MAX has passed.

        A few bytes of gzip may be many messages, so backpressure applies between two pieces too.
        """
        assert self._layers
        began = perf_counter()
        while self._pieces is not None and not self._closing:
            if not self._held_by.keys() <= {LAYERS_GATE}:
                # The release of the last other gate continues here.
                self.hold(LAYERS_GATE)
                break
            if perf_counter() - began > PULL_S_MAX:
                self.hold(LAYERS_GATE)
                self.tcp.loop.call_soon(self.pull_on)
                break
            piece = next(self._pieces, None)
            if piece is None:
                self._pieces = None
                self.release(LAYERS_GATE)
            else:
                self.understand(piece)
        if owed := self._layers[0].owed():
            self.transport.write(owed)
        if self.translator is None and self._speaks_queue and self._layers[0].is_open:
            self.speak("queue")
        if self._pieces is None and self._layers[0].ended:
            self.eof_received()

    def pull_on(self) -> None:
        if self._pieces is None or self._closing:
            return
        try:
            self._pull()
        except PeerError as error:
            self._answer_last(error)

    def _detect(self, data: Buffer) -> None:
        """Collect first bytes until they show the protocol, then pass them on."""
        assert self._layers is not None
        self._head += data
        wrapped = {layer.name for layer in self._layers}
        speaks: Sequence[str] = self._connector.protocols
        if "gzip" in wrapped:
            speaks = tuple(one for one in speaks if one.startswith("boson"))
        found = detect(self._head, speaks, self.tcp.context.config.limits.message_bytes_max)
        if found is None:
            if len(self._head) == len(data):
                self.tcp.assembly.detecting(self)
            return
        head, self._head = self._head, b""
        if found == "tls" and self._tls is not None and not wrapped:
            self._add_layer(TlsLayer(self._tls), head)
        elif found == "gzip" and "gzip" not in wrapped:
            self._add_layer(GzipLayer(), head)
        elif found in self.tcp.translators:
            self.speak(found)
            if self._requires_tls and "tls" not in wrapped:
                # In the detected protocol.
                raise PeerError("tls.required", "this port requires TLS")
            if wrapped and self.translator is not None:
                try:
                    self.translator.enter_by_certificate()
                except UsageError as error:
                    raise PeerError(error.code, error.text) from error
            self.understand(head)
        else:
            self._reject(found)

    def _add_layer(self, layer: Layer, head: bytes) -> None:
        assert self._layers is not None
        self.tcp.assembly.detecting(self)
        self._layers.append(layer)
        # Pieces that are still to come from the layers below pass through the new layer.
        inside = unwrap(self._layers, head, len(self._layers) - 1)
        self._pieces = chain(inside, self._pieces or ())

    def speak(self, protocol: str) -> None:
        """The peer's protocol is known."""
        if not self._layers:
            self._layers = None
        self.translator = self.tcp.translators[protocol](self, self._connector)
        if self._layers is None:
            self.outbox.write_through(self.transport.write)
            if self.translator.is_known:
                self.entered()
        if not self.translator.is_known:
            self.later(self.tcp.context.config.limits.login_timeout_s, self._expect_login)
        self.tcp.assembly.update(self, 0, 0, completed=True)

    def _expect_login(self) -> None:
        if self.translator is not None and not (self._closing or self.translator.is_known):
            error = PeerError("auth.needed", "no login arrived within login-timeout-s")
            self._answer_last(error)

    def progressed(self, size: int) -> None:
        self.tcp.assembly.progressed(self, size)

    def entered(self) -> None:
        """The peer is logged in: the pump alone can handle its plain messages."""
        if self._layers is None and isinstance(self.translator, PlainTranslator):
            self.transport.plain = self.translator.codec
            self.transport.access = self.translator.access
            self.translator.plain_outbox = self.outbox

    def count_for(self, access: AccountAccess) -> None:
        """A request comes from this account. Raises UsageError `account.connections`."""
        if self.translator is not None:
            self.translator.count_for(access)

    def intercept_reads(self, taker: ReadInterceptor) -> None:
        """Offer reads to this first, unless there are layers around the protocol."""
        if self._layers is None and not self._closing:
            self.transport.taker = taker

    def _reject(self, found: str) -> None:
        """Close a connection whose protocol its connector does not speak."""
        speaks = ", ".join(self._connector.protocols)
        text = f"first bytes are {found}; this connector speaks {speaks}"
        self.tcp.edge.bad_peers.record(self.name, "unknown", "detect.unknown", text)
        self.close()

    def _count_unfinished(self, unfinished: int, *, completed: bool = False) -> None:
        before, self.unfinished_bytes = self.unfinished_bytes, unfinished
        self.tcp.assembly.update(self, before, unfinished, completed=completed)

    def _answer_last(self, error: PeerError) -> None:
        """Send a final error if the protocol is known, and close."""
        if self.translator is not None:
            self.translator.bad(error)
        else:
            self.tcp.edge.bad_peers.record(self.name, "unknown", error.code, error.text)
        self.close()

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context if the connection is encrypted, once its protocol is known."""
        return None if self._layers is None else self._tls

    @property
    def certificate_name(self) -> str | None:
        """The common name of the peer's certificate, which an authority in `client-ca` signed.

        Known when the protocol is.
        """
        lowest = self._layers[0] if self._layers else None
        return lowest.certificate_name if isinstance(lowest, TlsLayer) else None

    # Closing

    def close(self) -> None:
        """Close when everything sent is out, or after a timeout if the peer does not read."""
        if self._closing:
            return
        self._closing = True
        self.transport.plain = self.transport.taker = None
        if self.translator is not None:
            self.translator.leave_all()
        self._close_stream()

    def _on_overflow(self, lost: DroppedMessages) -> None:
        if self.translator is None:
            return
        if self._closing:
            # Its last data cannot wait any longer.
            self.outbox.close()
            self.abort()
            return
        if self.tcp.outboxes.policy == "drop-oldest" and lost.messages:
            self.translator.lost(lost)
            return
        text = "you read too slowly and your outbox is full (outbox-bytes-max)"
        self.translator.record_error("outbox.full", text)
        self.translator.note_undelivered(lost, "outbox.full")
        self.outbox.reopen()
        self.translator.send_error("outbox.full", text)
        self.translator.leave_all()
        self.close()

    def too_slow(self) -> None:
        """An unfinished message, or an unknown protocol, has taken too long."""
        if self._held_by:
            # It waits for us, so its time starts again.
            self.tcp.assembly.excuse(self)
            return
        error = PeerError("peer.too-slow", "your message did not arrive in time")
        self._answer_last(error)
