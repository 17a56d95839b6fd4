"""Boson frames on the bus.

a frame with a topic   publish             $subscribe     subscribe
topic?receipt=ID       publish, receipt    $unsubscribe   unsubscribe
"""

from __future__ import annotations

from collections.abc import Sequence

from polybus.batch import Batch, Buffer
from polybus.bus.subscriptions import Publisher
from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.edges.protocols.translator import Peer, Translator
from polybus.wire import boson_frames as wire
from polybus.wire.boson import ReceiptOwed, Subscribe, Unsubscribe
from polybus.wire.codec import Bad, Publish, PublishPart


class BosonFramesTranslator(Translator):
    protocol = wire.PROTOCOL

    def __init__(self, edge: Edge, peer: Peer, connector: Connector) -> None:
        super().__init__(edge, peer)
        self.codec = wire.BosonFramesCodec(self.limits, connector.default_topic)

    def handle(self, event: wire.Event) -> None:
        match event:
            case PublishPart(batches, is_first=is_first):
                self.publish_part(batches[0], is_first=is_first)
            case Publish(batches, whole):
                self.publish(batches, whole)
            case Bad(error):
                self.bad(error)
            case Subscribe(lines):
                self.subscribe_lines(lines)
            case Unsubscribe(lines):
                self.unsubscribe_lines(lines)
            case ReceiptOwed(_, receipt_id):
                self.owe_receipt(receipt_id)

    def encode(self, batch: Batch) -> Buffer:
        return wire.encode(batch)

    def deliver_whole(
        self, batches: Sequence[Batch], whole: Buffer, publisher: Publisher | None = None
    ) -> None:
        if batches[0].protocol == self.protocol:
            self.peer.send(whole, batches, publisher)
        else:
            super().deliver_whole(batches, whole, publisher)

    def receipt(self, batch: Batch) -> None:
        self.peer.send(wire.encode_receipts(batch))

    def receipt_all(self, batches: Sequence[Batch]) -> None:
        self.peer.send(wire.encode_receipts(*batches))

    def send_error(self, code: str, text: str) -> None:
        self.reply(wire.encode_error(code, text))

    def tell_position(self, topic: str, epoch: int, offset: int) -> None:
        self.reply(wire.encode_position(topic, epoch, offset))
