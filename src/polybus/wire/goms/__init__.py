"""goMS: JSON objects over TCP and UDP (docs/protocols/goms.md).

events      the events of both sides, the error codes
stream      framing: cuts a byte stream into objects, plain ones into batches
fields      the validated fields of an object
codec       GomsCodec for the server's side, GomsClientCodec for the client's
encode      the lines of both sides
"""

from polybus.wire.goms.codec import (
    PROTOCOL,
    Event,
    GomsClientCodec,
    GomsCodec,
    Reply,
    decode_datagram,
)
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
    Code,
    Deliver,
    Error,
    Logout,
    Message,
    RegAck,
    Register,
    Send,
    SendAck,
    peer_error,
)

__all__ = ["Close", "Code", "Deliver", "Error", "Event", "GomsClientCodec", "GomsCodec", "Logout"]
__all__ += ["Message", "PROTOCOL", "RegAck", "Register", "Reply", "Send", "SendAck"]
__all__ += ["decode_datagram", "encode", "encode_close", "encode_error", "encode_logout"]
__all__ += ["encode_message", "encode_reg_ack", "encode_register", "encode_send", "encode_send_ack"]
__all__ += ["encode_sends", "encode_with_offsets", "peer_error"]
