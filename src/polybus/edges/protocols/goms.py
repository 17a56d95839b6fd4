"""goMS on the bus.

    register   subscribe      logout   unsubscribe
    send       publish        close    end of the connection

A client may send only to topics it is registered to; other sends are ignored and counted. The
sender never gets its own message. One send to several topics is one message per receiver, listing
the topics that receiver is registered to.
"""

from array import array
from collections.abc import Sequence

from polybus import names
from polybus.batch import Batch
from polybus.bus.subscriptions import Publisher
from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.edges.protocols.translator import Peer, Translator
from polybus.errors import PolybusError, UsageError
from polybus.services.replay import resolve
from polybus.wire import goms as wire
from polybus.wire.codec import Bad, Publish
from polybus.wire.positions import Position, Since, Start, parse_start

# Our codes as goMS's; a code that is not listed is a general error.
CODES = {
    "tls.required": "000403",
    "outbox.full": "000429",
    "outbox.dropped": "000429",
    "log.full": "002001",
    "log.failed": "002001",
    "log.frozen": "002001",
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


class GomsTranslator(Translator):
    protocol = wire.PROTOCOL
    takes_own = False

    def __init__(self, edge: Edge, peer: Peer, connector: Connector) -> None:
        super().__init__(edge, peer)
        self.codec = wire.GomsCodec(self.limits)
        self._always_ack = connector.reg_ack
        self._with_offsets = False
        # Sends that asked for a send-ack: their batches by the last one.
        self._acks: dict[Batch, list[Batch]] = {}

    def handle(self, event: wire.Event) -> None:
        match event:
            case Publish(batches):
                self._send_batches(batches)
            case wire.Send():
                self._send(event)
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
        """Whether it is registered, or cannot be: it may publish to the topic and not read it."""
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
        asked = dict.fromkeys(self.access.full(shown) for shown in event.topics)
        topics = [
            topic for topic in asked if self._may_send(topic) and not names.is_reserved(topic)
        ]
        if not topics:
            self.edge.bad_peers.count("goms.send-ignored", 1)
            if event.ack:
                self.reply(wire.encode_send_ack([], []))
            return
        batches = []
        for topic in topics:
            batch = Batch.of(topic, [event.value], headers=[event.headers])
            batch.protocol = self.protocol
            batch.sender = self.peer.name
            batches.append(batch)
        if event.ack:
            batches[-1].receipt_ids = NO_RECEIPT_ID
            self._acks[batches[-1]] = batches
        self.bus.publish_joint(batches, self)

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
        if self._with_offsets:
            encoding = self.encoded(batch, WITH_OFFSETS, wire.encode_with_offsets)
        else:
            encoding = self.encoded(batch, self.protocol, wire.encode)
        self.peer.send(encoding, (batch,), publisher)

    def deliver_joint(self, batches: Sequence[Batch], publisher: Publisher | None = None) -> None:
        if len(batches) == 1:
            self.deliver(batches[0], publisher)
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
        number = own if own != code else CODES.get(code, "000001")
        self.reply(wire.encode_error(number, text))
