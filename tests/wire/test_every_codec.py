"""The promises every server codec keeps, whatever its protocol (polybus/wire/codec.py)."""

from __future__ import annotations

import json
import random
import struct
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.batch import Batch, Headers
from polybus.config import Limits
from polybus.wire import boson_frames, boson_properties, boson_properties_client, goms, queue
from polybus.wire.codec import STEPS_MAX, Bad, Codec, Deliver, Publish

LIMITS = Limits(message_bytes_max=4096, parts_max=50, parts_bytes_max=8192, json_depth_max=16)


@dataclass
class Protocol:
    """A server codec under test, a transcript of its language, and how its own client reads."""

    name: str
    codec: Callable[[], Codec[Any]]
    transcript: bytes
    too_large: bytes
    one: Callable[[str, bytes], bytes]
    encode: Callable[[Batch], Any]
    client_values: Callable[[bytes], list[tuple[str, bytes]]]
    odd: bytes
    """A message that needs a look of its own, so that many of them make the codec pause."""
    has_headers: bool = False
    resyncs: bool = False
    """Whether its stream continues after any error."""


def frame(topic: bytes, content: bytes, flag: int = 0) -> bytes:
    return struct.pack(">ibH", len(content), flag, len(topic)) + topic + content


def props(*pairs: tuple[bytes, bytes]) -> bytes:
    message = struct.pack(">i", len(pairs) + 1)
    for key, value in ((b"hbfv", b"\x3f\x80\x00\x00"), *pairs):
        message += struct.pack(">H", len(key)) + key + struct.pack(">i", len(value)) + value
    return message


def line(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def frames_values(data: bytes) -> list[tuple[str, bytes]]:
    values = []
    for event in boson_frames.BosonFramesClientCodec(1 << 20).receive(data):
        assert isinstance(event, Deliver)
        for batch in event.batches:
            values += [(batch.topic, value) for value in batch.values()]
    return values


def properties_values(data: bytes) -> list[tuple[str, bytes]]:
    values = []
    for event in boson_properties_client.BosonPropertiesClientCodec(Limits()).receive(data):
        assert isinstance(event, boson_properties_client.Delivered)
        values.append((event.topic, event.content))
    return values


def goms_values(data: bytes) -> list[tuple[str, bytes]]:
    values = []
    for event in goms.GomsClientCodec(Limits()).receive(data):
        if isinstance(event, Deliver):
            for batch in event.batches:
                values += [(batch.topic, value) for value in batch.values()]
        else:
            assert isinstance(event, goms.Message)
            values += [(topic, event.value) for topic in event.topics]
    return values


def queue_values(data: bytes) -> list[tuple[str, bytes]]:
    values = []
    for event in queue.QueueCodec(Limits(), "news").receive(data):
        assert isinstance(event, Publish)
        for batch in event.batches:
            values += [(batch.topic, value) for value in batch.values()]
    return values


PROTOCOLS = [
    Protocol(
        name="boson-frames",
        codec=lambda: boson_frames.BosonFramesCodec(LIMITS),
        transcript=frame(b"news", b"one")
        + frame(b"$subscribe", b"news from=earliest\nsport")
        + frame(b"sport", b"a", 2)
        + frame(b"", b"b", 0)
        + frame(b"news?receipt=7", b"two")
        + frame(b"NEWS", b"three")
        + frame(b"", b"no topic")
        + frame(b"sport", b"")
        + frame(b"news", b"p", 3)
        + frame(b"x", b"q", 3)
        + bytes(7)
        + frame(b"$unsubscribe", b""),
        too_large=struct.pack(">ibH", 4097, 0, 4) + b"news",
        one=lambda topic, value: frame(topic.encode(), value),
        encode=boson_frames.encode,
        client_values=frames_values,
        odd=frame(b"$subscribe", b"news"),
    ),
    Protocol(
        name="boson-properties",
        codec=lambda: boson_properties.BosonPropertiesCodec(LIMITS),
        transcript=props((b"topic", b"news"), (b"content", b"one"))
        + props((b"hbfs", b"news from=earliest"))
        + props((b"hbff", b"\x02"), (b"topic", b"sport"), (b"content", b"a"))
        + props((b"content", b"b"))
        + props((b"hbfr", b"7"), (b"topic", b"news"), (b"content", b"two"), (b"k", b"\xff"))
        + props((b"topic", b"news"), (b"content", b"three"))
        + props((b"topic", b"news"), (b"content", b"four"))
        + props((b"content", b"no topic"))
        + bytes(4)
        + props((b"hbfu", b"")),
        too_large=props((b"topic", b"news"), (b"content", b""))[:-4] + struct.pack(">i", 4097),
        one=lambda topic, value: props((b"topic", topic.encode()), (b"content", value)),
        encode=boson_properties.encode,
        client_values=properties_values,
        odd=props((b"hbfs", b"news")),
        has_headers=True,
    ),
    Protocol(
        name="goms",
        codec=lambda: goms.GomsCodec(LIMITS),
        transcript=line(messagetype="register", topics=["News", "sport"], ack=True)
        + b'{"messagetype":"send","topics":["news"],"data":"one"}\r\n'
        + b'{"messagetype":"send","topics":["news"],"data":"two"}{"messagetype":"logout"}'
        + '{\n "messagetype": "send", "topics": ["sport"],\n "data": {"\xe9": 1}\n}'.encode()
        + b"\ngarbage\n[]\n"
        + line(messagetype="send", topics=["news", "sport"], data="three", headers={"k": "v"})
        + line(messagetype="send", topics=["news"], data="x" * 300)
        + line(messagetype="dance")
        + line(messagetype="logout", topics=["sport"]),
        too_large=line(messagetype="send", topics=["news"], data="x" * 4097),
        one=lambda topic, value: goms.encode_send([topic], value),
        encode=goms.encode,
        client_values=goms_values,
        odd=line(messagetype="register", topics=["news"]),
        has_headers=True,
        resyncs=True,
    ),
    Protocol(
        name="queue",
        codec=lambda: queue.QueueCodec(LIMITS, "news"),
        transcript=b"".join(struct.pack(">i", len(v)) + v for v in (b"one", b"", b"x" * 300, b"y")),
        too_large=struct.pack(">i", 4097),
        one=lambda topic, value: struct.pack(">i", len(value)) + value,
        encode=queue.encode,
        client_values=queue_values,
        odd=b"",
    ),
]
EACH = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda one: one.name)

Seen = tuple[dict[str, list[tuple[bytes, Headers | None, bytes]]], list[str]]


def seen(events: Iterable[Any]) -> Seen:
    """Each topic's messages in order, and everything else in order, however it was gathered."""
    messages: dict[str, list[tuple[bytes, Headers | None, bytes]]] = {}
    others: list[str] = []
    for event in events:
        if isinstance(event, Publish):
            for batch in event.batches:
                ids = batch.receipt_ids or array("i", bytes(4 * len(batch.spans)))
                for index, value in enumerate(batch.values()):
                    headers = batch.headers[index] if batch.headers else None
                    receipt = bytes(batch.buffer[ids[2 * index] : ids[2 * index + 1]])
                    messages.setdefault(batch.topic, []).append((value, headers, receipt))
        elif isinstance(event, goms.Send):
            for topic in event.topics:
                messages.setdefault(topic, []).append((event.value, event.headers, b""))
        elif isinstance(event, Bad):
            others.append(f"bad {event.error.code}")
        else:
            others.append(repr(event))
    return messages, others


def drain(codec: Codec[Any], data: bytes) -> list[Any]:
    """Receive, and continue as long as the codec paused."""
    events = codec.receive(data)
    while codec.backlog:
        events += codec.receive(b"")
    return events


def received(protocol: Protocol, chunks: Iterable[bytes]) -> list[Any]:
    codec = protocol.codec()
    return [event for chunk in chunks for event in drain(codec, chunk)]


def received_by_edge(protocol: Protocol, chunks: Iterable[bytes]) -> list[Any]:
    """The same for a caller that takes the carry and puts it in front of the next chunk."""
    codec = protocol.codec()
    events: list[Any] = []
    carry = b""
    for chunk in chunks:
        events += drain(codec, carry + chunk)
        carry = codec.take_carry()
    return events


@EACH
def test_the_transcript_is_understood(protocol: Protocol) -> None:
    messages, _ = seen(received(protocol, [protocol.transcript]))
    assert b"one" in [value for value, _, _ in messages["news"]]


@EACH
@pytest.mark.parametrize("receive", [received, received_by_edge], ids=["plain", "carried"])
def test_a_stream_may_be_cut_anywhere(
    protocol: Protocol, receive: Callable[..., list[Any]]
) -> None:
    whole = seen(receive(protocol, [protocol.transcript]))
    text = protocol.transcript
    for cut in range(len(text) + 1):
        assert without_repeats(seen(receive(protocol, [text[:cut], text[cut:]]))) == (
            without_repeats(whole)
        )
    single = [text[at : at + 1] for at in range(len(text))]
    assert without_repeats(seen(receive(protocol, single))) == without_repeats(whole)


def without_repeats(found: Seen) -> Seen:
    """Complaints of one kind are reported once per read, so their number depends on the reads."""
    messages, others = found
    kinds = sorted({other for other in others if other.startswith("bad ")})
    return messages, [other for other in others if not other.startswith("bad ")] + kinds


@EACH
@given(cuts=st.lists(st.integers(0, 600), max_size=12), mutations=st.data())
@settings(max_examples=150, deadline=None)
def test_cuts_change_nothing_even_in_broken_streams(
    protocol: Protocol, cuts: list[int], mutations: st.DataObject
) -> None:
    text = bytearray(protocol.transcript)
    for _ in range(mutations.draw(st.integers(0, 3))):
        text[mutations.draw(st.integers(0, len(text) - 1))] = mutations.draw(st.integers(0, 255))
    data = bytes(text)
    bounds = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    chunks = [data[start:end] for start, end in pairwise(bounds)]
    whole = without_repeats(seen(received(protocol, [data])))
    assert without_repeats(seen(received(protocol, chunks))) == whole
    assert without_repeats(seen(received_by_edge(protocol, chunks))) == whole


@EACH
@given(chunks=st.lists(st.binary(max_size=80), max_size=10))
@settings(max_examples=300, deadline=None)
def test_garbage_gives_events_and_bad_and_nothing_else(
    protocol: Protocol, chunks: list[bytes]
) -> None:
    codec = protocol.codec()
    for chunk in chunks:
        for event in drain(codec, chunk):
            assert not isinstance(event, BaseException)
        assert codec.unfinished_bytes < 3 * LIMITS.message_bytes_max + (64 << 10)
    codec.close()
    assert codec.unfinished_bytes == 0


@EACH
def test_long_runs_of_seeded_garbage_stay_within_the_limits(protocol: Protocol) -> None:
    draw = random.Random(7)
    for _ in range(200):
        codec = protocol.codec()
        for _ in range(20):
            at = draw.randrange(len(protocol.transcript))
            piece = protocol.transcript[at : at + draw.randrange(60)] + draw.randbytes(3)
            drain(codec, piece)
            held = codec.unfinished_bytes
            assert held <= LIMITS.message_bytes_max + LIMITS.parts_bytes_max + (64 << 10)


@EACH
def test_after_a_final_error_nothing_more_is_said(protocol: Protocol) -> None:
    codec = protocol.codec()
    events = drain(codec, protocol.one("news", b"before") + protocol.too_large)
    events += drain(codec, protocol.one("news", b"after"))
    messages, others = seen(events)
    assert [other for other in others if other.startswith("bad ")] == others != []
    values = [value for value, _, _ in messages["news"]]
    assert values == ([b"before", b"after"] if protocol.resyncs else [b"before"])
    finals = [event.error.final for event in events if isinstance(event, Bad)]
    assert finals == [not protocol.resyncs]


@EACH
def test_a_message_at_the_limit_is_taken(protocol: Protocol) -> None:
    value = b"x" * LIMITS.message_bytes_max
    messages, others = seen(received(protocol, [protocol.one("news", value)]))
    assert ([one[0] for one in messages["news"]], others) == ([value], [])


@EACH
def test_memory_is_taken_for_bytes_and_not_for_promises(protocol: Protocol) -> None:
    largest = protocol.one("news", b"x" * LIMITS.message_bytes_max)
    codec = protocol.codec()
    drain(codec, largest[:40])
    assert 0 < codec.unfinished_bytes <= 256
    assert codec.close() == []
    assert codec.unfinished_bytes == 0


@EACH
@given(values=st.lists(st.binary(max_size=60), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_what_one_side_encodes_the_other_decodes(protocol: Protocol, values: list[bytes]) -> None:
    sent = b"".join(protocol.one("news", value) for value in values)
    messages, others = seen(received(protocol, [sent]))
    assert ([one[0] for one in messages["news"]], others) == (values, [])
    batch = Batch.of("news", values)
    batch.epoch, batch.first_offset = 3, 11
    delivered = bytes(protocol.encode(batch))
    assert protocol.client_values(delivered) == [("news", value) for value in values]


@EACH
def test_headers_go_where_the_protocol_has_them(protocol: Protocol) -> None:
    batch = Batch.of("news", [b"a", b"b"], headers=[{"k": b"\x00\xff"}, None])
    batch.epoch, batch.first_offset = 3, 11
    delivered = bytes(protocol.encode(batch))
    assert protocol.client_values(delivered) == [("news", b"a"), ("news", b"b")]
    batch = Batch.of("news", [b"a", b"b"])
    batch.epoch, batch.first_offset = 3, 11
    assert (len(delivered) > len(protocol.encode(batch))) == protocol.has_headers


@EACH
def test_a_long_read_of_odd_messages_is_taken_in_steps(protocol: Protocol) -> None:
    if not protocol.odd:
        # Nothing in this protocol needs a look of its own: it never pauses.
        assert not protocol.codec().backlog
        return
    count = 2 * STEPS_MAX + 10
    codec = protocol.codec()
    first = codec.receive(protocol.odd * count + protocol.one("news", b"last"))
    assert codec.backlog
    assert len(first) <= STEPS_MAX + 1
    events, turns = list(first), 1
    while codec.backlog:
        events += codec.receive(b"")
        turns += 1
    messages, others = seen(events)
    assert (len(others), turns) == (count, 3)
    assert [one[0] for one in messages["news"]] == [b"last"]


@EACH
def test_more_may_come_while_a_codec_has_paused(protocol: Protocol) -> None:
    codec = protocol.codec()
    count = STEPS_MAX + 5
    events = codec.receive((protocol.odd or protocol.one("news", b"x")) * count)
    events += drain(codec, protocol.one("news", b"last"))
    messages, _ = seen(events)
    assert messages["news"][-1][0] == b"last"


@EACH
def test_an_unfinished_message_is_dropped_at_the_end(protocol: Protocol) -> None:
    codec = protocol.codec()
    whole = protocol.one("news", b"x" * 100)
    events = drain(codec, whole + whole[:-1] if protocol.name != "goms" else whole + whole[:-3])
    events += codec.close()
    messages, others = seen(events)
    assert (len(messages["news"]), others) == (1, [])
