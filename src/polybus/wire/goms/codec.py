"""GomsCodec, the server's side of a connection, and GomsClientCodec, the client's.

wire/codec.py has the contract of both; stream.py has the framing. No error is final here, because a
JSON stream can always be resynchronised. The edge checks what a codec cannot know: whether the
topic exists and the client is registered.
"""

import msgspec

from polybus.batch import Buffer
from polybus.config import Limits
from polybus.wire.codec import STEPS_MAX, Bad, Publish
from polybus.wire.goms import fields
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
from polybus.wire.goms.fields import Fields
from polybus.wire.goms.stream import ObjectStream

PROTOCOL = "goms"

GomsRequest = Publish | Register | Send | Logout | Close
Event = GomsRequest | Bad
GomsAnswer = Deliver | Message | Error | RegAck | SendAck
Reply = GomsAnswer | Bad


class GomsCodec(ObjectStream[GomsRequest]):
    """Requests of a client. Plain sends are `Publish` events, all others `Send`."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(
            limits, plain=b"send", gathered=Publish, decode=self._request, steps_max=STEPS_MAX
        )

    def _request(self, text: Buffer) -> GomsRequest:
        found = fields.fields_of(text)
        messagetype = fields.messagetype_of(found)
        if messagetype == "send":
            return self._send(found)
        if messagetype == "register":
            return Register(
                fields.topics_of(found, self._limits),
                fields.start_of(found),
                fields.flag_of(found.ack, "ack"),
                fields.flag_of(found.offsets, "offsets"),
            )
        if messagetype == "logout":
            if fields.is_absent(found.topics):
                return Logout()
            return Logout(_each_once(fields.topics_of(found, self._limits)))
        if messagetype == "close":
            self._end()
            return Close()
        raise peer_error(
            Code.UNKNOWN_MESSAGETYPE, "messagetype must be register, send, logout or close"
        )

    def _send(self, found: Fields) -> Send:
        return Send(
            _each_once(fields.topics_of(found, self._limits)),
            fields.value_of(found, self._limits),
            fields.headers_of(found, self._limits),
            fields.flag_of(found.ack, "ack"),
        )


class GomsClientCodec(ObjectStream[GomsAnswer]):
    """Answers of a server. Plain messages are `Deliver` events, all others `Message`."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits, plain=b"message", gathered=Deliver, decode=self._answer)

    def _answer(self, text: Buffer) -> GomsAnswer:
        found = fields.fields_of(text)
        messagetype = fields.messagetype_of(found)
        if messagetype == "message":
            return Message(
                fields.topics_of(found, self._limits),
                fields.value_of(found, self._limits),
                fields.headers_of(found, self._limits),
                fields.offsets_of(found),
            )
        if messagetype == "error":
            return _error(found)
        if messagetype not in ("reg-ack", "send-ack"):
            raise peer_error(
                Code.UNKNOWN_MESSAGETYPE, "messagetype must be message, error, reg-ack or send-ack"
            )
        # The first draft of the protocol has a reg-ack without topics.
        absent = fields.is_absent(found.topics)
        topics = () if absent else fields.topics_of(found, self._limits)
        offsets = fields.offsets_of(found)
        return RegAck(topics, offsets) if messagetype == "reg-ack" else SendAck(topics, offsets)


def decode_datagram(data: Buffer, limits: Limits) -> list[Event]:
    """The events of a datagram, which contains one or more whole objects."""
    codec = GomsCodec(limits)
    events = codec.receive(data)
    while codec.backlog:
        events += codec.receive(b"")
    if codec.unfinished_bytes:
        error = peer_error(Code.NOT_AN_OBJECT, "the datagram ends inside an object")
        events.append(Bad(error))
    return events


def _each_once(topics: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(topics))


def _error(found: Fields) -> Error:
    """An error of any server: the code is under either key, a string or a number."""
    raw = found.error_code if len(found.error_code) else found.errorcode
    try:
        code = msgspec.json.decode(raw, type=str | int)
    except msgspec.MsgspecError as error:
        text = "error-code must be a string or a number"
        raise peer_error(Code.NOT_AN_OBJECT, text) from error
    text = "" if fields.is_absent(found.error) else fields.text_of(found.error, "error")
    return Error(f"{code:06d}" if isinstance(code, int) else code, text)
