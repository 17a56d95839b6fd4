"""Large payloads in a translator: receives and sends them without holding them in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from polybus import references
from polybus.batch import Batch, Buffer
from polybus.bus.bus import Bus
from polybus.bus.subscriptions import Subscriber
from polybus.config import Limits
from polybus.edges.edge import Edge
from polybus.edges.protocols.incoming_payload import GATE as ARRIVING_GATE
from polybus.edges.protocols.incoming_payload import IncomingPayload
from polybus.edges.protocols.outgoing_payload import PayloadFraming, payload
from polybus.edges.protocols.peer import Peer
from polybus.errors import PeerError, PolybusError
from polybus.services.accounts.access import AccountAccess
from polybus.services.blobs.blobs import StoredPayload, with_receipt_ids
from polybus.services.events import UndeliveredRange
from polybus.wire.codec import Codec, LargeBegin, LargeEnd
from polybus.wire.positions import Position, Start


class LargeMessages(Subscriber):
    """The part of a translator that is about large payloads; `Translator` has the rest."""

    edge: Edge
    bus: Bus
    limits: Limits
    peer: Peer
    sender: str
    access: AccountAccess
    codec: Codec[Any]
    subscriptions: dict[str, bool]
    catching_up: dict[str, asyncio.Task[None]]
    streams_references = True
    """Whether the peer gets the bytes of large payloads, not references."""
    arriving: IncomingPayload | None = None
    _when_idle: Callable[[], None] | None = None

    # Defined by the translator

    @property
    def is_known(self) -> bool:
        raise NotImplementedError

    def take(self, event: Any) -> None:
        raise NotImplementedError

    def publish(
        self, batches: Sequence[Batch], whole: Buffer | None = None, *, is_full: bool = False
    ) -> None:
        raise NotImplementedError

    def publish_part(self, batch: Batch, *, is_first: bool, is_full: bool = False) -> None:
        raise NotImplementedError

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        raise NotImplementedError

    def catch_up_from(
        self, topic: str, start: Start, *, tell: bool = False, skip_sender: str | None = None
    ) -> None:
        raise NotImplementedError

    def handle(self, event: Any) -> None:
        raise NotImplementedError

    def bad(self, error: PeerError) -> None:
        raise NotImplementedError

    def record_error(self, code: str, text: str) -> None:
        raise NotImplementedError

    def send_error(self, code: str, text: str) -> None:
        raise NotImplementedError

    # Incoming large payloads

    def begin_large(self, begin: LargeBegin) -> None:
        if not self.is_known:
            self.bad(PeerError("auth.needed", "a login is required; log in first"))
            return
        self.codec.is_held = True
        self.arriving = IncomingPayload(self, begin)

    def arrived(self, waiting: list[Any]) -> None:
        """A large payload is published, or refused: continue with the data that the peer sent after
        it.
        """
        self.arriving = None
        self.codec.is_held = False
        for event in waiting:
            self.take(event)
        if self.arriving is None:
            self.peer.release(ARRIVING_GATE)
            idle, self._when_idle = self._when_idle, None
            if idle is not None:
                idle()

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call this when no large payload is waiting for the disk."""
        if self.arriving is None or not self.arriving.has_ended:
            call()
        else:
            self._when_idle = call

    def topics_of_large(self, end: LargeEnd) -> list[str]:
        """The full names of the topics that a large message goes to."""
        return [self.access.full(topic) for topic in end.topics]

    def refuse_large(self, end: LargeEnd, error: PolybusError) -> None:
        """Refuse a large message like any other."""
        batch = with_receipt_ids(Batch.of(self.access.full(end.topics[0]), [b""]), [end.receipt_id])
        if not end.receipt_id:
            batch.receipt_ids = None
        self.refuse(batch, error)

    def publish_large(self, kept: StoredPayload, end: LargeEnd) -> list[Batch]:
        """Publish the message of a payload that is durable."""
        [topic] = kept.blobs
        return [self._publish_one(kept.batch(topic, dict(end.headers or {})), end)]

    def publish_small(self, value: bytes, end: LargeEnd) -> None:
        """Publish a payload that turned out to be small."""
        [topic] = self.topics_of_large(end)
        self._publish_one(Batch.of(topic, [value], headers=[end.headers]), end)

    def _publish_one(self, batch: Batch, end: LargeEnd) -> Batch:
        if end.receipt_id:
            batch = with_receipt_ids(batch, [end.receipt_id])
        if end.part_number:
            self.publish_part(batch, is_first=end.part_number == 1, is_full=True)
        else:
            self.publish([batch], is_full=True)
        return batch

    def forget_large(self) -> None:
        """The connection is lost."""
        if self.arriving is not None:
            self.arriving.cancel()
        self._when_idle = None

    # Outgoing large payloads

    def is_streamed(self, batch: Batch) -> bool:
        """Whether the peer gets the bytes of a reference in this batch."""
        return self.streams_references and references.any_marked(batch.headers)

    def stream_all(self, batches: Sequence[Batch]) -> None:
        """Read every topic from the log: nothing may come between the pieces of a payload."""
        starts = {batch.topic: Position(batch.epoch, batch.first_offset) for batch in batches}
        skip_sender = None if self.takes_own else self.sender
        for topic in list(self.subscriptions):
            if topic not in self.catching_up:
                self.bus.unsubscribe(topic, self)
                bounds = self.bus.log.bounds(topic)
                start = starts.get(topic, Position(bounds.epoch, bounds.stop))
                self.catch_up_from(topic, start, skip_sender=skip_sender)

    def payload_framing(self, batch: Batch) -> PayloadFraming:
        """How a payload is framed; the batch is one reference, under the account's name."""
        raise NotImplementedError

    async def stream(self, batch: Batch) -> None:
        """Send the payload of a batch that is one reference."""
        shown = batch.slice(0, 1)
        shown.topic = self.access.shown(batch.topic)
        context = self.edge.context
        has_begun = False

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal has_begun
            words = self.payload_framing(shown)
            async for piece in payload(self.edge.blobs, context.memory, batch, words):
                has_begun = True
                yield piece

        try:
            await self.peer.stream_out(pieces())
        except PolybusError as error:
            self.record_error(error.code, error.text)
            self._note_missed(batch, error.code)
            if has_begun:
                # Half a message cannot be revoked.
                self.peer.close()
            else:
                self.send_error(error.code, error.text)

    def _note_missed(self, batch: Batch, code: str) -> None:
        """Report a payload that the peer does not get, as a dead letter."""
        missed = UndeliveredRange(
            batch.topic, batch.epoch, batch.first_offset, batch.last_offset + 1
        )
        self.edge.context.events.undelivered(
            self.access.account, missed, reason=code, to=self.peer.name, protocol=self.protocol
        )
