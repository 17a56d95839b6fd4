"""Bad input in Boson properties: an error for it, and its connection ends or stays."""

from __future__ import annotations

import struct

import pytest
from boson_properties_kit import LIMITS, codec, message, part, plain, publish, versioned

from polybus.config import Limits
from polybus.wire import boson
from polybus.wire.codec import Bad


@pytest.mark.parametrize("count", [-1, -(1 << 31), LIMITS.properties_max + 1, (1 << 31) - 1])
def test_a_count_that_cannot_be_ends_the_connection_before_more_arrives(count: int) -> None:
    receiver = codec()
    events = receiver.receive(publish() + struct.pack(">i", count))
    assert plain(events) == [("a", b"x", b"", {}), ("boson.count-invalid", True)]
    assert receiver.receive(publish()) == []
    assert receiver.unfinished_bytes == 0


@pytest.mark.parametrize(
    ("length", "code"),
    [
        (-1, "boson.length-negative"),
        (-(1 << 31), "boson.length-negative"),
        (LIMITS.message_bytes_max + 1, "boson.message-too-large"),
        ((1 << 31) - 1, "boson.message-too-large"),
    ],
)
def test_a_length_that_cannot_be_ends_the_connection_before_the_value_arrives(
    length: int, code: str
) -> None:
    head = struct.pack(">iH4si", 2, 4, b"hbfv", length)
    assert plain(codec().receive(head)) == [(code, True)]


def test_a_content_of_exactly_the_limit_is_taken() -> None:
    data = publish(b"a", bytes(LIMITS.message_bytes_max), (b"k", b"v"))
    assert plain(codec().receive(data)) == [("a", bytes(1000), b"", {"k": b"v"})]


def test_many_values_within_the_limit_do_not_make_a_message_over_it() -> None:
    limits = Limits(message_bytes_max=100_000, properties_max=1000)
    data = versioned(*[(b"k%d" % number, bytes(50_000)) for number in range(4)])
    assert plain(codec(limits).receive(data)) == [("boson.message-too-large", True)]


def test_a_promised_length_takes_no_memory() -> None:
    receiver = codec(Limits())
    receiver.receive(struct.pack(">iH4si", 2, 4, b"hbfv", 60 << 20) + b"1.0")
    assert receiver.unfinished_bytes < 100


def test_as_many_properties_as_the_limit_are_taken() -> None:
    more = [(b"k%d" % number, b"") for number in range(LIMITS.properties_max - 3)]
    [entry] = plain(codec().receive(publish(b"a", b"x", *more)))
    assert entry[0] == "a"


@pytest.mark.parametrize("key", [b"\xff", b"hbf\xff", b"\xc3"])
def test_a_key_that_is_not_text_is_refused_and_the_connection_stays(key: bytes) -> None:
    events = codec().receive(publish(b"a", b"1", (key, b"")) + publish())
    assert plain(events) == [("boson.key-not-text", False), ("a", b"x", b"", {})]


@pytest.mark.parametrize("topic", [b"\xff", b"a\nb", b"\0", b"t" * 21])
def test_a_topic_that_is_no_name_is_refused_and_the_connection_stays(topic: bytes) -> None:
    events = codec().receive(publish(topic) + publish())
    assert plain(events) == [("topic.invalid", False), ("a", b"x", b"", {})]


def test_a_receipt_id_over_its_limit_is_refused_and_the_connection_stays() -> None:
    fits, over = bytes(range(1, 256)), bytes(256)
    events = codec().receive(
        publish(b"a", b"x", (b"hbfr", over)) + publish(b"a", b"x", (b"hbfr", fits))
    )
    assert plain(events) == [("boson.receipt-id-invalid", False), ("a", b"x", fits, {})]


@pytest.mark.parametrize(
    "bad",
    [
        publish(b"\xff", b"x", (b"hbfr", b"id")),
        publish(b"", b"x", (b"hbfr", b"id")),
        publish(b"a", b"x", (b"hbff", b"9"), (b"hbfr", b"id")),
        part(b"1", b"x", (b"topic", b"\xff"), (b"hbfr", b"id")) + part(b"0", b"y"),
        publish(b"a", b"x", (b"\xff", b""), (b"hbfr", b"id")),
        message((b"hbfv", b"2.0"), (b"hbfr", b"id")),
        message((b"topic", b"a"), (b"hbfr", b"id")),
    ],
)
def test_a_refused_message_that_asked_for_a_receipt_is_told_by_its_id(bad: bytes) -> None:
    (event,) = codec().receive(bad)
    assert isinstance(event, boson.BadPublish)
    assert (event.receipt_id, event.error.final) == (b"id", False)


def test_the_refusal_after_it_does_not_take_the_id_of_another_message() -> None:
    first, second = codec().receive(publish(b"\xff", b"x", (b"hbfr", b"id")) + publish(b"\xff"))
    assert isinstance(first, boson.BadPublish)
    assert type(second) is Bad


def test_everybody_who_waits_for_a_receipt_gets_an_answer() -> None:
    events = codec().receive(publish(b"\xff", b"x", (b"hbfr", b"id")) * 100)
    assert [type(event) for event in events] == [boson.BadPublish] * 100


def test_requests_over_the_limit_or_not_text_are_refused_and_the_connection_stays() -> None:
    limits = Limits(topics_per_request_max=2)
    data = versioned((b"hbfs", b"a\nb\nc")) + versioned((b"hbfs", b"\xff"))
    assert plain(codec(limits).receive(data)) == [
        ("request.too-many-topics", False),
        ("request.not-text", False),
    ]


def test_a_flood_of_empty_messages_gets_a_bounded_answer() -> None:
    events = codec().receive(bytes(40_000))
    assert 0 < len(events) <= 16


def test_what_is_unfinished_when_the_peer_leaves_is_dropped() -> None:
    receiver = codec()
    receiver.receive(part(b"1", b"x", (b"topic", b"a")) + publish()[:-1])
    assert receiver.unfinished_bytes > 0
    assert receiver.close() == []
    assert receiver.unfinished_bytes == 0
