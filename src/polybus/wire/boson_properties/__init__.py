"""Boson properties: versioned lists of properties, the second generation of Boson.

`framing` finds where messages end, `versions` reads one by its version, `codec` and `client` turn
messages into events for either side, `encode` writes them.
"""

from polybus.wire.boson_properties.client import (
    BosonPropertiesClientCodec,
    Delivered,
    Positioned,
    Receipt,
    Refused,
)
from polybus.wire.boson_properties.codec import (
    PROTOCOL,
    BadPublish,
    BosonPropertiesCodec,
    Event,
    ReceiptOwed,
    Subscribe,
    Unsubscribe,
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

__all__ = [
    "PROTOCOL",
    "BadPublish",
    "BosonPropertiesClientCodec",
    "BosonPropertiesCodec",
    "Delivered",
    "Event",
    "Positioned",
    "Receipt",
    "ReceiptOwed",
    "Refused",
    "Subscribe",
    "Unsubscribe",
    "encode",
    "encode_error",
    "encode_position",
    "encode_publish",
    "encode_receipt",
    "encode_receipts",
    "encode_refusals",
    "encode_subscribe",
    "encode_unsubscribe",
]
