"""goMS: JSON objects over TCP and UDP (docs/protocols/goms.md); wire/codec.py has the contract.

Client to server: Register, Send, Download, Logout, Close. Server to client: Message, Referred,
Chunk, Error, RegAck, SendAck.
Plain messages come as batches instead: `Publish` to the server, `Deliver` to the client. Topics are
in lower case.

No error is final here, because a JSON stream can always be resynchronised. The edge checks what a
codec cannot know: whether the topic exists and the client is registered.
"""

from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from polybus import references, scan
from polybus.batch import Batch, Buffer, Headers
from polybus.config import Limits
from polybus.references import Reference
from polybus.structs import decode
from polybus.wire import goms_objects as objects
from polybus.wire.codec import (
    STEPS_MAX,
    Bad,
    Deliver,
    Large,
    LargeBegin,
    LargeDropped,
    LargeEnd,
    LargePiece,
    LoggedIn,
    Login,
    Publish,
)
from polybus.wire.goms_objects import Code, Fields, ObjectStream, peer_error
from polybus.wire.positions import Position

PROTOCOL = "goms"
CHUNK_BYTES_DEFAULT = 64 << 10

_json: Callable[[Any], bytes] = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Register:
    """Subscribe to these topics. A topic that was sent twice is here twice, which is an error.

    Attributes:
        start: where to start, as text for `positions.parse_start`; None means latest.
        ack: answer with a reg-ack.
        offsets: send each message with its offset.
    """

    topics: tuple[str, ...]
    start: str | None = None
    ack: bool = False
    offsets: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """One message for each of the topics, without duplicates, in the order they were sent."""

    topics: tuple[str, ...]
    value: bytes
    headers: Headers | None = None
    ack: bool = False


@dataclass(frozen=True, slots=True)
class Logout:
    """Unsubscribe from these topics, without duplicates; None means all topics."""

    topics: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Prove:
    """Over UDP: the key that the bus sent to the client's address."""

    key: str


@dataclass(frozen=True, slots=True)
class Close:
    """The client leaves; the codec ignores whatever follows."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message and the client's topics it was sent to. `offsets` has one per topic, or none."""

    topics: tuple[str, ...]
    value: bytes
    headers: Headers | None = None
    offsets: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class Error:
    """The server refused something. `code` is six digits."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class RegAck:
    """The topics that were registered, and where each starts if offsets were requested."""

    topics: tuple[str, ...]
    offsets: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class SendAck:
    """A send is durable: its topics, and the offset in each."""

    topics: tuple[str, ...]
    offsets: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class Download:
    """Send some bytes of a large payload, from this one on."""

    id: str
    start: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class Referred:
    """A message whose payload is large: the client downloads it if it wants."""

    topics: tuple[str, ...]
    reference: Reference
    headers: Headers | None = None
    offsets: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some bytes of a large payload."""

    id: str
    start: int
    data: bytes
    is_last: bool


GomsRequest = Publish | Register | Send | Login | Prove | Logout | Download | Close | Large
Event = GomsRequest | Bad
GomsAnswer = Deliver | Message | Error | RegAck | SendAck | LoggedIn | Referred | Chunk
Reply = GomsAnswer | Bad


class GomsCodec(ObjectStream[GomsRequest]):
    """Requests of a client. Plain sends are `Publish` events, all others `Send`."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(
            limits, plain=b"send", gathered=Publish, steps_max=STEPS_MAX, hands_on=True
        )

    def _decode(self, text: Buffer) -> GomsRequest:
        found = objects.fields_of(text)
        messagetype = objects.messagetype_of(found)
        if messagetype == "send":
            return self._send(found)
        if messagetype == "register":
            return Register(
                objects.topics_of(found, self._limits),
                objects.start_of(found),
                objects.flag_of(found.ack, "ack"),
                objects.flag_of(found.offsets, "offsets"),
            )
        if messagetype == "logout":
            if objects.is_absent(found.topics):
                return Logout()
            return Logout(_each_once(objects.topics_of(found, self._limits)))
        if messagetype == "login":
            return objects.login_of(found)
        if messagetype == "download":
            return Download(
                objects.text_of(found.id, "id"),
                objects.number_of(found.start, "from", 0),
                objects.number_of(found.bytes, "bytes", CHUNK_BYTES_DEFAULT),
            )
        if messagetype == "prove":
            return Prove(objects.text_of(found.key, "key"))
        if messagetype == "close":
            self._end()
            return Close()
        raise peer_error(
            Code.UNKNOWN_MESSAGETYPE,
            "messagetype must be register, send, download, login, logout or close",
        )

    def _decode_large(self, text: Buffer, data_bytes: int) -> LargeEnd:
        found = objects.fields_of(text)
        if objects.messagetype_of(found) != "send":
            raise peer_error(Code.TOO_LARGE, "only the data of a send may be so large")
        encoding = ""
        if not objects.is_absent(found.encoding):
            encoding = objects.text_of(found.encoding, "encoding")
            if encoding != "base64":
                raise peer_error(Code.NOT_AN_OBJECT, 'encoding must be "base64" or left out')
        if not encoding and data_bytes > self._limits.message_bytes_max:
            raise objects.too_large_data(self._limits)
        if bytes(found.data) != b'""':
            raise peer_error(Code.NOT_AN_OBJECT, "data is given twice")
        return LargeEnd(
            _each_once(objects.topics_of(found, self._limits)),
            headers=_own_headers(found, self._limits),
            ack=objects.flag_of(found.ack, "ack"),
            encoding=encoding,
            is_text=True,
        )

    def _send(self, found: Fields) -> Send:
        return Send(
            _each_once(objects.topics_of(found, self._limits)),
            objects.value_of(found, self._limits),
            _own_headers(found, self._limits),
            objects.flag_of(found.ack, "ack"),
        )


def _own_headers(found: Fields, limits: Limits) -> Headers | None:
    """The headers of a send. Raises PeerError for one that only the bus may write."""
    headers = objects.headers_of(found, limits)
    if headers and (name := references.reserved_in(headers)) is not None:
        raise peer_error(Code.NOT_ALLOWED, f"headers: {name[:40]!r} is reserved for the bus")
    return headers


class GomsClientCodec(ObjectStream[GomsAnswer]):
    """Answers of a server. Plain messages are `Deliver` events, all others `Message`."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits, plain=b"message", gathered=Deliver)

    def _decode(self, text: Buffer) -> GomsAnswer:
        found = objects.fields_of(text)
        messagetype = objects.messagetype_of(found)
        if messagetype == "message":
            return Message(
                objects.topics_of(found, self._limits),
                objects.value_of(found, self._limits),
                objects.headers_of(found, self._limits),
                objects.offsets_of(found),
            )
        if messagetype == "error":
            return _error(found)
        if messagetype == "login-ack":
            return LoggedIn(objects.text_of(found.account, "account"))
        if messagetype == "reference":
            return _referred(found, self._limits)
        if messagetype == "chunk":
            return Chunk(
                objects.text_of(found.id, "id"),
                objects.number_of(found.start, "from", 0),
                objects.value_of(found, self._limits),
                objects.flag_of(found.last, "last"),
            )
        if messagetype not in ("reg-ack", "send-ack"):
            raise peer_error(
                Code.UNKNOWN_MESSAGETYPE,
                "messagetype must be message, reference, chunk, error, reg-ack, send-ack or "
                "login-ack",
            )
        # The first draft of the protocol has a reg-ack without topics.
        absent = objects.is_absent(found.topics)
        topics = () if absent else objects.topics_of(found, self._limits)
        offsets = objects.offsets_of(found)
        return RegAck(topics, offsets) if messagetype == "reg-ack" else SendAck(topics, offsets)


def decode_datagram(data: Buffer, limits: Limits) -> list[Event]:
    """The events of a datagram, which contains one or more whole objects."""
    codec = GomsCodec(limits)
    events = codec.receive(data)
    while codec.backlog:
        events += codec.receive(b"")
    if codec.unfinished_bytes:
        # No other datagram continues it.
        is_large = bool(events) and isinstance(events[-1], LargeBegin | LargePiece)
        error = peer_error(Code.NOT_AN_OBJECT, "the datagram ends inside an object")
        events += [Bad(error), LargeDropped()] if is_large else [Bad(error)]
    return events


def _referred(found: Fields, limits: Limits) -> Referred:
    blob_id = objects.text_of(found.id, "id")
    reference = Reference(
        blob_id,
        objects.number_of(found.size, "size", 0),
        objects.text_of(found.sha256, "sha256"),
        objects.text_of(found.type, "type"),
        f"/v1/blobs/{blob_id}",
    )
    return Referred(
        objects.topics_of(found, limits),
        reference,
        objects.headers_of(found, limits),
        objects.offsets_of(found),
    )


def _each_once(topics: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(topics))


def _error(found: Fields) -> Error:
    """An error of any server: the code is under either key, a string or a number."""
    raw = found.error_code if len(found.error_code) else found.errorcode
    try:
        code = decode(raw, str | int)
    except msgspec.MsgspecError as error:
        text = "error-code must be a string or a number"
        raise peer_error(Code.NOT_AN_OBJECT, text) from error
    text = "" if objects.is_absent(found.error) else objects.text_of(found.error, "error")
    return Error(f"{code:06d}" if isinstance(code, int) else code, text)


# Encoding: one compact object per line, `data` last. A value that is not UTF-8 is sent as base64.


def encode(batch: Batch, epoch: int = -1) -> bytes:
    """The batch as `message` lines; with their offsets, if `epoch` is not -1."""
    if batch.headers is None:
        head = _head("message", [batch.topic])
        return scan.encode_lines(head, batch.buffer, batch.spans, epoch, batch.first_offset)
    lines = []
    for index, (value, headers) in enumerate(zip(batch.values(), batch.headers, strict=True)):
        offsets = None if epoch < 0 else [Position(epoch, batch.first_offset + index)]
        lines.append(encode_message([batch.topic], value, headers, offsets))
    return b"".join(lines)


def encode_with_offsets(batch: Batch) -> bytes:
    """The batch as `message` lines with their offsets. Raises ValueError if it is not in a log."""
    if batch.first_offset < 0:
        raise ValueError("an offset cannot be negative")
    return encode(batch, batch.epoch)


def encode_message(
    topics: Sequence[str],
    value: bytes,
    headers: Headers | None = None,
    offsets: Iterable[Position] | None = None,
) -> bytes:
    """One `message` that was sent to several topics of its receiver, or a `reference`."""
    if references.marked(headers) and (reference := references.parse(value)) is not None:
        return encode_reference(topics, reference, headers, offsets)
    return _with_data(_head("message", topics) + _offsets(offsets) + _headers(headers), value)


def encode_reference(
    topics: Sequence[str],
    reference: Reference,
    headers: Headers | None = None,
    offsets: Iterable[Position] | None = None,
) -> bytes:
    """A message whose payload is large."""
    head = _head("reference", topics) + _offsets(offsets)
    head += _headers(references.without_mark(headers))
    fields = {name: getattr(reference, name) for name in ("id", "size", "sha256", "type")}
    return head + b"," + _json(fields)[1:] + b"\n"


def encode_large(
    topics: Sequence[str],
    headers: Headers | None,
    offsets: Iterable[Position] | None,
    *,
    text: bool,
) -> bytes:
    """A `message` up to its data, which follows in pieces, and then `"}`."""
    head = _head("message", topics) + _offsets(offsets) + _headers(references.without_mark(headers))
    return head + (b"" if text else b',"encoding":"base64"') + b',"data":"'


def encode_chunk(blob_id: str, start: int, data: bytes, *, is_last: bool) -> bytes:
    head = _json({"messagetype": "chunk", "id": blob_id, "from": start, "encoding": "base64"})
    last = b"true" if is_last else b"false"
    return head[:-1] + b',"data":"' + b64encode(data) + b'","last":' + last + b"}\n"


def encode_error(code: str, text: str) -> bytes:
    """An `error`. The code may be a PeerError's, with `goms.` in front.

    The code has two keys: that of the specification and that of its reference program.
    """
    digits = code.removeprefix("goms.")
    error = {"messagetype": "error", "error-code": digits, "errorcode": digits, "error": text}
    return _json(error) + b"\n"


def encode_reg_ack(topics: Sequence[str], offsets: Iterable[Position] | None = None) -> bytes:
    """The topics that are now registered, and where each starts if that was requested."""
    return _head("reg-ack", topics) + _offsets(offsets) + b"}\n"


def encode_prove(key: str) -> bytes:
    """The bus asks a UDP client to send the key back, or the client does so."""
    return _json({"messagetype": "prove", "key": key}) + b"\n"


def encode_login(user: str, secret: str) -> bytes:
    """A login by user and password, or by a token if `user` is empty."""
    given = {"user": user, "password": secret} if user else {"token": secret}
    return _json({"messagetype": "login", **given}) + b"\n"


def encode_login_ack(account: str) -> bytes:
    return _json({"messagetype": "login-ack", "account": account}) + b"\n"


def encode_send_ack(topics: Sequence[str], offsets: Iterable[Position]) -> bytes:
    """A send is durable: its topics, and the offset in each, in the same order."""
    return _head("send-ack", topics) + _offsets(offsets) + b"}\n"


def encode_register(
    topics: Sequence[str], *, start: str | None = None, ack: bool = False, offsets: bool = False
) -> bytes:
    parts = [_head("register", topics)]
    if start is not None:
        parts.append(b',"from":' + _json(start))
    if ack:
        parts.append(b',"ack":true')
    if offsets:
        parts.append(b',"offsets":true')
    return b"".join(parts) + b"}\n"


def encode_send(
    topics: Sequence[str], value: bytes, headers: Headers | None = None, *, ack: bool = False
) -> bytes:
    head = _head("send", topics) + (b',"ack":true' if ack else b"")
    return _with_data(head + _headers(headers), value)


def encode_sends(batch: Batch) -> bytes:
    """The batch as plain `send` lines, without headers and acks."""
    return scan.encode_lines(_head("send", [batch.topic]), batch.buffer, batch.spans)


def encode_close() -> bytes:
    return b'{"messagetype":"close"}\n'


def _head(messagetype: str, topics: Sequence[str]) -> bytes:
    return b'{"messagetype":"%b","topics":%b' % (messagetype.encode(), _json(list(topics)))


def _offsets(offsets: Iterable[Position] | None) -> bytes:
    if offsets is None:
        return b""
    return b',"offsets":' + _json([str(offset) for offset in offsets])


def _headers(headers: Headers | None) -> bytes:
    if not headers:
        return b""
    return b',"headers":' + _json({name: _header(value) for name, value in headers.items()})


def _header(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


def _with_data(head: bytes, value: bytes) -> bytes:
    return scan.encode_lines(head, value, array("i", [0, len(value)]))
