"""The queue codec: any chunking, batches of the connector's topic, nothing on a length's word."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.batch import Batch
from polybus.config import Limits
from polybus.wire.codec import Bad, Codec, LargeBegin, Publish
from polybus.wire.queue import (
    PROTOCOL,
    RECEIVING,
    Event,
    Framing,
    QueueCodec,
    QueueReader,
    Receiving,
    encode,
    encode_length,
)

LIMITS = Limits(message_bytes_max=1000)


def wire(*messages: bytes) -> bytes:
    return b"".join(encode_length(message) + message for message in messages)


MESSAGES = [b"one", b"", b"x" * 300, b"four"]
STREAM = wire(*MESSAGES)


def codec() -> QueueCodec:
    return QueueCodec(LIMITS, "work")


def published(events: list[Event]) -> list[bytes]:
    values: list[bytes] = []
    for event in events:
        assert isinstance(event, Publish)
        for batch in event.batches:
            assert batch.topic == "work"
            values += batch.values()
    return values


@given(st.lists(st.integers(0, len(STREAM))), st.booleans())
def test_messages_do_not_depend_on_where_the_network_cuts_the_stream(
    cuts: list[int], carried: bool
) -> None:
    bounds = [0, *sorted(set(cuts) - {0, len(STREAM)}), len(STREAM)]
    subject, reader = codec(), QueueReader(1000)
    events: list[Event] = []
    messages: list[bytes] = []
    carry = b""
    for start, end in pairwise(bounds):
        events += subject.receive(carry + STREAM[start:end])
        messages += reader.receive(STREAM[start:end])
        carry = subject.take_carry() if carried else b""
    assert published(events) == messages == MESSAGES


def test_one_byte_at_a_time_gives_each_message_once() -> None:
    subject = codec()
    events = [event for byte in STREAM for event in subject.receive(bytes([byte]))]
    assert published(events) == MESSAGES


def test_a_read_of_whole_messages_is_one_batch_with_its_own_encoding() -> None:
    (event,) = codec().receive(STREAM)
    assert isinstance(event, Publish)
    (batch,) = event.batches
    assert batch.buffer is STREAM
    assert event.whole == STREAM
    assert batch.encoded(PROTOCOL, lambda _: b"") == STREAM


def test_an_unfinished_end_is_no_part_of_the_forwarded_bytes() -> None:
    (event,) = codec().receive(STREAM + b"\0\0\0\5h")
    assert isinstance(event, Publish)
    assert event.whole == STREAM


def test_a_message_in_pieces_is_not_forwarded_as_one() -> None:
    subject = codec()
    assert subject.receive(STREAM[:5]) == []
    first, *others = subject.receive(STREAM[5:])
    assert isinstance(first, Publish)
    assert first.whole is None
    assert published([first, *others]) == MESSAGES


@pytest.mark.parametrize(
    ("length", "code"),
    [
        (b"\xff\xff\xff\xff", "queue.length-negative"),
        (b"\x80\0\0\0", "queue.length-negative"),
        (b"\0\0\x03\xe9", "queue.message-too-large"),
        (b"\x7f\xff\xff\xff", "queue.message-too-large"),
    ],
)
@pytest.mark.parametrize("cut", [0, 1, 4])
def test_an_impossible_length_is_final_and_what_came_before_counts(
    length: bytes, code: str, cut: int
) -> None:
    subject = codec()
    events = subject.receive(wire(b"good") + length[:cut]) + subject.receive(length[cut:] + b"more")
    assert published(events[:1]) == [b"good"]
    (bad,) = events[1:]
    assert isinstance(bad, Bad)
    assert (bad.error.code, bad.error.final) == (code, True)
    assert subject.receive(wire(b"later")) == []
    assert subject.unfinished_bytes == 0


def test_a_reader_keeps_the_error_and_the_messages_before_it() -> None:
    reader = QueueReader(1000)
    assert reader.receive(wire(b"good") + b"\xff\xff\xff\xff") == [b"good"]
    assert reader.error is not None
    assert reader.error.code == "queue.length-negative"
    assert reader.receive(wire(b"later")) == []


def test_a_length_and_nothing_else_takes_no_memory() -> None:
    subject = QueueCodec(Limits(), "work")
    assert subject.receive((64 << 20).to_bytes(4, "big")) == [LargeBegin("work")]
    assert subject.unfinished_bytes == 4
    assert subject.missing_bytes == 64 << 20
    assert subject.close() == []
    assert subject.unfinished_bytes == 0


def test_a_message_of_the_limit_passes() -> None:
    assert published(codec().receive(wire(b"x" * 1000))) == [b"x" * 1000]


def test_a_batch_of_any_origin_is_encoded_without_its_topic() -> None:
    assert encode(Batch.of("other", [b"a", b"", b"bc"])) == wire(b"a", b"", b"bc")


@given(st.lists(st.binary(max_size=30)))
def test_what_is_encoded_is_read_back(messages: list[bytes]) -> None:
    assert QueueReader(30).receive(encode(Batch.of("t", messages))) == messages


@given(st.lists(st.binary(max_size=40)))
def test_garbage_gives_messages_or_a_peer_error_and_nothing_else(chunks: list[bytes]) -> None:
    subject: Codec[Event] = codec()
    events = [event for chunk in chunks for event in subject.receive(chunk)]
    assert all(isinstance(event, Publish) for event in events[:-1])
    assert subject.unfinished_bytes <= sum(map(len, chunks))


HAPPENINGS: dict[tuple[Receiving, str], tuple[bytes, bytes]] = {
    (Receiving.LENGTH, "whole messages at once"): (b"\0\0", b"\0\1a" + wire(b"b")),
    (Receiving.LENGTH, "all 4 bytes, a length within the limit"): (b"\0", b"\0\0\5"),
    (Receiving.LENGTH, "a length negative or over the limit"): (b"", b"\xff\0\0\0"),
    (Receiving.MESSAGE, "the message's last byte"): (b"\0\0\0\2h", b"i"),
}
"""For each row of the table: bytes that lead to its state, and those that make it happen."""


@pytest.mark.parametrize("row", RECEIVING, ids=lambda row: f"{row[0].value}: {row[1]}")
def test_receiving_goes_by_its_table(row: tuple[Receiving, str]) -> None:
    before, happening = HAPPENINGS[row]
    framing: Framing = QueueReader(1000)
    assert isinstance(framing, QueueReader)
    framing.receive(before)
    assert framing.state is row[0]
    framing.receive(happening)
    assert framing.state is RECEIVING[row]
