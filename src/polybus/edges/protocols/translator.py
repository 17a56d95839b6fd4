"""What all protocols' translators share: one peer's subscriptions, replays and replies.

A translator stands between a peer and the bus. It turns its codec's events into bus calls and the
bus's batches into its protocol's bytes; its subclass has the table of words (goMS says register
where the bus says subscribe).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from polybus import names
from polybus.batch import Batch, Buffer
from polybus.edges.tcp.outbox import Lost
from polybus.errors import PeerError, PolybusError, StorageError, UsageError
from polybus.services.replay import Replay
from polybus.wire.codec import Codec
from polybus.wire.positions import SubscribeLine

if TYPE_CHECKING:
    from polybus.edges.server import Server

EVERYTHING = "*"


class Peer(Protocol):
    """Where a translator's bytes go: a TCP connection or a UDP address."""

    name: str
    proven: bool
    """Whether its address cannot be forged."""

    def flush(self) -> None:
        """Write now what would go out at the end of the loop turn."""
        ...

    async def drained(self) -> None:
        """Wait until the peer takes more."""
        ...

    def send(self, data: Buffer, batches: Sequence[Batch] = ()) -> None:
        """Send the bytes of batches, or of a reply."""
        ...

    def close(self) -> None:
        """Close once everything sent before is out."""
        ...


class Translator:
    """One peer's side of the bus, in one protocol."""

    protocol: ClassVar[str]
    takes_own = True
    codec: Codec[Any]

    def __init__(self, server: Server, peer: Peer) -> None:
        self.server = server
        self.bus = server.bus
        self.peer = peer
        self.subscriptions: set[str] = set()
        # Topics whose positions the peer asked to be told.
        self._told: set[str] = set()
        self._everything = False
        self._tell_new = False
        self._replays: dict[str, Replay] = {}
        # Ticket, epoch and offset of the last message that did not go out in a whole read.
        self._last: tuple[int, int, int] | None = None
        # Why the last message or part was refused, as code and text: an error holds much more.
        self._refusal: tuple[str, str] | None = None

    # What a subclass says in its own words

    def handle(self, event: Any) -> None:
        """Act on one event of the codec."""
        raise NotImplementedError

    def encode(self, batch: Batch) -> Buffer:
        raise NotImplementedError

    def send_error(self, code: str, text: str) -> None:
        raise NotImplementedError

    def receipt(self, batch: Batch) -> None:
        raise NotImplementedError

    def deny_receipt(self, receipt_id: bytes, code: str, text: str) -> None:
        """Parts were refused as they came: tell whose receipt will not come, where that can be."""

    def tell_position(self, topic: str, epoch: int, offset: int) -> None:
        """Tell where a subscription stands, in protocols that can and to peers that asked."""

    # The bus calls these

    def deliver(self, batch: Batch) -> None:
        self.peer.send(batch.encoded(self.protocol, self.encode), (batch,))

    def deliver_whole(self, batches: Sequence[Batch], whole: Buffer) -> None:
        for batch in batches:
            self.deliver(batch)

    def deliver_joint(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.deliver(batch)

    def deliver_from_log(self, batches: Sequence[Batch]) -> None:
        """More came at once than an outbox should hold: read it from the log, then go on live."""
        first = batches[0]
        self.bus.unsubscribe(first.topic, self)
        skip_sender = None if self.takes_own else self.peer.name
        start = f"{first.epoch}:{first.first_offset}"
        replay = Replay(self, first.topic, start, tell=False, skip_sender=skip_sender)
        self._replays[first.topic] = replay
        replay.begin()

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        self._refusal = (error.code, error.text)
        text = error.text if len(batch) == 1 else f"{error.text} ({len(batch)} messages)"
        self.complain(error.code, text)

    def topic_deleted(self, topic: str) -> None:
        self.subscriptions.discard(topic)
        self.complain("topic.deleted", f"the topic {topic!r} was deleted")

    def lost(self, lost: Lost) -> None:
        """The peer was too slow and messages were dropped: tell how many, and where it goes on."""
        text = f"{lost.messages} messages were dropped because you read too slowly"
        self.complain("outbox.dropped", text)
        for topic, (epoch, offset) in lost.next_positions.items():
            if topic in self._told:
                self.tell_position(topic, epoch, offset)

    # Publishing

    def publish(self, batches: Sequence[Batch], whole: Buffer | None = None) -> None:
        """Publish as this peer."""
        for batch in batches:
            batch.protocol = self.protocol
            batch.sender = self.peer.name
        ticket = self.bus.publish(batches, self, whole)
        if whole is None:
            last = batches[-1]
            stored = last.first_offset >= 0
            self._last = (ticket, last.epoch, last.last_offset) if stored else None

    def publish_part(self, batch: Batch, *, is_first: bool) -> None:
        """Publish a part at once; the receipt is for all of them, so a refusal costs it."""
        if is_first:
            self._refusal = None
        denied, why = b"", self._refusal
        if why is not None and batch.receipt_ids is not None:
            start, stop = batch.receipt_ids[-2:]
            denied = bytes(batch.buffer[start:stop])
            batch.receipt_ids = None
        self.publish([batch])
        if denied and why is not None:
            self.deny_receipt(denied, *why)

    def owe_receipt(self, receipt_id: bytes, topic: str = "") -> None:
        """Parts that were published one by one have ended: give the last one's receipt."""
        if self._refusal is not None:
            self.deny_receipt(receipt_id, *self._refusal)
            return
        if self._last is None:
            return
        owed = Batch(topic, receipt_id, array("i", [0, 0]))
        owed.receipt_ids = array("i", [0, len(receipt_id)])
        ticket, owed.epoch, owed.first_offset = self._last
        self.bus.expect_receipt(ticket, owed, self)

    # Subscribing

    def subscribe_lines(self, lines: Sequence[SubscribeLine]) -> None:
        """Subscribe as Boson's `$subscribe` and `hbfs` ask: known topics are taken, others told."""
        for line in lines:
            try:
                if line.topic == EVERYTHING:
                    self.subscribe_everything(line.start, tell=line.tell)
                else:
                    name = names.canonical(line.topic)
                    self.subscribe(name, line.start, tell=line.tell)
            except PolybusError as error:
                self.complain(error.code, error.text)

    def unsubscribe_lines(self, lines: Sequence[SubscribeLine]) -> None:
        if not lines or any(line.topic == EVERYTHING for line in lines):
            self.leave_all()
            return
        for line in lines:
            self.unsubscribe(line.topic.lower())

    def subscribe(self, topic: str, start: str = "latest", *, tell: bool = False) -> None:
        """Subscribe from a position.

        Raises:
            UsageError: `topic.unknown`, `subscription.too-many`.
            StorageError: `log.frozen`, the topic is damaged.
            PeerError: not final, a start that is none.
        """
        limit = self.server.config.limits.subscriptions_per_connection_max
        if len(self.subscriptions) >= limit:
            text = f"{limit} subscriptions (subscriptions-per-connection-max)"
            raise UsageError("subscription.too-many", text)
        bounds = self.bus.log.bounds(topic)
        if topic in self.subscriptions:
            return
        if start == "latest":
            self.subscriptions.add(topic)
            if tell:
                self._told.add(topic)
                self.tell_position(topic, bounds.epoch, bounds.stop)
            self.bus.subscribe(topic, self)
            return
        replay = Replay(self, topic, start, tell=tell)
        if tell:
            self._told.add(topic)
        self.subscriptions.add(topic)
        self._replays[topic] = replay
        replay.begin()

    def subscribe_everything(self, start: str, *, tell: bool) -> None:
        for topic in self.bus.topics():
            try:
                self.subscribe(topic.name, start, tell=tell)
            except StorageError as error:
                # A damaged topic is told; it keeps nobody from the others.
                self.complain(error.code, error.text)
        self._tell_new = tell
        if not self._everything:
            self._everything = True
            self.bus.subscribe_new(self)

    def unsubscribe(self, topic: str) -> None:
        replay = self._replays.pop(topic, None)
        if replay is not None:
            replay.cancel()
        self.bus.unsubscribe(topic, self)
        self.subscriptions.discard(topic)
        self._told.discard(topic)

    def topic_created(self, topic: str) -> None:
        """A topic has come to be while the peer listens to everything."""
        replay = self._replays.pop(topic, None)
        if replay is not None:
            # Of a topic of that name that was deleted.
            replay.cancel()
        self.subscriptions.add(topic)
        if self._tell_new:
            self._told.add(topic)
            self.tell_position(topic, self.bus.log.bounds(topic).epoch, 0)

    def leave_all(self) -> None:
        """End every subscription."""
        for topic in list(self.subscriptions):
            self.unsubscribe(topic)
        if self._everything:
            self._everything = False
            self.bus.unsubscribe_new(self)

    def replay_failed(self, topic: str, error: PolybusError) -> None:
        """The past could not be read to its end: the subscription is over, and the peer knows."""
        self.subscriptions.discard(topic)
        if error.code in ("topic.deleted", "topic.unknown"):
            self.topic_deleted(topic)
        else:
            self.complain(error.code, error.text)

    def replay_ended(self, topic: str) -> None:
        self._replays.pop(topic, None)

    # Errors

    def bad(self, error: PeerError) -> None:
        """Answer a peer that broke its protocol; after a final error the connection closes."""
        self.complain(error.code, error.text)
        if error.final:
            self.peer.close()

    def complain(self, code: str, text: str) -> None:
        self.server.bad_peers.note(self.peer.name, self.protocol, code, text)
        self.send_error(code, text)
