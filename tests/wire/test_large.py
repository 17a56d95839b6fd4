"""Payloads over `inline-bytes-max` come out of every codec in pieces, however they were cut."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest

from polybus.config import Limits
from polybus.wire.boson import ReceiptOwed
from polybus.wire.boson_frames import BosonFramesCodec, encode_frame
from polybus.wire.boson_properties import BosonPropertiesCodec, encode_publish
from polybus.wire.codec import Bad, LargeBegin, LargeDropped, LargeEnd, LargePiece, Publish
from polybus.wire.goms import GomsCodec, Send
from polybus.wire.goms_text import LargeText, large_data_at
from polybus.wire.queue import QueueCodec

LIMITS = Limits(inline_bytes_max=100, message_bytes_max=100_000)
VALUE = random.Random(1).randbytes(5000)
TEXT = 'h\xe9llo "w"\n\U0001f600 \\ \x01' * 300


def parts(*pieces: bytes) -> bytes:
    found = b"".join(encode_frame(b"a?receipt=7", piece, 1) for piece in pieces)
    return found + encode_frame(b"a", b"")


def property_parts(*pieces: bytes) -> bytes:
    first = encode_publish("a", pieces[0], {"h": b"1"}, b"7", flag=1)
    others = b"".join(encode_publish("", piece, flag=1) for piece in pieces[1:])
    return first + others + encode_publish("", b"")


def goms(**fields: Any) -> bytes:
    return json.dumps({"messagetype": "send", "topics": ["a"], **fields}).encode() + b"\n"


STREAMS: dict[str, tuple[type[Any], bytes, bytes]] = {
    "frame": (BosonFramesCodec, encode_frame(b"a?receipt=7", VALUE), VALUE),
    "small parts": (BosonFramesCodec, parts(*(bytes([n]) for n in VALUE[:400])), VALUE[:400]),
    "large parts": (BosonFramesCodec, parts(VALUE, b"x", VALUE), VALUE + b"x" + VALUE),
    "properties": (BosonPropertiesCodec, encode_publish("a", VALUE, {"h": b"1"}, b"7"), VALUE),
    "property parts": (BosonPropertiesCodec, property_parts(b"x", VALUE, VALUE), b"x" + VALUE * 2),
    "small property parts": (
        BosonPropertiesCodec,
        property_parts(*[VALUE[at : at + 40] for at in range(0, 400, 40)]),
        VALUE[:400],
    ),
    "goms": (GomsCodec, goms(ack=True, data=TEXT), TEXT.encode()),
    "goms, data first": (
        GomsCodec,
        json.dumps({"data": TEXT, "topics": ["a"], "messagetype": "send"}).encode() + b"\n",
        TEXT.encode(),
    ),
    "queue": (QueueCodec, struct.pack(">i", len(VALUE)) + VALUE, VALUE),
}
SMALL = {
    BosonFramesCodec: encode_frame(b"a", b"small"),
    BosonPropertiesCodec: encode_publish("a", b"small"),
    GomsCodec: goms(data="small"),
    QueueCodec: struct.pack(">i", 5) + b"small",
}


def made(kind: type[Any]) -> Any:
    return QueueCodec(LIMITS, "a") if kind is QueueCodec else kind(LIMITS)


def cut(data: bytes, dice: random.Random) -> list[bytes]:
    places = sorted(dice.randrange(len(data) + 1) for _ in range(dice.choice([0, 1, 5, 50])))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


def fed(codec: Any, chunks: list[bytes]) -> list[Any]:
    """The events, as an edge gets them: what is carried comes before the next data."""
    events: list[Any] = []
    carry = b""
    for chunk in chunks:
        events += codec.receive(carry + chunk)
        while codec.backlog:
            events += codec.receive(b"")
        carry = codec.take_carry() if codec.unfinished_bytes < 4096 else b""
    return events


def payloads(events: list[Any]) -> list[bytes]:
    """All messages; a large one that arrived in one read may come as any other."""
    found: list[bytes] = []
    is_open = False
    for event in events:
        assert is_open == isinstance(event, LargePiece | LargeEnd), event
        match event:
            case LargeBegin():
                is_open = True
                found.append(b"")
            case LargePiece(data):
                found[-1] += bytes(data)
            case LargeEnd():
                is_open = False
                if event.spans is not None:
                    whole, places = found.pop(), list(event.spans)
                    assert len(event.part_headers or ()) == len(places) // 2
                    found += [whole[at:to] for at, to in zip(*[iter(places)] * 2, strict=True)]
            case Publish(batches):
                found += [value for batch in batches for value in batch.values()]
            case Send():
                found.append(event.value)
    return found


@pytest.mark.parametrize("name", STREAMS)
def test_a_large_payload_comes_in_pieces_between_its_neighbours_however_it_was_cut(
    name: str,
) -> None:
    kind, data, value = STREAMS[name]
    small = SMALL[kind]
    for seed in range(40):
        codec = made(kind)
        events = fed(codec, cut(small + data + small + data, random.Random(seed)))
        assert payloads(events) == [b"small", value, b"small", value], seed
        ends = [event for event in events if isinstance(event, LargeEnd)]
        assert all(end.topics == ("a",) for end in ends)
        if kind in (BosonFramesCodec, BosonPropertiesCodec):
            assert all(end.receipt_id == b"7" for end in ends)
        if kind is BosonPropertiesCodec:
            assert all(end.headers == {"h": b"1"} for end in ends)
        assert codec.unfinished_bytes == 0


SIZES = [10, 500, 3, 700, 150, 0, 20, 1]


def frame_parts(flag: int, values: list[bytes]) -> bytes:
    parts = b"".join(encode_frame(b"a?receipt=7", value, flag) for value in values)
    return parts + encode_frame(b"a", b"")


def separate_properties(flag: int, values: list[bytes]) -> bytes:
    first = encode_publish("a", values[0], {"h": b"0"}, b"7", flag=flag)
    others = [
        encode_publish("", value, {"h": b"%d" % number}, flag=flag)
        for number, value in enumerate(values[1:], 1)
    ]
    return first + b"".join(others) + encode_publish("", b"")


@pytest.mark.parametrize("flag", [2, 3])
@pytest.mark.parametrize("make", [frame_parts, separate_properties])
def test_parts_that_are_messages_come_in_pieces_too(flag: int, make: Any) -> None:
    kind = BosonFramesCodec if make is frame_parts else BosonPropertiesCodec
    values = [VALUE[size : 2 * size] for size in SIZES]
    small = SMALL[kind]
    data = small + make(flag, values) + small + make(flag, values[:1] + values[2:3]) + small
    for seed in range(60):
        codec = made(kind)
        events = fed(codec, cut(data, random.Random(seed)))
        assert not any(isinstance(event, Bad) for event in events), events
        expected = [b"small", *values, b"small", values[0], values[2], b"small"]
        assert payloads(events) == expected, seed
        ends = [event for event in events if isinstance(event, LargeEnd)]
        if flag == 2:
            assert [end.receipt_id for end in ends] == [b"7"]
            heads = [{"h": b"%d" % number} for number in range(len(values))]
            assert kind is BosonFramesCodec or list(ends[0].part_headers or ()) == heads
        else:
            assert [end.part_number for end in ends] == [2, 4, 5]
            assert sum(isinstance(event, ReceiptOwed) for event in events) == 2
        assert codec.unfinished_bytes == 0


def test_memory_is_bounded_while_a_payload_arrives() -> None:
    for kind, data, _ in STREAMS.values():
        codec = made(kind)
        for at in range(0, len(data), 64):
            codec.receive(data[at : at + 64])
            assert codec.unfinished_bytes < 1000, kind


@pytest.mark.parametrize(
    ("tail", "code"),
    [
        (b'x","topics":["a"],"messagetype":"send","data":"again"}', "goms.000001"),
        (b'x","topics":["a"],"messagetype":"register"}', "goms.000003"),
        (b'x","topics":"a","messagetype":"send"}', "goms.000001"),
        (b'x","topics":["a"],"messagetype":"send","encoding":"rot13"}', "goms.000001"),
        (b"x\n", "goms.000001"),
        (b"\xff\n", "goms.000001"),
        (b'\\q"}\n', "goms.000001"),
        (b'x"]', "goms.000001"),
    ],
)
def test_a_goms_object_that_turns_out_bad_is_dropped_and_the_next_is_read(
    tail: bytes, code: str
) -> None:
    codec = GomsCodec(LIMITS)
    events = fed(codec, [b'{"data":"' + b"x" * 2000, tail, b"\n" + goms(data="next")])
    errors = [event.error.code for event in events if isinstance(event, Bad)]
    assert errors == [code]
    assert sum(isinstance(event, LargeDropped) for event in events) == 1
    assert not any(isinstance(event, LargeEnd) for event in events)
    assert isinstance(events[-1], Publish)


def test_data_over_the_limit_is_dropped_as_it_comes() -> None:
    codec = GomsCodec(LIMITS)
    events = fed(codec, [b'{"messagetype":"send","topics":["a"],"data":"', *[b"x" * 1000] * 200])
    events += fed(codec, [b'"}\n' + goms(data="next")])
    assert [event.error.code for event in events if isinstance(event, Bad)] == ["goms.000003"]
    assert sum(len(event.data) for event in events if isinstance(event, LargePiece)) < 140_000
    assert isinstance(events[-1], Publish)


def test_a_bad_topic_refuses_a_payload_at_its_end_and_nothing_of_it_is_handed_on() -> None:
    for codec, data in (
        (BosonFramesCodec(LIMITS), encode_frame(b"", VALUE) + encode_frame(b"a", b"next")),
        (BosonPropertiesCodec(LIMITS), encode_publish("", VALUE) + encode_publish("a", b"next")),
    ):
        events = fed(codec, [data[at : at + 500] for at in range(0, len(data), 500)])
        assert [event.error.code for event in events if isinstance(event, Bad)] == ["topic.empty"]
        assert not any(isinstance(event, LargeEnd) for event in events)
        assert isinstance(events[-1], Publish)


@pytest.mark.parametrize(
    ("head", "at"),
    [
        (b'{"data":"xx', 9),
        (b'{ "topics" : ["a", "b\\""], "data" : "xx', 37),
        (b'{"a":{"data":"x","b":[1,{}]},"data":"', 37),
        (b'{"a":1.5e3,"b":null,"data":"', 28),
        (b'{"data":"xx"', None),
        (b'{"data":{"a":"xx', None),
        (b'{"other":"xx', None),
        (b'{"a":"data","other":"xx', None),
        (b'["data":"xx', None),
        (b'{"data"', None),
    ],
)
def test_a_string_that_has_not_ended_is_found_in_the_head_of_its_object(
    head: bytes, at: int | None
) -> None:
    assert large_data_at(head) == at


def test_text_is_decoded_the_same_wherever_it_is_cut() -> None:
    encoded = json.dumps(TEXT).encode()[1:] + b"}"
    plain = json.dumps(TEXT, ensure_ascii=False).encode()[1:] + b"}"
    for data in (encoded, plain):
        for at in range(1, 200):
            text = LargeText(b"")
            first, end = text.decode(data[:at])
            assert end == at and not text.ended
            second, end = text.decode(data[at:])
            assert text.ended and data[at:][end:] == b"}"
            assert first + second == TEXT.encode()
