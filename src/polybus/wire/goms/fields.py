"""The fields of a goMS object, validated one by one.

Keys are case-sensitive: `Topics` is an unknown key, and unknown keys are ignored. The last of
several equal keys counts. `null` in an optional field is the same as an absent field, because some
languages write absent lists that way.

Every function raises a PeerError that names the field.
"""

import re
from base64 import b64decode
from itertools import islice

import msgspec

from polybus.batch import Buffer, Headers
from polybus.config import Limits
from polybus.errors import PeerError
from polybus.wire.goms.events import Code, peer_error
from polybus.wire.positions import Position, parse_start

_ABSENT = msgspec.Raw()
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


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


class _BinaryHeader(msgspec.Struct):
    base64: str


_FIELDS = msgspec.json.Decoder(Fields)
_TEXT = msgspec.json.Decoder(str)
_FLAG = msgspec.json.Decoder(bool)
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
        text = f"data is over {limits.message_bytes_max} bytes (message-bytes-max)"
        raise peer_error(Code.TOO_LARGE, text)
    return value


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
