"""The server's side of Boson properties: what peers send becomes batches and requests."""

from __future__ import annotations

import struct

import pytest
from boson_properties_kit import (
    LIMITS,
    ONE,
    Plain,
    codec,
    error_of,
    message,
    part,
    plain,
    publish,
    versioned,
)

from polybus.batch import Batch
from polybus.wire import boson
from polybus.wire import boson_properties as wire
from polybus.wire.codec import Bad, Publish
from polybus.wire.positions import SubscribeLine


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
        (boson.Subscribe([SubscribeLine("a", "earliest"), SubscribeLine("b")]),),
        ("a", b"2", b"", {}),
    ]


def test_an_empty_unsubscribe_means_everything() -> None:
    data = versioned((b"hbfu", b"")) + versioned((b"hbfu", b"a"))
    assert codec().receive(data) == [boson.Unsubscribe([]), boson.Unsubscribe([SubscribeLine("a")])]


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
