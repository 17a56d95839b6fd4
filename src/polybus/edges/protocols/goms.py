"""goMS on the bus.

    register   subscribe      logout   unsubscribe
    send       publish        close    end of the connection
    download   read a blob

A client may send only to topics it is registered to; other sends are ignored and counted. The
sender never gets its own message. One send to several topics is one message per receiver, listing
the topics that receiver is registered to.
"""

import asyncio
import codecs
from array import array
from base64 import b64encode
from collections.abc import Sequence

import msgspec

from polybus import names
from polybus.batch import Batch
from polybus.bus.subscriptions import Publisher
from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.edges.protocols.outgoing_payload import PayloadFraming, reference_of
from polybus.edges.protocols.peer import Peer
from polybus.edges.protocols.translator import Translator
from polybus.errors import PeerError, PolybusError, UsageError
from polybus.services.blobs.blobs import StoredPayload
from polybus.services.catch_up import resolve
from polybus.wire import goms as wire
from polybus.wire.codec import Bad, LargeBegin, LargeEnd, LargePiece, Publish
from polybus.wire.positions import Position, Since, Start, parse_start

# Our codes as goMS's; a code that is not listed is a general error.
CODES = {
    "tls.required": "000403",
    "outbox.full": "000429",
    "outbox.dropped": "000429",
    "log.full": "002001",
    "log.failed": "002001",
    "log.denied": "002001",
    "log.frozen": "002001",
    "log.refused": "002001",
    "log.replicas": "002001",
    "log.unreachable": "002001",
    "log.damaged": "001003",
    "log.offset-unknown": "001003",
    "position.invalid": "000001",
    "subscription.too-many": "000003",
    "auth.needed": "000401",
    "auth.failed": "000401",
    "auth.ended": "000401",
    "auth.busy": "000429",
    "account.rate": "000429",
    "account.connections": "000429",
}
WITH_OFFSETS = "goms+offsets"
NO_RECEIPT_ID = array("i", [0, 0])
DOWNLOAD_GATE = "download"
CHUNK_BYTES_MAX = 1 << 20
BASE64_PIECE_BYTES = 192 << 10
"""A multiple of 3, so that pieces of base64 can be joined."""


class TextEscaper:
    """Text in pieces of bytes, as the content of a JSON string."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def escape(self, piece: bytes) -> bytes:
        return msgspec.json.encode(self._decoder.decode(piece))[1:-1]


class GomsTranslator(Translator):
    protocol = wire.PROTOCOL
    takes_own = False
    # Its codec ignores whatever follows a close.
    before_login = (Bad, wire.Close)

    def __init__(self, edge: Edge, peer: Peer, connector: Connector) -> None:
        super().__init__(edge, peer)
        self.codec = wire.GomsCodec(self.limits)
        self._always_ack = connector.reg_ack
        self._with_offsets = False
        self.streams_references = connector.inline_references and connector.protocol == "tcp"
        self._downloads: asyncio.Task[None] | None = None
        # Sends that asked for a send-ack: their batches by the last one.
        self._acks: dict[Batch, list[Batch]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no request of the peer is under way."""
        return not (self.subscriptions or self.is_logging_in or self._downloads)

    def handle(self, event: wire.Event) -> None:
        match event:
            case Publish(batches):
                self._send_batches(batches)
            case wire.Send():
                self._send(event)
            case wire.Download():
                self._download(event)
            case wire.Register():
                self._register(event)
            case wire.Logout(topics):
                self._logout(topics)
            case wire.Close():
                self.peer.close()
            case Bad(error):
                self.bad(error)

    # Client → server

    def _register(self, event: wire.Register) -> None:
        unknown, already, registered = [], [], []
        if event.offsets:
            self._with_offsets = True
        start = parse_start(event.start or "latest")
        for shown in event.topics:
            topic = self.access.full(shown)
            if topic in self.subscriptions:
                already.append(shown)
                continue
            try:
                self.subscribe(topic, event.start or "latest")
            except UsageError as error:
                if error.code == "topic.unknown":
                    unknown.append(shown)
                else:
                    self.complain(error.code, error.text)
            except PolybusError as error:
                self.complain("goms.001003", f"{error.code}: {error.text}")
            else:
                registered.append(topic)
        if unknown:
            self.complain("goms.001001", ",".join(unknown))
        if already:
            self.complain("goms.001002", ",".join(already))
        if event.ack or self._always_ack:
            begins = self._begins(registered, start) if event.offsets else None
            self.reply(wire.encode_reg_ack([self.access.shown(one) for one in registered], begins))

    def _begins(self, topics: Sequence[str], start: Start) -> list[Position] | None:
        """The first position of each topic; None for a time, which only the disk can resolve."""
        if isinstance(start, Since):
            return None
        return [Position(*resolve(self.bus.log, topic, start)) for topic in topics]

    def _may_send(self, topic: str) -> bool:
        """Whether it is registered, or cannot be because it may publish to the topic but not read
        it.
        """
        if topic in self.subscriptions:
            return True
        known = self.access.topics
        return known is not None and topic in known and topic not in self.access.readable

    def _send_batches(self, batches: Sequence[Batch]) -> None:
        full = self.access.full
        allowed = [batch for batch in batches if self._may_send(full(batch.topic))]
        if len(allowed) < len(batches):
            ignored = sum(map(len, batches)) - sum(map(len, allowed))
            self.edge.bad_peers.count("goms.send-ignored", ignored)
        if allowed:
            self.publish(allowed)

    def _send(self, event: wire.Send) -> None:
        if len(event.value) > self.limits.inline_bytes_max:
            self.take(LargeBegin())
            self.take(LargePiece(event.value))
            self.take(LargeEnd(event.topics, headers=event.headers, ack=event.ack))
            return
        topics = self._sendable(event.topics, ack=event.ack)
        batches = [Batch.of(topic, [event.value], headers=[event.headers]) for topic in topics]
        if batches:
            self._publish_joint(batches, ack=event.ack)

    def _sendable(self, shown: Sequence[str], *, ack: bool) -> list[str]:
        """The full names of the topics that the client may send to; others are ignored."""
        asked = dict.fromkeys(self.access.full(one) for one in shown)
        topics = [
            topic for topic in asked if self._may_send(topic) and not names.is_reserved(topic)
        ]
        if len(topics) < len(asked):
            self.edge.bad_peers.count("goms.send-ignored", 1)
            if ack:
                ignored = [self.access.shown(one) for one in asked if one not in topics]
                text = f"not registered to {','.join(ignored)}: register first"
                self.complain("goms.002001", text)
        return topics

    def _publish_joint(self, batches: list[Batch], *, ack: bool) -> None:
        for batch in batches:
            batch.protocol = self.protocol
            batch.sender = self.sender
        if ack:
            batches[-1].receipt_ids = NO_RECEIPT_ID
            self._acks[batches[-1]] = batches
        self.bus.publish_joint(batches, self)

    # Large payloads

    def topics_of_large(self, end: LargeEnd) -> list[str]:
        return self._sendable(end.topics, ack=end.ack)

    def publish_large(self, kept: StoredPayload, end: LargeEnd) -> list[Batch]:
        batches = [kept.batch(topic, dict(end.headers or {})) for topic in kept.blobs]
        self._publish_joint(batches, ack=end.ack)
        return batches

    def publish_small(self, value: bytes, end: LargeEnd) -> None:
        self._send(wire.Send(end.topics, value, end.headers, end.ack))

    def refuse_large(self, end: LargeEnd, error: PolybusError) -> None:
        code = error.code if error.code.startswith("goms.") else "goms.002001"
        self.complain(code, f"{error.code}: {error.text}")

    def _download(self, event: wire.Download) -> None:
        """Answer with a chunk; reading from the client resumes when it is sent."""
        self.peer.hold(DOWNLOAD_GATE)
        before = self._downloads
        self._downloads = self.edge.context.loop.create_task(self._send_chunk(event, before))

    async def _send_chunk(self, event: wire.Download, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            # In the order of the requests: one read may have many.
            await asyncio.wait([before])
        try:
            await self.drained()
            async with self.edge.context.memory.catch_up_turn():
                self.reply(await self._chunk(event))
        except PolybusError as error:
            is_unknown = error.code == "blob.unknown"
            self.complain("goms.004001", event.id[:64] if is_unknown else str(error))
        if self._downloads is asyncio.current_task():
            self._downloads = None
            self.peer.release(DOWNLOAD_GATE)

    async def _chunk(self, event: wire.Download) -> bytes:
        blobs = self.edge.blobs
        reader = await blobs.reader(blobs.find(self.access, event.id))
        if event.start > reader.size:
            text = f"start is {event.start}, but the payload has {reader.size} bytes"
            raise PeerError("goms.004001", text, final=False)
        size = min(max(event.bytes_max, 1), CHUNK_BYTES_MAX)
        data = await blobs.read(reader, event.start, size, self.access.account)
        is_last = event.start + len(data) >= reader.size
        return wire.encode_chunk(event.id, event.start, data, is_last=is_last)

    def let_go(self) -> None:
        if self._downloads is not None:
            self._downloads.cancel()
            self._downloads = None
        super().let_go()

    def payload_framing(self, batch: Batch) -> PayloadFraming:
        reference = reference_of(batch)
        offsets = None
        if self._with_offsets:
            offsets = [Position(batch.epoch, batch.first_offset)]
        headers = batch.headers[0] if batch.headers else None
        is_text = reference.is_text
        head = wire.encode_large([batch.topic], headers, offsets, text=is_text)
        # Pieces of text may end within a character, which is kept for the next one.
        wrap = TextEscaper().escape if is_text else b64encode
        return PayloadFraming(head, wrap, b'"}\n', BASE64_PIECE_BYTES)

    def _logout(self, topics: Sequence[str] | None) -> None:
        if topics is None:
            self.leave_all()
            return
        absent = [shown for shown in topics if self.access.full(shown) not in self.subscriptions]
        for shown in topics:
            self.unsubscribe(self.access.full(shown))
        if absent:
            self.complain("goms.003001", ",".join(absent))

    # Server → client

    def deliver(self, batch: Batch, publisher: Publisher | None = None) -> None:
        if batch.headers is not None and self.is_streamed(batch):
            super().deliver(batch, publisher)
            return
        if self._with_offsets:
            encoding = self.encoded(batch, WITH_OFFSETS, wire.encode_with_offsets)
        else:
            encoding = self.encoded(batch, self.protocol, wire.encode)
        self.peer.send(encoding, (batch,), publisher)

    def deliver_joint(self, batches: Sequence[Batch], publisher: Publisher | None = None) -> None:
        if len(batches) == 1 or self.is_streamed(batches[0]):
            super().deliver_joint(batches, publisher)
            return
        first = batches[0]
        offsets = None
        if self._with_offsets:
            offsets = [Position(batch.epoch, batch.first_offset) for batch in batches]
        headers = first.headers[0] if first.headers else None
        topics = [self.access.shown(batch.topic) for batch in batches]
        message = wire.encode_message(topics, first.value(0), headers, offsets)
        self.peer.send(message, batches, publisher)

    def receipt(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            # Without the batches that were refused.
            stored = [one for one in self._acks.pop(batch) if one.first_offset >= 0]
            topics = [self.access.shown(one.topic) for one in stored]
            offsets = [Position(one.epoch, one.first_offset) for one in stored]
            self.peer.send(wire.encode_send_ack(topics, offsets))

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        self._acks.pop(batch, None)
        error = self.in_own_words(batch, error)
        is_registered = batch.topic in self.subscriptions
        if error.code == "topic.reserved" or (error.code == "topic.unknown" and not is_registered):
            self.edge.bad_peers.count("goms.send-ignored", len(batch))
            return
        code = error.code if error.code == "account.rate" else "goms.002001"
        self.complain(code, f"{error.code}: {error.text}")

    def topic_deleted(self, topic: str) -> None:
        self.subscriptions.pop(topic, None)
        self.complain("goms.001001", self.access.shown(topic))

    def tell_login(self, account: str) -> None:
        self.reply(wire.encode_login_ack(account))

    def send_error(self, code: str, text: str) -> None:
        own = code.removeprefix("goms.")
        if own == code:
            own = CODES.get(code, "000001")
            text = f"{code}: {text.removeprefix(f'{code}: ')}"
        self.reply(wire.encode_error(own, text))
