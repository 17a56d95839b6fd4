"""Valid frames for every parser, and their mutations.

A frame is a list of parts: numbers of a known layout, and bytes. `mutated` changes some parts, so
that the parser gets past the first bytes and into every branch after a length, a flag or a name.
"""

import gzip
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import calcsize, pack
from typing import Any

from polybus.torture.bus.child import TOPICS

DEPTH = 2000
KEY = b"<session key>"
"""Stands for the key of a session of the bus."""
NAMES = (*TOPICS, "", "$events", "nobody", "x" * 300, "Ä", "a/../b", "$subscribe", "$login", "*")
CONTENTS = (b"", b"hello", b"{}", b"\xff\xfe", b"x" * 5000, b"alpha from=earliest", b"\0" * 9)


@dataclass(frozen=True, slots=True)
class Number:
    """An integer with its layout on the wire, as `struct` names it."""

    layout: str
    value: int

    def encode(self) -> bytes:
        bits = 8 * calcsize(self.layout)
        value = self.value % (1 << bits)
        if self.layout[-1].islower() and value >= 1 << (bits - 1):
            value -= 1 << bits
        return pack(self.layout, value)


Part = bytes | Number
Frame = list[Part]


def encoded(frame: Sequence[Part]) -> bytes:
    return b"".join(part if isinstance(part, bytes) else part.encode() for part in frame)


def mutated(frame: Frame, chance: random.Random) -> Frame:
    """The frame with one to three faults."""
    frame = list(frame)
    for _ in range(chance.randint(1, 3)):
        index = chance.randrange(len(frame))
        part = frame[index]
        fault = chance.random()
        if fault < 0.08:
            del frame[index]
            if not frame:
                return [b"\0"]
        elif fault < 0.14:
            frame.insert(index, chance.choice(frame))
        elif isinstance(part, Number):
            frame[index] = Number(part.layout, _wrong_number(part, chance))
        else:
            frame[index] = _wrong_bytes(part, chance)
    return frame


def _wrong_number(part: Number, chance: random.Random) -> int:
    top = 1 << (8 * calcsize(part.layout))
    near = (part.value - 1, part.value + 1, part.value * 2, 0, 1, -1)
    far = (top // 2 - 1, top // 2, top - 1, (64 << 20) + 1, chance.randrange(top))
    return chance.choice(near + far)


def _wrong_bytes(part: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(part) + 1)
    fault = chance.randrange(5)
    if fault == 0:
        return part[:at]
    if fault == 1:
        return part[:at] + chance.randbytes(chance.randint(1, 8)) + part[at:]
    if fault == 2 and part:
        changed = bytearray(part)
        changed[at - 1] ^= 1 << chance.randrange(8)
        return bytes(changed)
    if fault == 3:
        return chance.choice(NAMES).encode()
    return chance.choice(CONTENTS)


# Valid frames.


LOGINS_SHARE = 0.01
"""A login that fails is slow, and those of an address wait for each other."""


def boson_frame(chance: random.Random) -> Frame:
    topic = chance.choice((b"alpha", b"beta?receipt=1", b"$subscribe", b"$unsubscribe"))
    if chance.random() < LOGINS_SHARE:
        topic = b"$login"
    content = chance.choice(CONTENTS)
    flag = chance.choice((0, 0, 0, 1, 2, 3))
    return [
        Number(">i", len(content)),
        Number(">b", flag),
        Number(">H", len(topic)),
        topic,
        content,
    ]


def boson_properties(chance: random.Random) -> Frame:
    pairs = [(b"hbfv", b"\x3f\x80\x00\x00"), (b"topic", b"alpha"), (b"content", b"hello")]
    pairs += chance.sample(
        [(b"hbfr", b"7"), (b"hbff", b"1"), (b"hbfs", b"alpha"), (b"hbfu", b""), (b"x", b"y")], 2
    )
    frame: Frame = [Number(">i", len(pairs))]
    for name, value in pairs:
        frame += [Number(">H", len(name)), name, Number(">i", len(value)), value]
    return frame


def goms(chance: random.Random) -> Frame:
    kind = chance.choice(("register", "send", "logout", "login", "close", "download", "?"))
    fields: dict[str, Any] = {"messagetype": kind, "topics": ["alpha"], "data": "hello"}
    if kind == "download":
        fields = {"messagetype": kind, "id": chance.choice((BLOB.decode(), "x" * 64, ""))}
        fields["from"] = chance.choice((0, 3, len(PAYLOAD), -1, 1 << 63))
        fields["bytes"] = chance.choice((1, 100, 1 << 40, 0, -1))
    else:
        more: tuple[dict[str, Any], ...] = ({}, {"ack": True}, {"from": "earliest"})
        fields |= chance.choice((*more, {"headers": {"a": "b"}}))
    if chance.random() < 0.5:
        name = chance.choice(sorted(fields))
        fields[name] = chance.choice((None, 1, [], {}, [[]], "x" * 300, 1e308, ["alpha"] * 2000))
    frame: Frame = [b"{"]
    for number, (name, value) in enumerate(fields.items()):
        comma = b"," if number else b""
        frame += [comma + json.dumps(name).encode(), b":", json.dumps(value).encode()]
    if chance.random() < 0.05:
        frame += [b',"deep":' + b"[" * DEPTH]
    return [*frame, b"}", b"\n"]


def queue(chance: random.Random) -> Frame:
    content = chance.choice(CONTENTS)
    return [Number(">i", len(content)), content]


def gzipped(chance: random.Random) -> Frame:
    content = b"".join(encoded(boson_frame(chance)) for _ in range(5))
    # Without the time: a seed decides every byte.
    packed = gzip.compress(content, mtime=0)
    return [packed[:10], packed[10:-8], packed[-8:]]


PAYLOAD = b"large " * 100
BLOB = hashlib.sha256(PAYLOAD).hexdigest().encode()
EVENT = (
    b'{"specversion":"1.0","id":"1","source":"/torture","type":"t","data":{"n":1}}',
    b"application/cloudevents+json",
)
EVENTS = (b"[%s,%s]" % (EVENT[0], EVENT[0]), b"application/cloudevents-batch+json")
JSON = b"application/json"
API: tuple[tuple[bytes, bytes, tuple[bytes, ...], tuple[tuple[bytes, bytes], ...]], ...] = (
    # Method, path, queries, and bodies with their types.
    (
        *(b"PUT", b"/v1/topics/alpha/blob"),
        (b"", b"?sha256=" + BLOB, b"?sha256=%s&from=3" % BLOB, b"?from=9"),
        ((PAYLOAD, b"text/plain"), (PAYLOAD[3:], b"text/plain"), EVENT),
    ),
    (b"GET", b"/v1/topics/alpha/blob", (b"?sha256=" + BLOB, b"?sha256=x", b""), ()),
    (b"GET", b"/v1/blobs/" + BLOB, (b"",), ()),
    (b"GET", b"/v1/blobs/" + BLOB[:-1] + b"-", (b"",), ()),
    (b"POST", b"/v1/topics/alpha/messages", (b"", b"?key=1"), (EVENT, EVENTS, (b"[]", EVENTS[1]))),
    # Nothing of these reaches a query process: that would take most of the time.
    (
        *(b"POST", b"/v1/sql", (b"",)),
        (
            (b'{"query":""}', JSON),
            (b'{"query":"SELECT 1","rows-max":0}', JSON),
            (b'{"query":"SELECT 1","time-s":-1,"id":"q"}', JSON),
        ),
    ),
    (b"DELETE", b"/v1/sql/q", (b"",), ()),
    (b"GET", b"/v1/topics/alpha/search", (b"?limit=0", b"?text=a&stop=-1", b"?equals=1&x=2"), ()),
    (b"GET", b"/v1/topics/alpha/histogram", (b"?bins=0", b"?from=never", b"?to=%FF"), ()),
    (b"GET", b"/v1/topics/alpha/export", (b"?format=xlsx", b"?limit=0"), ()),
    (b"GET", b"/v1/accounts", (b"",), ()),
    (b"POST", b"/v1/accounts", (b"",), ((b'{"name":"shop"}', JSON), (b'{"name":"?"}', JSON))),
    (
        *(b"POST", b"/v1/accounts/shop/grants", (b"",)),
        ((b'{"to":"a","topics":"*","rights":["publish"]}', JSON), (b"{}", JSON)),
    ),
    (b"DELETE", b"/v1/accounts/shop/tokens/1", (b"",), ()),
    (b"POST", b"/v1/tokens", (b"",), ((b'{"rights":["publish"]}', JSON), (b"[]", JSON))),
    (b"POST", b"/v1/signup", (b"",), ((b'{"name":"a","password":"b"}', JSON),)),
)
"""Routes with bodies, headers or parameters of their own."""
RANGES = (b"bytes=0-9", b"bytes=5-", b"bytes=-5", b"bytes=9-1", b"bytes=0-0,1-1", b"lines=1-2")
API_SHARE = 0.4
QUERIES_SHARE = 0.003
QUERIES = (
    (b"POST", b"/v1/sql", b"", b'{"query":"SELECT 1"}'),
    (b"GET", b"/v1/topics/alpha/search", b"?text=hello&limit=1", b""),
    (b"GET", b"/v1/topics/alpha/histogram", b"?bins=3", b""),
    (b"GET", b"/v1/topics/alpha/export", b"?limit=3&format=jsonl", b""),
)
"""These are done by processes that a peer's end kills: there are few of them."""


def _api(chance: random.Random) -> Frame:
    """A request for one of the routes that have more than a small body."""
    kind = JSON
    if chance.random() < QUERIES_SHARE / API_SHARE:
        method, path, query, body = chance.choice(QUERIES)
    else:
        method, path, queries, bodies = chance.choice(API)
        query = chance.choice(queries)
        body, kind = chance.choice(bodies) if bodies else (b"", kind)
    frame: Frame = [method, b" ", path, query, b" HTTP/1.1\r\n", b"host: 127.0.0.1\r\n"]
    frame += [b"content-type: ", kind, b"\r\n"]
    if path.startswith(b"/v1/blobs/") and chance.random() < 0.7:
        frame += [b"range: ", chance.choice(RANGES), b"\r\n"]
    if path.endswith(b"/blob") and chance.random() < 0.3:
        frame += [b"ce-id: 1\r\nce-source: /t\r\nce-type: t\r\nce-specversion: ", b"1.0", b"\r\n"]
    return [*frame, b"content-length: ", str(len(body)).encode(), b"\r\n\r\n", body]


def http(chance: random.Random) -> Frame:
    if chance.random() < API_SHARE:
        return _api(chance)
    method = chance.choice((b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS"))
    path = chance.choice(
        (b"/v1/topics", b"/v1/topics/alpha/messages", b"/v1/sessions", b"/v1/commits", b"/metrics")
        + (b"/v1/sessions/%s/packs" % KEY, b"/v1/sessions/%s/topics" % KEY, b"/v1/sessions/k/packs")
        + (b"/v1/broadcast", b"/msgstream", b"/v1/staging/p/0-12345678.a")
    )
    query = chance.choice((b"", b"?offset=0&limit=1", b"?time=2020-01-01", b"?sessionKey=" + KEY))
    body = chance.choice(
        (b"", b"[]", b'{"name":"' + b"t" * 9 + b'"}', b'{"topics":["alpha"]}', b'[["a",1]]')
        + (b'{"value":1}\n{"base64":"AA=="}\n', b"[" * DEPTH, b'{"batch":-1}')
    )
    kind = chance.choice((b"application/json", b"application/x-ndjson", b"text/plain"))
    head = b"host: 127.0.0.1\r\ncontent-type: " + kind + b"\r\n"
    frame: Frame = [method, b" ", path, query, b" HTTP/1.1\r\n", head]
    if chance.random() < 0.3:
        return [*frame, b"transfer-encoding: chunked\r\n\r\n", *_chunks(body, chance)]
    return [*frame, b"content-length: ", str(len(body)).encode(), b"\r\n\r\n", body]


def _chunks(body: bytes, chance: random.Random) -> Frame:
    """A body in one to three chunks, each with its length, and the last one without content."""
    cuts = sorted(chance.randrange(len(body) + 1) for _ in range(chance.randrange(3)))
    frame: Frame = []
    for start, stop in itertools.pairwise((0, *cuts, len(body))):
        if start < stop:
            frame += [b"%x" % (stop - start), b"\r\n", body[start:stop], b"\r\n"]
    return [*frame, b"0", b"\r\n\r\n"]


def websocket(chance: random.Random) -> Frame:
    """A frame from a client: final bit and opcode, masked length, mask, masked payload."""
    payload = chance.choice((b"1,2,3", b"", b"9" * 120, b"\xff", b"0", b"-1"))
    return _masked(payload, chance)


def live(chance: random.Random) -> Frame:
    """A request on the WebSocket of the console."""
    fields: dict[str, Any] = {"op": chance.choice(("subscribe", "unsubscribe", "login", "ping"))}
    fields["id"] = chance.choice((1, 2, 3, -1, 1 << 70))
    fields["channel"] = chance.choice(("figures", "connections", "graph", "tail", "replay", "?"))
    fields |= chance.choice(({}, {"topic": "alpha"}, {"topic": "x" * 50}, {"token": ""}))
    if chance.random() < 0.3:
        fields[chance.choice(("op", "id", "text", "more"))] = chance.choice((None, [], "x", 1e9))
    return _masked(json.dumps(fields, separators=(",", ":")).encode()[:125], chance)


def _masked(payload: bytes, chance: random.Random) -> Frame:
    mask = chance.randbytes(4)
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    opcode = chance.choice((0, 1, 1, 1, 2, 8, 9, 10))
    return [Number(">B", 0x80 | opcode), Number(">B", 0x80 | len(payload)), mask, masked]


PARSERS: dict[str, Callable[[random.Random], Frame]] = {
    "boson-frames": boson_frame,
    "boson-properties": boson_properties,
    "goms": goms,
    "udp": goms,
    "queue": queue,
    "gzip": gzipped,
    "http": http,
    "websocket": websocket,
    "live": live,
}
