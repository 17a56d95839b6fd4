"""The Boson frames codec: bytes in, events out; no socket anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.config import Limits
from polybus.wire.boson import ReceiptOwed, Subscribe, Unsubscribe
from polybus.wire.boson_frames import (
    BosonFramesCodec,
    Event,
    encode,
    encode_error,
    encode_frame,
    encode_position,
    encode_receipts,
)
from polybus.wire.codec import Bad, Publish

LIMITS = Limits(message_bytes_max=1000, parts_max=5, parts_bytes_max=50)
Told = list[tuple[str, object]]


def told(events: list[Event]) -> Told:
    """Events in plain words, messages one by one, so that chunking does not show."""
    words: Told = []
    for event in events:
        match event:
            case Publish(batches):
                words += [(batch.topic, value) for batch in batches for value in batch.values()]
            case Bad(error):
                words.append(("!" if error.final else "?", error.code))
            case Subscribe(lines):
                words += [("subscribe", (line.topic, line.start)) for line in lines]
            case Unsubscribe(lines):
                words.append(("unsubscribe", [line.topic for line in lines]))
            case ReceiptOwed(_, receipt_id):
                words.append(("owed", receipt_id))
    return words


def received(data: bytes, *cuts: int, default_topic: str | None = None) -> Told:
    codec = BosonFramesCodec(LIMITS, default_topic)
    events: list[Event] = []
    for start, stop in pairwise([0, *sorted(cuts), len(data)]):
        events += codec.receive(data[start:stop])
        while codec.backlog:
            events += codec.receive(b"")
    return told(events)


TRANSCRIPT = b"".join(
    [
        encode_frame(b"$subscribe", b"golang\nnews from=earliest"),
        encode_frame(b"golang", b"hello"),
        encode_frame(b"GoLang", b"again"),
        encode_frame(b"golang?receipt=1", b"with receipt"),
        encode_frame(b"news", b"a", flag=1),
        encode_frame(b"other", b"b", flag=1),
        encode_frame(b"", b"c"),
        encode_frame(b"news", b"d", flag=2),
        encode_frame(b"", b"", flag=2),
        encode_frame(b"", b"e"),
        encode_frame(b"news?receipt=9", b"f", flag=3),
        bytes(7),
        encode_frame(b"golang", b""),
        encode_frame(b"", b"nowhere"),
        encode_frame(b"$unsubscribe", b""),
    ]
)
EXPECTED: Told = [
    ("subscribe", ("golang", "latest")),
    ("subscribe", ("news", "earliest")),
    ("golang", b"hello"),
    ("golang", b"again"),
    ("golang", b"with receipt"),
    ("news", b"abc"),
    ("news", b"d"),
    ("news", b""),
    ("news", b"e"),
    ("news", b"f"),
    ("owed", b"9"),
    ("golang", b""),
    ("?", "topic.empty"),
    ("unsubscribe", []),
]


def test_the_seeds_example_is_one_message() -> None:
    data = bytes.fromhex("00000005 00 0005 746f706963 68656c6c6f")
    assert received(data) == [("topic", b"hello")]
    assert encode_frame(b"topic", b"hello") == data


@pytest.mark.parametrize("cut", range(len(TRANSCRIPT)))
def test_a_transcript_means_the_same_cut_at_any_byte(cut: int) -> None:
    assert received(TRANSCRIPT, cut) == EXPECTED


@given(st.lists(st.integers(0, len(TRANSCRIPT))))
def test_events_do_not_depend_on_where_the_network_cuts_the_stream(cuts: list[int]) -> None:
    assert received(TRANSCRIPT, *cuts) == EXPECTED


@given(st.lists(st.integers(0, len(TRANSCRIPT))))
def test_an_edge_that_carries_the_rest_itself_sees_the_same(cuts: list[int]) -> None:
    codec = BosonFramesCodec(LIMITS)
    events: list[Event] = []
    carry = b""
    for start, stop in pairwise([0, *sorted(cuts), len(TRANSCRIPT)]):
        events += codec.receive(carry + TRANSCRIPT[start:stop])
        carry = codec.take_carry()
    assert told(events) == EXPECTED


def test_plain_frames_come_as_one_batch_with_the_bytes_they_arrived_in() -> None:
    data = encode_frame(b"a", b"1") * 1000
    [event] = BosonFramesCodec(LIMITS).receive(data)
    assert isinstance(event, Publish)
    [batch] = event.batches
    assert len(batch) == 1000
    assert event.whole is not None
    assert bytes(event.whole) == data
    assert batch.encoded("boson-frames", encode) is event.whole


@pytest.mark.parametrize("topic", [b"A", b"a?receipt=1"])
def test_what_subscribers_must_not_see_is_never_forwarded_as_it_came(topic: bytes) -> None:
    [event] = BosonFramesCodec(LIMITS).receive(encode_frame(topic, b"x"))
    assert isinstance(event, Publish)
    assert event.whole is None
    assert encode(event.batches[0]) == encode_frame(b"a", b"x")


def test_flag_1_parts_are_one_message_and_an_empty_end_adds_nothing() -> None:
    parts = encode_frame(b"a", b"1", 1) + encode_frame(b"b", b"2", 1)
    assert received(parts + encode_frame(b"", b"3")) == [("a", b"123")]
    assert received(parts + bytes(7)) == [("a", b"12")]


def test_flag_2_parts_are_held_until_the_end_and_flag_3_parts_are_not() -> None:
    codec = BosonFramesCodec(LIMITS)
    assert codec.receive(encode_frame(b"a", b"1", 2)) == []
    assert told(codec.receive(encode_frame(b"", b"2"))) == [("a", b"1"), ("a", b"2")]
    assert told(codec.receive(encode_frame(b"a", b"1", 3))) == [("a", b"1")]
    assert told(codec.receive(encode_frame(b"x", b"2", 3))) == [("a", b"2")]
    assert told(codec.receive(bytes(7))) == []
    assert told(codec.receive(encode_frame(b"b", b"3"))) == [("b", b"3")]


def test_the_receipt_of_parts_is_the_last_ones_and_covers_all() -> None:
    data = encode_frame(b"a?receipt=77", b"1", 2) + encode_frame(b"", b"2")
    [event] = BosonFramesCodec(LIMITS).receive(data)
    assert isinstance(event, Publish)
    batch = event.batches[0]
    batch.epoch, batch.first_offset = 5, 10
    assert encode_receipts(batch) == encode_frame(b"$receipt", b"77 5:11")


def test_an_empty_topic_goes_to_the_connectors_default() -> None:
    assert received(encode_frame(b"", b"x"), default_topic="home") == [("home", b"x")]
    assert received(encode_frame(b"", b"x")) == [("?", "topic.empty")]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x00\x00\x00\x01\x04\x00\x01ab", "boson.flag-unknown"),
        (b"\x00\x00\x00\x01\xff\x00\x01ab", "boson.flag-unknown"),
        (b"\xff\xff\xff\xff\x00\x00\x01a", "boson.length-negative"),
        (b"\x80\x00\x00\x00\x00\x00\x01a", "boson.length-negative"),
        (b"\x7f\xff\xff\xff\x00\x00\x01a", "boson.message-too-large"),
        (b"\x00\x00\x03\xe9\x00\x00\x01a", "boson.message-too-large"),
        (encode_frame(b"a", b"1", 1) * 6, "boson.parts-too-many"),
        (encode_frame(b"a", b"x" * 51, 1), "boson.parts-too-large"),
    ],
)
def test_a_stream_that_cannot_be_understood_ends_with_its_error(data: bytes, code: str) -> None:
    good = encode_frame(b"a", b"before")
    assert received(good + data + good) == [("a", b"before"), ("!", code)]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (encode_frame(b"$nonsense", b"x"), "topic.reserved"),
        (encode_frame(b"\xff\xfe", b"x"), "topic.invalid"),
        (encode_frame(b"a\nb", b"x"), "topic.invalid"),
        (encode_frame(b"t" * 256, b"x"), "topic.invalid"),
        (encode_frame(b"a?receipt=" + b"i" * 256, b"x"), "boson.receipt-id-invalid"),
    ],
)
def test_an_error_about_one_message_leaves_the_stream_alone(data: bytes, code: str) -> None:
    good = encode_frame(b"a", b"x")
    words = received(good + data + good)
    assert sorted(map(str, words)) == sorted(map(str, [("a", b"x"), ("?", code), ("a", b"x")]))


def test_a_length_is_not_believed_before_its_bytes_are_there() -> None:
    codec = BosonFramesCodec(Limits())
    assert codec.receive(b"\x00\x0f\xff\xff\x02\x00\x01a" + bytes(100)) == []
    assert codec.unfinished_bytes == 108


def test_a_flood_of_the_same_mistake_is_answered_once_and_does_not_stop_the_others() -> None:
    codec = BosonFramesCodec(LIMITS)
    assert told(codec.receive(bytes(7) * 100_000)) == [("?", "topic.empty")]
    assert codec.backlog
    assert set(received(bytes(7) * 100_000)) == {("?", "topic.empty")}


def test_a_pause_for_others_loses_and_repeats_nothing() -> None:
    data = b"".join(encode_frame(b"", b"%d" % number) for number in range(5000))
    expected: Told = [("home", b"%d" % number) for number in range(5000)]
    assert received(data, 10, 11, 5000, default_topic="home") == expected


def test_a_message_in_one_byte_chunks_is_scanned_once() -> None:
    codec = BosonFramesCodec(Limits())
    data = encode_frame(b"a", bytes(100_000))
    events = [event for byte in data for event in codec.receive(bytes([byte]))]
    assert told(events) == [("a", bytes(100_000))]


@given(st.binary(max_size=200))
def test_garbage_gives_events_and_never_an_exception(data: bytes) -> None:
    codec = BosonFramesCodec(LIMITS)
    codec.receive(data)
    codec.close()


def test_replies_have_the_shapes_that_clients_rely_on() -> None:
    assert encode_error("topic.unknown", "no") == encode_frame(b"$error", b"topic.unknown no")
    assert encode_position("a b", 3, 4) == encode_frame(b"$position", b"3:4 a b")


def test_a_default_topic_is_lowercased_like_any_other() -> None:
    assert received(encode_frame(b"", b"x"), default_topic="NEWS") == [("news", b"x")]
