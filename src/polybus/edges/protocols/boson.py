"""The translators of both Boson protocols.

                  frames             properties
publish           a topic            topic, content
with a receipt    topic?receipt=ID   hbfr
subscribe         $subscribe         hbfs
unsubscribe       $unsubscribe       hbfu
"""

from collections.abc import Sequence
from functools import partial
from types import ModuleType

from polybus import references
from polybus.batch import Batch, Buffer
from polybus.bus.subscriptions import Publisher
from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.edges.protocols.outgoing_payload import PayloadFraming
from polybus.edges.protocols.peer import Peer
from polybus.edges.protocols.translator import PlainTranslator, Translator
from polybus.errors import PeerError, PolybusError
from polybus.wire import boson_frames, boson_properties
from polybus.wire.boson import JOINED, WHOLE, BadPublish, ReceiptOwed, Subscribe, Unsubscribe
from polybus.wire.codec import Bad, Publish, PublishPart


class BosonTranslator(Translator):
    """What both protocols have in common."""

    wire: ModuleType

    def handle(self, event: boson_frames.Event | boson_properties.Event) -> None:
        match event:
            case PublishPart(batches, is_first=is_first):
                self.publish_part(batches[0], is_first=is_first)
            case Publish(batches, whole):
                self.publish(batches, whole)
            case BadPublish(error, receipt_id):
                self.bad_publish(error, receipt_id)
            case Bad(error):
                self.bad(error)
            case Subscribe(lines):
                self.subscribe_lines(lines)
            case Unsubscribe(lines):
                self.unsubscribe_lines(lines)
            case ReceiptOwed(topic, receipt_id):
                self.owe_receipt(receipt_id, topic)

    def bad_publish(self, error: PeerError, receipt_id: bytes) -> None:
        self.bad(error)

    def send_error(self, code: str, text: str) -> None:
        self.reply(self.wire.encode_error(code, text))

    def tell_login(self, account: str) -> None:
        self.reply(self.wire.encode_login(account))

    def send_position(self, shown: str, epoch: int, offset: int) -> None:
        self.reply(self.wire.encode_position(shown, epoch, offset))


class BosonFramesTranslator(BosonTranslator, PlainTranslator):
    wire = boson_frames
    protocol = boson_frames.PROTOCOL
    encode = staticmethod(boson_frames.encode)

    def __init__(self, edge: Edge, peer: Peer, connector: Connector) -> None:
        super().__init__(edge, peer)
        self.codec = boson_frames.BosonFramesCodec(self.limits, connector.default_topic)

    def deliver_whole(
        self, batches: Sequence[Batch], whole: Buffer, publisher: Publisher | None = None
    ) -> None:
        is_same_view = publisher is not None and publisher.access.account == self.access.account
        if batches[0].protocol == self.protocol and is_same_view:
            self.peer.send(whole, batches, publisher)
        else:
            super().deliver_whole(batches, whole, publisher)

    def payload_framing(self, batch: Batch) -> PayloadFraming:
        topic = batch.topic.encode()
        return PayloadFraming(
            wrap=partial(boson_frames.encode_frame, topic, flag=JOINED),
            tail=boson_frames.encode_frame(topic, b""),
        )

    def receipt(self, batches: Sequence[Batch]) -> None:
        self.peer.send(boson_frames.encode_receipts(*batches))


class BosonPropertiesTranslator(BosonTranslator):
    wire = boson_properties
    protocol = boson_properties.PROTOCOL
    encode = staticmethod(boson_properties.encode)

    def __init__(self, edge: Edge, peer: Peer, connector: Connector) -> None:
        super().__init__(edge, peer)
        self.codec = boson_properties.BosonPropertiesCodec(self.limits, connector.default_topic)

    def payload_framing(self, batch: Batch) -> PayloadFraming:
        headers = references.without_mark(batch.headers[0] if batch.headers else None)
        first = Batch.of(batch.topic, [b""], headers=[headers])
        first.epoch, first.first_offset = batch.epoch, batch.first_offset
        return PayloadFraming(
            head=boson_properties.encode_part(first, b"", JOINED),
            wrap=partial(boson_properties.encode_part, None, flag=JOINED),
            tail=boson_properties.encode_part(None, b"", WHOLE),
        )

    def receipt(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.peer.send(boson_properties.encode_receipts(batch))

    def deny_receipt(self, receipt_id: bytes, code: str, text: str) -> None:
        self.reply(boson_properties.encode_error(code, text, receipt_id))

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        error = self.in_own_words(batch, error)
        refusals = boson_properties.encode_refusals(batch, error.code, error.text)
        if not refusals:
            super().refuse(batch, error)
            return
        self._refusal = (error.code, error.text)
        # Each message that waits for a receipt gets its own error.
        self.record_error(error.code, error.text)
        self.reply(refusals)

    def bad_publish(self, error: PeerError, receipt_id: bytes) -> None:
        self.record_error(error.code, error.text)
        self.deny_receipt(receipt_id, error.code, error.text)
        if error.final:
            self.peer.close()
