"""A message as each protocol delivers it: its bytes and their meaning.

The bytes are made by the protocols' own encoders. Their fields are found by reading the bytes again
with the layout of docs/protocols, so that a mismatch reveals a bug.
"""

import struct
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from json import JSONDecoder

import msgspec

from polybus.batch import Batch
from polybus.edges.http.sending import text_frame
from polybus.wire import boson_frames, boson_properties, goms, msgstream, queue

VALUE_CHARACTERS_MAX = 200
PACK = b"1"
_MEANINGS = {"hbfv": "version of the protocol", "hbfo": "epoch and offset"}


class WireField(msgspec.Struct):
    """Some bytes of a message and their meaning."""

    offset: int
    length: int
    name: str
    value: str


class WireForm(msgspec.Struct, omit_defaults=True):
    """A message in one protocol: fields are in order, and cover all bytes."""

    protocol: str
    title: str
    base64: str
    fields: list[WireField]
    problem: str = ""


class _Fields:
    """Names the bytes of a message one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.found: list[WireField] = []

    def take(self, length: int, name: str, value: str | None = None) -> bytes:
        taken = self.data[self.at : self.at + length]
        if length:
            shown = _text(taken) if value is None else value
            self.found.append(WireField(self.at, length, name, shown))
        self.at += length
        return taken

    def number(self, form: str, name: str) -> int:
        length = struct.calcsize(form)
        (number,) = struct.unpack_from(form, self.data, self.at)
        self.take(length, name, str(number))
        return int(number)

    @property
    def left(self) -> int:
        return len(self.data) - self.at


def wire_forms(batch: Batch, shown: str) -> list[WireForm]:
    """A batch of one message in every protocol; `shown` is its topic's name for the reader."""
    renamed = batch.slice(0, 1)
    renamed.topic = shown
    return [_form(renamed, *about) for about in _PROTOCOLS]


def _form(batch: Batch, protocol: str, title: str, dissect: Callable[[Batch], _Fields]) -> WireForm:
    try:
        fields = dissect(batch)
    except (ValueError, struct.error) as error:
        return WireForm(protocol, title, "", [], f"it has no form in this protocol: {error}")
    return WireForm(protocol, title, b64encode(fields.data).decode(), fields.found)


def _goms(batch: Batch) -> _Fields:
    fields = _Fields(bytes(goms.encode(batch)))
    for name, length in _json_members(fields.data.decode()):
        fields.take(length, name)
    return fields


def _json_members(text: str) -> Iterator[tuple[str, int]]:
    """The parts of a JSON object in a line: punctuation, keys and values, with lengths in bytes."""
    decoder = JSONDecoder()
    at = 1
    yield "object begins", 1
    while text[at - 1] != "}":
        key, end = decoder.raw_decode(text, at)
        yield "key", len(text[at:end].encode())
        yield "separator", 1
        _, stop = decoder.raw_decode(text, end + 1)
        yield key, len(text[end + 1 : stop].encode())
        yield ("object ends" if text[stop] == "}" else "separator"), 1
        at = stop + 1
    yield "end of line", len(text) - at


def _boson_frames(batch: Batch) -> _Fields:
    fields = _Fields(bytes(boson_frames.encode(batch)))
    content = fields.number(">i", "length of the content")
    fields.number(">b", "flag")
    topic = fields.number(">H", "length of the topic")
    fields.take(topic, "topic")
    fields.take(content, "content")
    return fields


def _boson_properties(batch: Batch) -> _Fields:
    fields = _Fields(bytes(boson_properties.encode(batch)))
    for _ in range(fields.number(">i", "number of properties")):
        key = fields.take(fields.number(">H", "length of the key"), "key").decode()
        size = fields.number(">i", f"length of {key}")
        meaning = _MEANINGS.get(key, key)
        if key == "hbfv" and size == struct.calcsize(">f"):
            fields.number(">f", meaning)
        else:
            fields.take(size, meaning)
    return fields


def _msgstream(batch: Batch) -> _Fields:
    topic = msgspec.json.encode(batch.topic)
    content = msgstream.encode_messages(batch)
    fields = _Fields(text_frame(msgstream.encode_packs([(int(PACK), content)])))
    fields.take(1, "WebSocket: last frame, text")
    short = fields.data[1]
    fields.take(1, "WebSocket: length", str(short))
    if short >= 126:
        fields.number("!H" if short == 126 else "!Q", "WebSocket: extended length")
    fields.take(2, "object begins")
    fields.take(len(PACK), "number of the pack")
    fields.take(len(b'":[['), "messages begin")
    fields.take(len(topic), "topic")
    fields.take(1, "separator")
    fields.take(fields.left - len(b"]]}"), "value")
    fields.take(fields.left, "messages and object end")
    return fields


def _queue(batch: Batch) -> _Fields:
    fields = _Fields(bytes(queue.encode(batch)))
    fields.take(fields.number(">i", "length of the message"), "message")
    return fields


_PROTOCOLS: Sequence[tuple[str, str, Callable[[Batch], _Fields]]] = (
    ("goms", "goMS", _goms),
    ("boson-frames", "Boson frames", _boson_frames),
    ("boson-properties", "Boson properties", _boson_properties),
    ("msgstream", "msgstream, WebSocket", _msgstream),
    ("queue", "Queue", _queue),
)


def _text(data: bytes) -> str:
    """Bytes for readers: as text, or in hexadecimal; cut if they are long."""
    try:
        shown = data.decode()
    except UnicodeDecodeError:
        shown = data[: VALUE_CHARACTERS_MAX // 2].hex()
        cut = len(data) > VALUE_CHARACTERS_MAX // 2
    else:
        cut = len(shown) > VALUE_CHARACTERS_MAX
        shown = shown[:VALUE_CHARACTERS_MAX]
    return f"{shown}…" if cut else shown
