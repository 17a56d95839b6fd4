"""Boson properties: versioned lists of properties, the second generation of Boson.

framing   finds where messages end             codec    the server's side, to events
versions  decodes a message by its version     client   the client's side, to events
encode    encodes the messages of both sides
"""

from polybus.wire.boson import (
    BadPublish,
    Positioned,
    Receipt,
    ReceiptOwed,
    Refused,
    Subscribe,
    Unsubscribe,
)
from polybus.wire.boson_properties.client import (
    BosonPropertiesClientCodec,
    Delivered,
    Reply,
)
from polybus.wire.boson_properties.codec import (
    PROTOCOL,
    BosonPropertiesCodec,
    Event,
)
from polybus.wire.boson_properties.encode import (
    encode,
    encode_error,
    encode_position,
    encode_publish,
    encode_receipt,
    encode_receipts,
    encode_refusals,
    encode_subscribe,
    encode_unsubscribe,
)

__all__ = ["PROTOCOL", "BadPublish", "BosonPropertiesClientCodec", "BosonPropertiesCodec"]
__all__ += ["Delivered", "Event", "Positioned", "Receipt", "ReceiptOwed", "Refused", "Reply"]
__all__ += ["Subscribe", "Unsubscribe", "encode", "encode_error", "encode_position"]
__all__ += ["encode_publish", "encode_receipt", "encode_receipts", "encode_refusals"]
__all__ += ["encode_subscribe", "encode_unsubscribe"]
