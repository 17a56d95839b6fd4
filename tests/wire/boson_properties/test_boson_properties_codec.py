"""The server's side of Boson properties: what peers send becomes batches, requests and errors."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.batch import Batch
from polybus.config import Limits
from polybus.errors import PeerError
from polybus.wire import boson_properties as wire
from polybus.wire.codec import Bad, Publish
from polybus.wire.positions import SubscribeLine

LIMITS = Limits(
    message_bytes_max=1000, properties_max=20, parts_max=5, parts_bytes_max=2000, topic_bytes_max=20
)
ONE = struct.pack(">f", 1.0)


def message(*properties: tuple[bytes, bytes], count: int | None = None) -> bytes:
    """Any properties in any order, right or wrong."""
    parts = [struct.pack(">i", len(properties) if count is None else count)]
    for key, value in properties:
        parts.append(struct.pack(">H", len(key)) + key + struct.pack(">i", len(value)) + value)
    return b"".join(parts)


def versioned(*properties: tuple[bytes, bytes]) -> bytes:
    return message((b"hbfv", ONE), *properties)


def publish(topic: bytes = b"a", content: bytes = b"x", *more: tuple[bytes, bytes]) -> bytes:
    return versioned(*more, (b"topic", topic), (b"content", content))


def codec(limits: Limits = LIMITS, default_topic: str | None = None) -> wire.BosonPropertiesCodec:
    return wire.BosonPropertiesCodec(limits, default_topic)


Plain = tuple[object, ...]


def plain(events: Iterable[wire.Event]) -> list[Plain]:
    """Events as values to compare, one entry per message."""
    found: list[Plain] = []
    for event in events:
        if isinstance(event, Publish):
            found += [entry for batch in event.batches for entry in plain_batch(batch)]
        elif isinstance(event, Bad):
            found.append((event.error.code, event.error.final))
        else:
            found.append((event,))
    return found


def plain_batch(batch: Batch) -> list[Plain]:
    receipts = batch.receipt_ids or [0, 0] * len(batch)
    return [
        (
            batch.topic,
            value,
            bytes(batch.buffer[receipts[2 * index] : receipts[2 * index + 1]]),
            dict((batch.headers[index] if batch.headers else None) or {}),
        )
        for index, value in enumerate(batch.values())
    ]


def error_of(events: list[wire.Event]) -> PeerError:
    bad = events[-1]
    assert isinstance(bad, Bad)
    return bad.error


def test_topic_and_content_are_the_message_and_all_else_headers() -> None:
    events = codec().receive(publish(b"a", b"x", (b"k", b"\x00v"), ("ключ".encode(), b"")))
    assert plain(events) == [("a", b"x", b"", {"k": b"\x00v", "ключ": b""})]


def test_messages_of_a_read_come_as_one_batch_per_topic() -> None:
    data = publish(b"a", b"1") + publish(b"b", b"2") + publish(b"A", b"3")
    [event] = codec().receive(data)
    assert isinstance(event, Publish)
    assert [(batch.topic, list(batch.values())) for batch in event.batches] == [
        ("a", [b"1", b"3"]),
        ("b", [b"2"]),
    ]


def test_each_message_keeps_its_own_headers_and_receipt_id() -> None:
    data = (
        publish(b"a", b"1", (b"hbfr", b"id"))
        + publish(b"a", b"2")
        + publish(b"a", b"", (b"k", b""))
    )
    assert plain(codec().receive(data)) == [
        ("a", b"1", b"id", {}),
        ("a", b"2", b"", {}),
        ("a", b"", b"", {"k": b""}),
    ]


def test_a_request_comes_after_what_was_published_before_it() -> None:
    data = publish(b"a", b"1") + versioned((b"hbfs", b"a from=earliest\nb")) + publish(b"a", b"2")
    assert plain(codec().receive(data)) == [
        ("a", b"1", b"", {}),
        (wire.Subscribe([SubscribeLine("a", "earliest"), SubscribeLine("b")]),),
        ("a", b"2", b"", {}),
    ]


def test_an_empty_unsubscribe_means_everything() -> None:
    data = versioned((b"hbfu", b"")) + versioned((b"hbfu", b"a"))
    assert codec().receive(data) == [wire.Unsubscribe([]), wire.Unsubscribe([SubscribeLine("a")])]


def test_a_missing_content_is_an_empty_one() -> None:
    assert plain(codec().receive(versioned((b"topic", b"a")))) == [("a", b"", b"", {})]


def test_a_missing_or_empty_topic_is_the_connectors_default() -> None:
    data = versioned((b"content", b"x")) + publish(b"", b"y")
    assert plain(codec(default_topic="d").receive(data)) == [
        ("d", b"x", b"", {}),
        ("d", b"y", b"", {}),
    ]


def test_a_missing_topic_without_a_default_is_refused_and_the_connection_stays() -> None:
    events = codec().receive(versioned((b"content", b"x")) + publish())
    assert plain(events) == [("topic.empty", False), ("a", b"x", b"", {})]


def test_flags_are_taken_wherever_they_stand_and_unknown_ones_ignored() -> None:
    data = versioned((b"topic", b"a"), (b"hbfz", b"?"), (b"content", b"x"), (b"hbfr", b"id"))
    assert plain(codec().receive(data)) == [("a", b"x", b"id", {})]


def test_a_peers_complaint_publishes_nothing() -> None:
    assert codec(default_topic="d").receive(versioned((b"hbfe", b"code text"))) == []


def test_a_delivered_message_can_be_published_as_it_is() -> None:
    batch = Batch.of("a", [b"x"])
    batch.epoch, batch.first_offset = 1, 2
    assert plain(codec().receive(wire.encode(batch))) == [("a", b"x", b"", {})]


# The version


@pytest.mark.parametrize(
    "version", [ONE, b"1.0", b"1", b"1.00", b"1.25", b"01.0", struct.pack(">f", 1.7), b"1.9"]
)
def test_every_revision_of_version_1_is_read_in_either_encoding(version: bytes) -> None:
    data = message((b"hbfv", version), (b"topic", b"a"))
    assert plain(codec().receive(data)) == [("a", b"", b"", {})]


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (struct.pack(">f", 2.0), "version 2.0 "),
        (struct.pack(">f", 9.3), "version 9.3 "),
        (struct.pack(">f", -1.0), "version -1.0 "),
        (struct.pack(">f", 3e38), "version 3"),
        (b"2.0", "version 2.0 "),
        (b"12.5", "version 12.5 "),
        (b"0", "version 0 "),
    ],
)
def test_an_unknown_major_is_refused_by_name_and_the_connection_stays(
    version: bytes, said: str
) -> None:
    events = codec().receive(message((b"hbfv", version), (b"topic", b"a")) + publish())
    assert plain(events) == [("boson.version-unknown", False), ("a", b"x", b"", {})]
    assert isinstance(events[0], Bad)
    assert said in events[0].error.text


@pytest.mark.parametrize(
    "version",
    [b"", b"one", b"\x01", struct.pack(">f", float("nan")), struct.pack(">f", float("inf"))]
    + [bytes(8), b"1..0", b"1" * 50, b"9" * 500],
)
def test_a_version_that_is_no_number_is_refused_and_the_connection_stays(version: bytes) -> None:
    events = codec().receive(message((b"hbfv", version), (b"topic", b"a")) + publish())
    assert plain(events) == [("boson.version-invalid", False), ("a", b"x", b"", {})]


@pytest.mark.parametrize(
    "wrong",
    [
        message(),
        message((b"topic", b"a"), (b"hbfv", ONE)),
        message((b"topic", b"a"), (b"content", b"x")),
        message((b"", b"")),
        message((b"HBFV", ONE)),
    ],
)
def test_a_message_whose_version_is_not_first_is_stepped_over(wrong: bytes) -> None:
    events = codec().receive(publish(b"a", b"1") + wrong + publish(b"a", b"2"))
    assert plain(events) == [
        ("a", b"1", b"", {}),
        ("boson.version-missing", False),
        ("a", b"2", b"", {}),
    ]


# Parts


def part(flag: bytes, content: bytes, *more: tuple[bytes, bytes]) -> bytes:
    return versioned((b"hbff", flag), *more, (b"content", content))


def test_the_three_ways_of_parts_are_followed() -> None:
    topic = (b"topic", b"a")
    for flag, values in (
        (b"1", [b"xyz"]),
        (b"\x02", [b"x", b"y", b"z"]),
        (b"3", [b"x", b"y", b"z"]),
    ):
        data = part(flag, b"x", topic) + part(flag, b"y", (b"topic", b"other")) + part(b"0", b"z")
        assert [entry[:2] for entry in plain(codec().receive(data))] == [("a", v) for v in values]


def test_a_message_without_a_part_flag_ends_the_sequence() -> None:
    data = part(b"1", b"x", (b"topic", b"a")) + versioned() + publish(b"b", b"y")
    assert [entry[:2] for entry in plain(codec().receive(data))] == [("a", b"x"), ("b", b"y")]


def test_a_request_does_not_disturb_a_sequence() -> None:
    data = part(b"1", b"x", (b"topic", b"a")) + versioned((b"hbfs", b"b")) + part(b"\0", b"y")
    assert plain(codec().receive(data)) == [
        (wire.Subscribe([SubscribeLine("b")]),),
        ("a", b"xy", b"", {}),
    ]


def test_order_holds_between_whole_messages_and_parts_of_a_topic() -> None:
    data = publish(b"a", b"1") + part(b"3", b"2", (b"topic", b"a")) + part(b"0", b"3")
    values = [entry[1] for entry in plain(codec().receive(data + publish(b"a", b"4")))]
    assert values == [b"1", b"2", b"3", b"4"]


def test_the_receipt_of_parts_sent_on_at_once_is_owed_at_their_end() -> None:
    data = part(b"3", b"x", (b"topic", b"a"), (b"hbfr", b"id")) + part(b"0", b"")
    assert plain(codec().receive(data)) == [
        ("a", b"x", b"", {}),
        (wire.ReceiptOwed("a", b"id"),),
    ]


@pytest.mark.parametrize("flag", [b"", b"4", b"\x04", b"00", b"x", b"\xff"])
def test_an_unknown_part_flag_is_refused_and_the_connection_stays(flag: bytes) -> None:
    events = codec().receive(part(flag, b"x", (b"topic", b"a")) + publish())
    assert plain(events) == [("boson.flag-unknown", False), ("a", b"x", b"", {})]


def test_a_sequence_for_no_topic_is_followed_to_its_end_and_refused_whole() -> None:
    data = part(b"1", b"x", (b"topic", b"\xff")) + part(b"1", b"y") + part(b"0", b"z") + publish()
    events = codec(default_topic="d").receive(data)
    assert plain(events) == [("topic.invalid", False), ("a", b"x", b"", {})]


def test_a_refused_message_within_parts_ends_the_connection() -> None:
    receiver = codec()
    events = receiver.receive(part(b"1", b"x", (b"topic", b"a")) + message() + publish())
    assert plain(events) == [("boson.version-missing", True)]
    assert receiver.receive(publish()) == []


def test_too_many_parts_end_the_connection() -> None:
    data = part(b"1", b"x", (b"topic", b"a")) * (LIMITS.parts_max + 1)
    assert plain(codec().receive(data)) == [("boson.parts-too-many", True)]


def test_too_large_parts_end_the_connection() -> None:
    data = part(b"2", bytes(900), (b"topic", b"a")) * 3
    assert plain(codec().receive(data)) == [("boson.parts-too-large", True)]


# Bad input


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
    ],
)
def test_a_refused_message_that_asked_for_a_receipt_is_told_by_its_id(bad: bytes) -> None:
    (event,) = codec().receive(bad)
    assert isinstance(event, wire.BadPublish)
    assert (event.receipt_id, event.error.final) == (b"id", False)


def test_the_refusal_after_it_does_not_take_the_id_of_another_message() -> None:
    first, second = codec().receive(publish(b"\xff", b"x", (b"hbfr", b"id")) + publish(b"\xff"))
    assert isinstance(first, wire.BadPublish)
    assert type(second) is Bad


def test_everybody_who_waits_for_a_receipt_gets_an_answer() -> None:
    events = codec().receive(publish(b"\xff", b"x", (b"hbfr", b"id")) * 100)
    assert [type(event) for event in events] == [wire.BadPublish] * 100


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


# Runs: messages that differ in their content only are scanned together


def values_of(data: bytes) -> list[tuple[object, object]]:
    return [(entry[0], entry[1]) for entry in plain(codec(default_topic="d").receive(data))]


def test_a_long_run_gives_every_message_once_and_in_order() -> None:
    contents = [b"%d" % number * (number % 4) for number in range(500)]
    data = b"".join(publish(b"a", content) for content in contents)
    assert values_of(data) == [("a", content) for content in contents]


def test_runs_of_several_topics_and_none_do_not_mix() -> None:
    data = publish(b"a") * 3 + publish(b"b") * 3 + versioned((b"content", b"x")) * 3
    assert values_of(data) == [("a", b"x")] * 3 + [("b", b"x")] * 3 + [("d", b"x")] * 3


def test_a_message_like_those_before_it_still_ends_a_sequence_of_parts() -> None:
    data = publish(b"a", b"1") * 2 + part(b"1", b"x", (b"topic", b"c")) + publish(b"a", b"y")
    assert values_of(data + publish(b"a", b"2")) == [
        *[("a", b"1")] * 2,
        ("c", b"xy"),
        ("a", b"2"),
    ]


def test_headers_and_receipts_within_a_run_stay_with_their_messages() -> None:
    data = publish() * 3 + publish(b"a", b"y", (b"hbfr", b"id"), (b"k", b"v")) + publish() * 3
    quiet: Plain = ("a", b"x", b"", {})
    assert plain(codec().receive(data)) == [
        *[quiet] * 3,
        ("a", b"y", b"id", {"k": b"v"}),
        *[quiet] * 3,
    ]


def test_content_that_is_not_last_makes_no_run() -> None:
    mixed = [
        versioned((b"content", b"%d" % number), (b"topic", b"ab"[number % 2 : number % 2 + 1]))
        for number in range(6)
    ]
    assert sorted(map(str, values_of(b"".join(mixed)))) == sorted(
        str(("ab"[number % 2], b"%d" % number)) for number in range(6)
    )


@pytest.mark.parametrize("length", [-1, LIMITS.message_bytes_max + 1])
def test_a_bad_length_after_a_run_ends_the_connection(length: int) -> None:
    bad = publish()[:-5] + struct.pack(">i", length)
    events = codec().receive(publish() * 3 + bad)
    assert len(plain(events)) == 4
    assert error_of(events).final


# Chunking

TRANSCRIPT = b"".join(
    (
        publish(b"a", b"1", (b"k", b"v")),
        versioned((b"hbfs", b"a")),
        message(),
        publish(b"b", bytes(50), (b"hbfr", b"id")),
        part(b"2", b"x", (b"topic", b"c")),
        part(b"2", b"y"),
        versioned(),
        message((b"hbfv", b"2.0"), (b"topic", b"a")),
        publish(b"a", b"") * 3,
    )
)
WHOLE = plain(codec().receive(TRANSCRIPT))


def test_the_transcript_has_every_kind_of_event() -> None:
    assert len(WHOLE) == 10


@pytest.mark.parametrize("hand_back", [False, True])
def test_events_do_not_depend_on_where_the_stream_is_cut(hand_back: bool) -> None:
    for cut in range(len(TRANSCRIPT) + 1):
        assert replay([0, cut, len(TRANSCRIPT)], hand_back) == WHOLE


@given(st.lists(st.integers(0, len(TRANSCRIPT))), st.booleans())
def test_events_do_not_depend_on_the_chunking(cuts: list[int], hand_back: bool) -> None:
    assert replay([0, *sorted(cuts), len(TRANSCRIPT)], hand_back) == WHOLE


def test_events_come_byte_by_byte_too() -> None:
    assert replay(list(range(len(TRANSCRIPT) + 1)), hand_back=False) == WHOLE
    assert replay(list(range(len(TRANSCRIPT) + 1)), hand_back=True) == WHOLE


def replay(bounds: list[int], hand_back: bool) -> list[Plain]:
    """Feed the transcript in pieces, with the carry left in the codec or handed back each time."""
    receiver = codec()
    events: list[wire.Event] = []
    carry = b""
    for start, end in pairwise(bounds):
        events += receiver.receive(carry + TRANSCRIPT[start:end])
        carry = receiver.take_carry() if hand_back else b""
    return plain(events)


@given(st.binary(max_size=300))
def test_garbage_gives_only_peer_errors(garbage: bytes) -> None:
    receiver = codec()
    for chunk in (garbage, publish(), garbage):
        for event in receiver.receive(chunk):
            assert isinstance(event, Publish | Bad | wire.Subscribe | wire.Unsubscribe)


@given(st.integers(0, len(TRANSCRIPT) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_only_events(place: int, value: int) -> None:
    damaged = bytearray(TRANSCRIPT)
    damaged[place] = value
    for event in codec().receive(bytes(damaged)):
        assert not isinstance(event, Bad) or isinstance(event.error, PeerError)


def test_batches_stay_as_they_were_when_more_arrives() -> None:
    receiver = codec()
    data = publish(b"a", b"first")
    receiver.receive(data[:10])
    [event] = receiver.receive(data[10:] + data[:7])
    receiver.receive(data[7:])
    assert plain([event]) == [("a", b"first", b"", {})]
