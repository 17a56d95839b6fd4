"""Boson properties on the bus.

topic, content   publish             hbfs   subscribe
hbfr             publish, receipt    hbfu   unsubscribe
"""

from __future__ import annotations

from polybus.batch import Batch, Buffer
from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.edges.protocols.translator import Peer, Translator
from polybus.errors import PeerError, PolybusError
from polybus.wire import boson_properties as wire
from polybus.wire.boson import BadPublish, ReceiptOwed, Subscribe, Unsubscribe
from polybus.wire.codec import Bad, Publish, PublishPart


class BosonPropertiesTranslator(Translator):
    protocol = wire.PROTOCOL

    def __init__(self, edge: Edge, peer: Peer, connector: Connector) -> None:
        super().__init__(edge, peer)
        self.codec = wire.BosonPropertiesCodec(self.limits, connector.default_topic)

    def handle(self, event: wire.Event) -> None:
        match event:
            case PublishPart(batches, is_first=is_first):
                self.publish_part(batches[0], is_first=is_first)
            case Publish(batches):
                self.publish(batches)
            case BadPublish(error, receipt_id):
                self._refuse_message(error, receipt_id)
            case Bad(error):
                self.bad(error)
            case Subscribe(lines):
                self.subscribe_lines(lines)
            case Unsubscribe(lines):
                self.unsubscribe_lines(lines)
            case ReceiptOwed(topic, receipt_id):
                self.owe_receipt(receipt_id, topic)

    def encode(self, batch: Batch) -> Buffer:
        return wire.encode(batch)

    def receipt(self, batch: Batch) -> None:
        self.peer.send(wire.encode_receipts(batch))

    def deny_receipt(self, receipt_id: bytes, code: str, text: str) -> None:
        self.reply(wire.encode_error(code, text, receipt_id))

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        refusals = wire.encode_refusals(batch, error.code, error.text)
        if not refusals:
            super().refuse(batch, error)
            return
        self._refusal = (error.code, error.text)
        # Each message that waits for a receipt gets its own error.
        self.note(error.code, error.text)
        self.reply(refusals)

    def _refuse_message(self, error: PeerError, receipt_id: bytes) -> None:
        self.note(error.code, error.text)
        self.reply(wire.encode_error(error.code, error.text, receipt_id))
        if error.final:
            self.peer.close()

    def send_error(self, code: str, text: str) -> None:
        self.reply(wire.encode_error(code, text))

    def tell_position(self, topic: str, epoch: int, offset: int) -> None:
        self.reply(wire.encode_position(topic, epoch, offset))
