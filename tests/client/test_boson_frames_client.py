"""The client's side of Boson frames, against bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.batch import Batch
from polybus.config import Limits
from polybus.wire import boson_frames as server
from polybus.wire.boson import Positioned, Receipt, Refused, Subscribe
from polybus.wire.boson_frames import (
    BosonFramesClientCodec,
    Reply,
    encode_publish,
    encode_subscribe,
)
from polybus.wire.codec import Bad, Deliver, Publish
from polybus.wire.positions import Position

TRANSCRIPT = b"".join(
    [
        server.encode_position("news", 3, 10),
        bytes(server.encode(Batch.of("news", [b"a", b"", b"c" * 300]))),
        bytes(server.encode(Batch.of("sport", [b"x"]))),
        server.encode_frame(server.RECEIPT, b"id 7 3:14"),
        server.encode_error("topic.unknown", "there is no topic 'x'"),
        bytes(server.encode(Batch.of("news", [b"d"]))),
    ]
)


def flat(events: list[Reply]) -> list[object]:
    """Deliveries as (topic, value), in order per topic; everything else as it is."""
    out: list[object] = []
    for event in events:
        if isinstance(event, Deliver):
            out += [(batch.topic, value) for batch in event.batches for value in batch.values()]
        else:
            out.append(event)
    return out


EVENTS = [
    Positioned("news", Position(3, 10)),
    ("news", b"a"),
    ("news", b""),
    ("news", b"c" * 300),
    ("sport", b"x"),
    Receipt(b"id 7", Position(3, 14)),
    Refused("topic.unknown", "there is no topic 'x'"),
    ("news", b"d"),
]


def test_what_the_bus_sends_comes_out_as_events() -> None:
    assert flat(BosonFramesClientCodec(1 << 20).receive(TRANSCRIPT)) == EVENTS


@given(st.lists(st.integers(0, len(TRANSCRIPT))))
def test_events_do_not_depend_on_where_the_network_cuts_the_stream(cuts: list[int]) -> None:
    bounds = [0, *sorted(set(cuts) - {0, len(TRANSCRIPT)}), len(TRANSCRIPT)]
    codec = BosonFramesClientCodec(1 << 20)
    events: list[Reply] = []
    for start, end in pairwise(bounds):
        events += codec.receive(TRANSCRIPT[start:end])
    assert flat(events) == EVENTS


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\xff\xff\xff\xff\x00\x00\x01t", "boson.length-negative"),
        (b"\x00\x00\x10\x00\x00\x00\x01t", "boson.message-too-large"),
        (b"\x00\x00\x00\x01\x09\x00\x01tx", "boson.flag-unknown"),
        (server.encode_frame(b"$receipt", b"id nonsense"), "boson.answer-invalid"),
        (server.encode_frame(b"$position", b"1:x news"), "boson.answer-invalid"),
        (server.encode_frame(b"$new", b""), "boson.answer-invalid"),
    ],
)
def test_a_stream_that_makes_no_sense_ends_with_an_error(frame: bytes, code: str) -> None:
    codec = BosonFramesClientCodec(1000)
    before = bytes(server.encode(Batch.of("news", [b"kept"])))
    message, bad = codec.receive(before + frame)
    assert isinstance(message, Deliver)
    assert isinstance(bad, Bad)
    assert (bad.error.code, bad.error.final) == (code, True)
    assert codec.receive(before) == []


@given(st.binary(max_size=200))
def test_garbage_gives_an_error_and_never_an_exception(data: bytes) -> None:
    codec = BosonFramesClientCodec(1000)
    events = codec.receive(data) + codec.receive(b"\xff" * 7)
    assert [event for event in events if isinstance(event, Bad)] == events[-1:]


def published(data: bytes) -> list[tuple[str, list[bytes], list[bytes]]]:
    """What the server's codec makes of it: topic, values, receipt ids."""
    out = []
    for event in server.BosonFramesCodec(Limits()).receive(data):
        assert isinstance(event, Publish)
        for batch in event.batches:
            spans = list(batch.receipt_ids or ())
            ids = [bytes(batch.buffer[a:b]) for a, b in zip(spans[::2], spans[1::2], strict=True)]
            out.append((batch.topic, list(batch.values()), ids))
    return out


@pytest.mark.parametrize("values", [[b"one"], [b"one", b"", b"three"]])
def test_a_publish_is_understood_by_the_server(values: list[bytes]) -> None:
    assert published(bytes(encode_publish("news", values))) == [("news", values, [])]


def test_the_last_message_of_a_publish_asks_for_the_receipt() -> None:
    data = bytes(encode_publish("news", [b"one", b"two"], "7"))
    assert published(data) == [("news", [b"one", b"two"], [b"", b"7"])]


def test_a_subscribe_is_understood_by_the_server() -> None:
    data = encode_subscribe({"news": "earliest", "a topic": "3:14"})
    (event,) = server.BosonFramesCodec(Limits()).receive(data)
    assert isinstance(event, Subscribe)
    lines = [(line.topic, line.start, line.tell) for line in event.lines]
    assert lines == [("news", "earliest", True), ("a topic", "3:14", True)]
