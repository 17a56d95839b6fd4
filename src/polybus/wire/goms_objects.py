"""goMS objects: cut from a byte stream in any chunking and layout, and validated field by field.

`scan.scan_lines` turns plain lines into batches. Where that scan stops, one object is handled: its
end is found byte by byte, each byte once, and then it is decoded. Every invalid object gives one
error, in order with the other events:

    malformed     reading resumes after the next newline; if the error is at a `{` that begins a
                  line, at that line, so that a truncated line costs only itself
    too deep      nothing is kept; reading resumes where the levels close or the line ends
    too large     nothing more is kept; reading resumes where the object ends
    anything else only the object is lost

Keys are case-sensitive: `Topics` is an unknown key, and unknown keys are ignored. The last of
several equal keys counts. `null` in an optional field is the same as an absent field, because some
languages write absent lists that way. Each function that reads a field raises a PeerError that
names it.
"""

import re
import sys
from base64 import b64decode
from collections.abc import Callable
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from polybus import scan
from polybus.batch import Batch, Buffer, Headers
from polybus.config import Limits
from polybus.errors import PeerError
from polybus.scan.goms_py import BAD, DEEP, END, MORE
from polybus.wire.codec import Bad, LargeBegin, LargeDropped, LargePiece, Login
from polybus.wire.goms_text import LargeText, large_data_at
from polybus.wire.positions import Position, parse_start

ENVELOPE_BYTES_MAX = 64 << 10
"""How much larger than its value an object may be: room for topics and headers."""
CARRY_BYTES_MAX = 4 << 10
"""Larger unfinished objects are kept here: copying them with every read would be quadratic."""

_NEWLINE = re.compile(rb"\n")

_ABSENT = msgspec.Raw()
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

E = TypeVar("E")


class Code(StrEnum):
    """000 general, 001 register, 002 send, 003 logout, 004 download.

    The protocol page marks our own codes.
    """

    NOT_AN_OBJECT = "000001"
    """Not a JSON object, or a field of the wrong type."""
    UNKNOWN_MESSAGETYPE = "000002"
    TOO_LARGE = "000003"
    LOGIN = "000401"
    """A login is required, or it failed."""
    NOT_ALLOWED = "000403"
    SLOW_DOWN = "000429"
    UNKNOWN_TOPICS = "001001"
    """Register to topics that do not exist; the text lists them."""
    ALREADY_REGISTERED = "001002"
    """Register to topics again; the text lists them."""
    CANNOT_BEGIN = "001003"
    """Register from a position where the log has no message, or no intact one."""
    NOT_SENT = "002001"
    NO_DATA = "002002"
    NOT_REGISTERED = "003001"
    """Logout of topics that were not registered; the text lists them."""
    NO_BLOB = "004001"
    """Download of a payload that does not exist, or that the client may not read."""


def peer_error(code: Code, text: str) -> PeerError:
    """An error about one object; the stream continues after it."""
    return PeerError("goms." + code, text, final=False)


def object_bytes_max(limits: Limits) -> int:
    """The maximum size of an object: the largest value in base64, plus room for other fields.

    The size of the value itself is checked when it is decoded.
    """
    return base64_bytes(limits.message_bytes_max) + ENVELOPE_BYTES_MAX


def base64_bytes(size: int) -> int:
    """The size of this many bytes in base64."""
    return (size + 2) // 3 * 4


class ObjectStream(Generic[E]):
    """The receiving side of a stream of objects; a subclass decodes them."""

    def __init__(
        self,
        limits: Limits,
        *,
        plain: bytes,
        gathered: Callable[[list[Batch]], E],
        steps_max: int = sys.maxsize,
        hands_on: bool = False,
    ) -> None:
        """`hands_on`: large data is passed on as it arrives, as Large events."""
        self._steps_max = steps_max
        self._limits = limits
        self._plain = plain
        self._gathered = gathered
        self._object_bytes_max = object_bytes_max(limits)
        self._value_bytes_max = limits.message_bytes_max
        # Beyond this size, check whether the object's data can be passed on.
        self._look_bytes = sys.maxsize
        self._text: LargeText | None = None
        if hands_on and limits.message_bytes_max > limits.inline_bytes_max:
            self._value_bytes_max = self._look_bytes = limits.inline_bytes_max
            held_max = min(limits.message_bytes_max, limits.parts_bytes_max)
            self._object_bytes_max = base64_bytes(held_max) + ENVELOPE_BYTES_MAX
        self._has_looked = False
        self._scanner = scan.ObjectScanner(limits.json_depth_max)
        self._held = bytearray()
        self._carried_bytes = 0
        self._inside = False
        self._dropping = False
        self._skipping_line = False
        self._ended = False
        self._backlog = b""
        self.backlog = False
        self.is_held = False

    def _decode(self, text: Buffer) -> E:
        """Decode one object. Raises PeerError, not final."""
        raise NotImplementedError

    def _decode_large(self, text: Buffer, data_bytes: int) -> E:
        """Decode an object whose data was passed on and is empty here. Raises as `_decode` does."""
        raise NotImplementedError

    @property
    def unfinished_bytes(self) -> int:
        return len(self._held) + len(self._backlog) + (self._text is not None)

    def receive(self, data: Buffer) -> list[E | Bad]:
        events: list[Any] = []
        if self.backlog:
            data, self._backlog = self._backlog + bytes(data), b""
            self.backlog = False
        at = 0
        if self._text is not None and not self._text.ended:
            at = self._hand_on(data, 0, events)
        if self._inside and at < len(data):
            at = self._resume(data, at, events)
        while at < len(data) and not self._ended:
            if len(events) >= self._steps_max:
                self._backlog = bytes(data[at:])
                self.backlog = True
                break
            if self._skipping_line:
                at = self._skip_line(data, at)
            else:
                at = self._read_on(data, at, events)
        return events

    def take_carry(self) -> bytes:
        held_bytes = len(self._held)
        if self.backlog or self._carried_bytes or not 0 < held_bytes <= CARRY_BYTES_MAX:
            return b""
        if self._text is not None:
            return b""
        carry = bytes(self._held)
        self._held = bytearray()
        self._carried_bytes = held_bytes
        return carry

    def close(self) -> list[E | Bad]:
        """Drop an unfinished object: the stream has ended. Later data is a new stream."""
        self._inside = self._dropping = self._skipping_line = self.backlog = False
        self._backlog = b""
        self._held = bytearray()
        self._carried_bytes = 0
        self._text = None
        return []

    def _end(self) -> None:
        """Ignore all further data."""
        self._ended = True

    def _resume(self, data: Buffer, at: int, events: list[Any]) -> int:
        """Continue the object that the last data ended in."""
        carried_bytes, self._carried_bytes = self._carried_bytes, 0
        end, verdict = self._scanner.scan(data, at + carried_bytes, len(data))
        if carried_bytes and verdict != MORE:
            # The object is complete, perhaps followed by many plain lines: scan them all at once.
            self._inside = False
            return 0
        return self._settle(data, at, end, verdict, events)

    def _read_on(self, data: Buffer, at: int, events: list[Any]) -> int:
        at = self._gather(data, at, len(data), events)
        if at == len(data):
            return at
        self._inside = True
        self._scanner.reset()
        end, verdict = self._scanner.scan(data, at, len(data))
        return self._settle(data, at, end, verdict, events)

    def _gather(self, data: Buffer, start: int, stop: int, events: list[Any]) -> int:
        """Publish the plain lines from `start` on; return where they end."""
        limits = self._limits
        at, batches = scan.scan_lines(
            data, start, stop, self._plain, self._value_bytes_max, limits.topic_bytes_max
        )
        if batches:
            events.append(self._gathered(batches))
        return at

    def _settle(self, data: Buffer, begin: int, end: int, verdict: int, events: list[Any]) -> int:
        """Apply the verdict on `data[begin:end]`; return where to continue."""
        if len(self._held) + end - begin > self._object_bytes_max:
            text = (
                f"the object is over {self._object_bytes_max} bytes, enough for data of "
                f"{self._limits.message_bytes_max} bytes (message-bytes-max) in base64"
            )
            self._drop(peer_error(Code.TOO_LARGE, text), events)
        if verdict == DEEP:
            text = f"the object is over {self._limits.json_depth_max} levels deep (json-depth-max)"
            self._drop(peer_error(Code.NOT_AN_OBJECT, text), events)
            begin = end
            end, verdict = self._scanner.scan(data, begin, len(data))
        if verdict == MORE:
            if not self._dropping:
                self._held += memoryview(data)[begin:end]
                if len(self._held) > self._look_bytes and not self._has_looked:
                    self._look(events)
            return end
        if verdict == END:
            if not self._dropping:
                self._take(data, begin, end, events)
        else:
            self._drop(peer_error(Code.NOT_AN_OBJECT, "not a well-formed JSON object"), events)
            self._skipping_line = verdict == BAD
        self._leave()
        return end

    def _leave(self) -> None:
        """The object has ended."""
        self._held = bytearray()
        self._inside = False
        self._dropping = False
        self._has_looked = False
        self._text = None

    def _drop(self, error: PeerError, events: list[Any]) -> None:
        """Drop the object. Only its first error is reported."""
        if not self._dropping:
            events.append(Bad(error))
            if self._text is not None:
                events.append(LargeDropped())
        self._dropping = True
        self._held = bytearray()

    # Large data

    def _look(self, events: list[Any]) -> None:
        """Pass on the data of a large object, if it is a string that has not ended."""
        self._has_looked = True
        at = large_data_at(bytes(self._held[:ENVELOPE_BYTES_MAX]))
        if at is None:
            return
        held, self._held = self._held, bytearray()
        self._text = LargeText(bytes(held[:at]))
        events.append(LargeBegin())
        self._hand_on(held, at, events)

    def _hand_on(self, data: Buffer, at: int, events: list[Any]) -> int:
        """Pass on what has arrived of the data; return where the rest of the object begins."""
        large = self._text
        assert large is not None
        try:
            text, end = large.decode(data, at)
        except ValueError as error:
            self._drop(peer_error(Code.NOT_AN_OBJECT, f"data: {error}"), events)
            self._leave()
            self._skipping_line = True
            return at
        # It may be base64; what that is decoded to is checked later.
        if large.size > base64_bytes(self._limits.message_bytes_max):
            self._drop(too_large_data(self._limits), events)
        elif text and not self._dropping:
            events.append(LargePiece(text))
        if large.ended:
            # What is left is a small object, with an empty string.
            small = large.head + b'"'
            self._scanner.reset()
            self._scanner.scan(small, 0, len(small))
            if not self._dropping:
                self._held = bytearray(small)
        return end

    def _take(self, data: Buffer, begin: int, end: int, events: list[Any]) -> None:
        """Decode a complete object."""
        if self._held:
            self._held += memoryview(data)[begin:end]
            data, begin, end = self._held, 0, len(self._held)
            if self._text is None and self._gather(data, begin, end, events) == end:
                return
        try:
            if not scan.is_utf8(data, begin, end):
                raise peer_error(Code.NOT_AN_OBJECT, "the object is not UTF-8")
            text = memoryview(data)[begin:end]
            if self._text is None:
                events.append(self._decode(text))
            else:
                events.append(self._decode_large(text, self._text.size))
        except PeerError as error:
            events.append(Bad(error))
            if self._text is not None:
                events.append(LargeDropped())

    def _skip_line(self, data: Buffer, at: int) -> int:
        newline = _NEWLINE.search(data, at)
        if newline is None:
            return len(data)
        self._skipping_line = False
        return newline.end()


# Fields


class Fields(msgspec.Struct, rename={"start": "from", "error_code": "error-code"}):
    """An object's fields, not yet decoded; an absent field is empty."""

    messagetype: msgspec.Raw = _ABSENT
    topics: msgspec.Raw = _ABSENT
    data: msgspec.Raw = _ABSENT
    encoding: msgspec.Raw = _ABSENT
    headers: msgspec.Raw = _ABSENT
    ack: msgspec.Raw = _ABSENT
    start: msgspec.Raw = _ABSENT
    offsets: msgspec.Raw = _ABSENT
    error_code: msgspec.Raw = _ABSENT
    errorcode: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT
    user: msgspec.Raw = _ABSENT
    password: msgspec.Raw = _ABSENT
    token: msgspec.Raw = _ABSENT
    account: msgspec.Raw = _ABSENT
    key: msgspec.Raw = _ABSENT
    id: msgspec.Raw = _ABSENT
    bytes: msgspec.Raw = _ABSENT
    size: msgspec.Raw = _ABSENT
    sha256: msgspec.Raw = _ABSENT
    type: msgspec.Raw = _ABSENT
    last: msgspec.Raw = _ABSENT


class _BinaryHeader(msgspec.Struct):
    base64: str


_FIELDS = msgspec.json.Decoder(Fields)
_TEXT = msgspec.json.Decoder(str)
_FLAG = msgspec.json.Decoder(bool)
_NUMBER = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)])
_TEXTS = msgspec.json.Decoder(list[str])
_HEADERS = msgspec.json.Decoder(dict[str, str | _BinaryHeader])


def fields_of(text: Buffer) -> Fields:
    try:
        return _FIELDS.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise peer_error(Code.NOT_AN_OBJECT, f"malformed JSON: {error}") from error


def is_absent(raw: msgspec.Raw) -> bool:
    return len(raw) == 0 or (len(raw) == 4 and bytes(raw) == b"null")


def messagetype_of(fields: Fields) -> str:
    if not len(fields.messagetype):
        raise peer_error(Code.UNKNOWN_MESSAGETYPE, "messagetype is missing")
    return text_of(fields.messagetype, "messagetype")


def text_of(raw: msgspec.Raw, key: str) -> str:
    try:
        return _TEXT.decode(raw)
    except msgspec.MsgspecError as error:
        raise _wrong_type(key, "a string") from error


def login_of(fields: Fields) -> Login:
    if not is_absent(fields.token):
        return Login("", text_of(fields.token, "token"))
    for raw, key in ((fields.user, "user"), (fields.password, "password")):
        if is_absent(raw):
            raise peer_error(
                Code.LOGIN, f"{key} is missing; a login has user and password, or token"
            )
    return Login(text_of(fields.user, "user"), text_of(fields.password, "password"))


def start_of(fields: Fields) -> str | None:
    """Where to start, as it was sent, after validation."""
    if is_absent(fields.start):
        return None
    start = text_of(fields.start, "from")
    try:
        parse_start(start)
    except PeerError as error:
        raise peer_error(Code.NOT_AN_OBJECT, f"from: {error.text}") from error
    return start


def flag_of(raw: msgspec.Raw, key: str) -> bool:
    if is_absent(raw):
        return False
    try:
        return _FLAG.decode(raw)
    except msgspec.MsgspecError as error:
        raise _wrong_type(key, "true or false") from error


def number_of(raw: msgspec.Raw, key: str, default: int) -> int:
    if is_absent(raw):
        return default
    try:
        found: int = _NUMBER.decode(raw)
        return found
    except msgspec.MsgspecError as error:
        raise _wrong_type(key, "a number from 0 on") from error


def topics_of(fields: Fields, limits: Limits) -> tuple[str, ...]:
    """The topics in lower case, in the order they were sent, duplicates included."""
    raw = fields.topics
    topics_max = limits.topics_per_request_max
    if not len(raw):
        raise peer_error(Code.NOT_AN_OBJECT, "topics is missing")
    if _has_more_strings(raw, topics_max):
        text = f"topics has more than {topics_max} entries (topics-per-request-max)"
        raise peer_error(Code.TOO_LARGE, text)
    try:
        topics = tuple(topic.lower() for topic in _TEXTS.decode(raw))
    except msgspec.MsgspecError as error:
        raise _wrong_type("topics", "a list of strings") from error
    for topic in topics:
        if len(topic.encode()) > limits.topic_bytes_max:
            text = f"topics has a name over {limits.topic_bytes_max} bytes (topic-bytes-max)"
            raise peer_error(Code.TOO_LARGE, text)
    return topics


def value_of(fields: Fields, limits: Limits) -> bytes:
    """The data as bytes: the text of a string, decoded base64, or the JSON of other values."""
    raw = fields.data
    if not len(raw):
        raise peer_error(Code.NO_DATA, "data is missing")
    if not is_absent(fields.encoding):
        if text_of(fields.encoding, "encoding") != "base64":
            raise peer_error(Code.NOT_AN_OBJECT, 'encoding must be "base64" or left out')
        value = _from_base64(text_of(raw, "data"), "data")
    elif memoryview(raw)[0] == ord('"'):
        value = text_of(raw, "data").encode()
    else:
        value = bytes(raw)
    if len(value) > limits.message_bytes_max:
        raise too_large_data(limits)
    return value


def too_large_data(limits: Limits) -> PeerError:
    text = f"data is over {limits.message_bytes_max} bytes (message-bytes-max)"
    return peer_error(Code.TOO_LARGE, text)


def headers_of(fields: Fields, limits: Limits) -> Headers | None:
    if is_absent(fields.headers):
        return None
    # A binary header is three strings: its name, `base64`, its value.
    if _has_more_strings(fields.headers, 3 * limits.properties_max):
        raise _too_many_headers(limits)
    try:
        headers = _HEADERS.decode(fields.headers)
    except msgspec.MsgspecError as error:
        expected = 'an object of strings or of {"base64": …}'
        raise _wrong_type("headers", expected) from error
    if len(headers) > limits.properties_max:
        raise _too_many_headers(limits)
    return {
        name: value.encode() if isinstance(value, str) else _from_base64(value.base64, "headers")
        for name, value in headers.items()
    } or None


def offsets_of(fields: Fields) -> tuple[Position, ...]:
    """The offsets that a server sent."""
    if is_absent(fields.offsets):
        return ()
    try:
        offsets = [parse_start(text) for text in _TEXTS.decode(fields.offsets)]
    except (msgspec.MsgspecError, PeerError) as error:
        raise _wrong_type("offsets", "a list of EPOCH:OFFSET") from error
    positions = tuple(offset for offset in offsets if isinstance(offset, Position))
    if len(positions) != len(offsets):
        raise _wrong_type("offsets", "a list of EPOCH:OFFSET")
    return positions


def _from_base64(text: str, key: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise peer_error(Code.NOT_AN_OBJECT, f"{key} is not base64") from error


def _has_more_strings(raw: msgspec.Raw, count_max: int) -> bool:
    """Whether the text has more than `count_max` strings; checked before any is decoded."""
    if len(raw) <= 2 * count_max:
        return False
    strings = islice(_STRING.finditer(memoryview(raw)), count_max + 1)
    return sum(1 for _ in strings) > count_max


def _wrong_type(key: str, expected: str) -> PeerError:
    return peer_error(Code.NOT_AN_OBJECT, f"{key} must be {expected}")


def _too_many_headers(limits: Limits) -> PeerError:
    text = f"headers has more than {limits.properties_max} entries (properties-max)"
    return peer_error(Code.TOO_LARGE, text)
