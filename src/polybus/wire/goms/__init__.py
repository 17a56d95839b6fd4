"""goMS: JSON objects over TCP and UDP (docs/protocols/goms.md).

events      what the two sides say, in goMS words
codes       the error codes
stream      framing: objects out of a byte stream, the plain ones as batches
fields      the fields of an object, checked
codec       GomsCodec for the server's side, GomsClientCodec for the client's
encode      every line either side sends
"""

from polybus.wire.goms.codec import (
    PROTOCOL,
    Event,
    GomsClientCodec,
    GomsCodec,
    Reply,
    decode_datagram,
)
from polybus.wire.goms.codes import Code, peer_error
from polybus.wire.goms.encode import (
    encode,
    encode_close,
    encode_error,
    encode_logout,
    encode_message,
    encode_reg_ack,
    encode_register,
    encode_send,
    encode_send_ack,
    encode_sends,
    encode_with_offsets,
)
from polybus.wire.goms.events import (
    Close,
    Deliver,
    Error,
    Logout,
    Message,
    RegAck,
    Register,
    Send,
    SendAck,
)

__all__ = [
    "Close",
    "Code",
    "Deliver",
    "Error",
    "Event",
    "GomsClientCodec",
    "GomsCodec",
    "Logout",
    "Message",
    "PROTOCOL",
    "RegAck",
    "Register",
    "Reply",
    "Send",
    "SendAck",
    "decode_datagram",
    "encode",
    "encode_close",
    "encode_error",
    "encode_logout",
    "encode_message",
    "encode_reg_ack",
    "encode_register",
    "encode_send",
    "encode_send_ack",
    "encode_sends",
    "encode_with_offsets",
    "peer_error",
]
