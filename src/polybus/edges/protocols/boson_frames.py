"""Boson frames on the bus.

a frame with a topic   publish             $subscribe     subscribe
topic?receipt=ID       publish, receipt    $unsubscribe   unsubscribe
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polybus.batch import Batch, Buffer
from polybus.edges.protocols.translator import Peer, Translator
from polybus.wire import boson_frames as wire
from polybus.wire.codec import Bad, Publish, PublishPart

if TYPE_CHECKING:
    from polybus.config import Connector
    from polybus.edges.server import Server


class BosonFramesTranslator(Translator):
    protocol = wire.PROTOCOL

    def __init__(self, server: Server, peer: Peer, connector: Connector) -> None:
        super().__init__(server, peer)
        self.codec = wire.BosonFramesCodec(server.config.limits, connector.default_topic)

    def handle(self, event: wire.Event) -> None:
        match event:
            case PublishPart(batches, is_first=is_first):
                self.publish_part(batches[0], is_first=is_first)
            case Publish(batches, whole):
                self.publish(batches, whole)
            case Bad(error):
                self.bad(error)
            case wire.Subscribe(lines):
                self.subscribe_lines(lines)
            case wire.Unsubscribe(lines):
                self.unsubscribe_lines(lines)
            case wire.ReceiptOwed(receipt_id):
                self.owe_receipt(receipt_id)

    def encode(self, batch: Batch) -> Buffer:
        return wire.encode(batch)

    def deliver_whole(self, batches: Sequence[Batch], whole: Buffer) -> None:
        if batches[0].protocol != self.protocol:
            super().deliver_whole(batches, whole)
            return
        self.peer.send(whole, batches)

    def receipt(self, batch: Batch) -> None:
        self.peer.send(wire.encode_receipts(batch))

    def receipt_all(self, batches: Sequence[Batch]) -> None:
        self.peer.send(wire.encode_receipts(*batches))

    def send_error(self, code: str, text: str) -> None:
        self.peer.send(wire.encode_error(code, text))

    def tell_position(self, topic: str, epoch: int, offset: int) -> None:
        self.peer.send(wire.encode_position(topic, epoch, offset))
