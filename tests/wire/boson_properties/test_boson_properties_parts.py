"""Boson properties in parts: the three ways, and their limits."""

from __future__ import annotations

import pytest
from boson_properties_kit import LIMITS, codec, message, part, plain, publish, versioned

from polybus.wire import boson
from polybus.wire.positions import SubscribeLine


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
        (boson.Subscribe([SubscribeLine("b")]),),
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
        (boson.ReceiptOwed("a", b"id"),),
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
    assert plain(codec().receive(data))[-1:] == [("boson.parts-too-large", True)]
