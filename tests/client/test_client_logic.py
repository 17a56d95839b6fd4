"""The client's pure parts: addresses, starts, positions, gaps, back-off."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from random import Random

import pytest

import polybus
from polybus.client import protocols
from polybus.client.message import Message, Position, start_text
from polybus.client.options import Address, parse
from polybus.client.retry import Backoff
from polybus.client.subscription import Tracker
from polybus.client.transport import refusal
from polybus.errors import BusyError, PolybusError, StorageError, UsageError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("goms://h", Address("goms", "h", 55545)),
        ("boson://h:1/", Address("boson", "h", 1)),
        ("boson+properties://h:1", Address("boson+properties", "h", 1)),
        ("goms+tls://h", Address("goms", "h", 55545, tls=True)),
        ("boson+properties+tls://h", Address("boson+properties", "h", 55545, tls=True)),
        ("boson://h?tls=1&gzip=1", Address("boson", "h", 55545, tls=True, gzip=True)),
        ("boson://[::1]:7", Address("boson", "::1", 7)),
    ],
)
def test_a_url_says_protocol_place_and_layers(url: str, address: Address) -> None:
    assert parse(url) == address


@pytest.mark.parametrize(
    ("url", "scheme", "port"),
    [
        ("127.0.0.1", "boson", 55545),
        ("localhost:7000", "boson", 7000),
        ("bus.example:80", "http", 80),
        ("bus.example:443", "http", 443),
        ("[::1]:7000", "boson", 7000),
    ],
)
def test_a_url_without_a_scheme_is_taken_by_its_port(url: str, scheme: str, port: int) -> None:
    address = parse(url)
    assert (address.scheme, address.port, address.tls) == (scheme, port, port == 443)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "boson://",
        "boson://h:99999",
        "boson://h/topic",
        "boson://h?speed=1",
        "boson://h?gzip=maybe",
        "boson://:secret@h",
    ],
)
def test_a_url_that_makes_no_sense_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(url)
    assert caught.value.code == "client.url"
    assert "secret" not in caught.value.text


def test_an_unknown_scheme_names_those_known() -> None:
    with pytest.raises(UsageError) as caught:
        polybus.connect("kafka://127.0.0.1")
    assert caught.value.code == "client.scheme"
    for scheme in protocols.SCHEMES:
        assert f"{scheme}://" in caught.value.text


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ("latest", "latest"),
        ("earliest", "earliest"),
        ("3:14", "3:14"),
        (Position(3, 14), "3:14"),
        ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05.000000Z"),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02T03:00:00.000000Z"),
        (
            datetime(2026, 1, 2, 3, tzinfo=timezone(timedelta(hours=1))),
            "2026-01-02T02:00:00.000000Z",
        ),
    ],
)
def test_a_start_becomes_the_words_of_the_bus(start: str | datetime, text: str) -> None:
    assert start_text(start) == text


@pytest.mark.parametrize("start", ["", "first", "1:", ":2", "-1:2", "1:2:3", "2026-01-02T03:04:05"])
def test_a_start_that_is_no_position_is_a_usage_error(start: str) -> None:
    with pytest.raises(UsageError, match="position.invalid"):
        start_text(start)


def test_a_position_is_read_as_it_is_written() -> None:
    assert Position.parse(str(Position(7, 9))) == Position(7, 9)
    with pytest.raises(UsageError, match="position.invalid"):
        Position.parse("7:nine")


def test_a_message_gives_its_value_as_text_and_json() -> None:
    message = Message("t", b'{"a": [1]}', epoch=2, offset=5)
    assert message.text == '{"a": [1]}'
    assert message.json() == {"a": [1]}
    assert message.position == Position(2, 5)
    assert Message("t", b"").position is None


def test_a_tracker_asks_for_what_follows_the_last_message() -> None:
    tracker = Tracker("earliest")
    assert tracker.resume() == "earliest"
    assert tracker.advance(3, Position(1, 10)) is False
    assert tracker.advance(2, None) is False
    assert tracker.resume() == "1:15"


def test_a_tracker_that_was_told_its_place_resumes_there_before_any_message() -> None:
    tracker = Tracker("latest")
    tracker.expect(Position(1, 7))
    tracker.lost()
    assert tracker.resume() == "1:7"
    assert tracker.advance(1, Position(1, 7)) is False


@pytest.mark.parametrize("place", [Position(1, 6), Position(1, 4), Position(2, 5)])
def test_a_message_anywhere_else_than_expected_has_a_gap_before_it(place: Position) -> None:
    tracker = Tracker("earliest")
    tracker.advance(1, Position(1, 4))
    assert tracker.advance(1, place) is True
    assert tracker.advance(1, None) is False


def test_a_gap_that_was_told_is_on_the_next_message() -> None:
    tracker = Tracker("earliest")
    tracker.advance(1, Position(1, 4))
    tracker.expect(Position(1, 9))
    assert tracker.advance(1, Position(1, 9)) is True


def test_a_subscription_that_never_knew_its_place_says_so_after_a_break() -> None:
    tracker = Tracker("latest")
    tracker.lost()
    assert tracker.resume() == "latest"
    assert tracker.advance(1, None) is True


def test_delays_double_up_to_the_maximum_within_half_of_jitter() -> None:
    backoff = Backoff(first_s=1.0, delay_s_max=4.0, random=Random(1))
    delays = [backoff.next_s() for _ in range(6)]
    for delay, whole in zip(delays, [1.0, 2.0, 4.0, 4.0, 4.0, 4.0], strict=True):
        assert whole / 2 <= delay <= whole
    assert len(set(delays)) == len(delays)


def test_delays_begin_anew_once_a_connection_worked() -> None:
    backoff = Backoff(first_s=1.0, delay_s_max=64.0, random=Random(1))
    for _ in range(5):
        backoff.next_s()
    backoff.reset()
    assert backoff.next_s() <= 1.0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("topic.unknown", UsageError),
        ("log.full", StorageError),
        ("outbox.full", BusyError),
        ("boson.flag-unknown", PolybusError),
    ],
)
def test_a_refusal_of_the_bus_is_the_error_it_would_be_there(
    code: str, kind: type[PolybusError]
) -> None:
    error = refusal(code, "why")
    assert type(error) is kind
    assert (error.code, error.text) == (code, "why")


def test_the_package_offers_the_client_without_importing_it_first() -> None:
    assert polybus.Message is Message
    with pytest.raises(AttributeError):
        polybus.Messages  # noqa: B018


def test_a_url_may_name_several_nodes() -> None:
    address = parse("boson://token@a:1,[::1]:2,c?gzip=1")
    assert address.places == (("a", 1), ("::1", 2), ("c", 55545))
    assert address.gzip
    assert address.credentials is not None


@pytest.mark.parametrize("url", ["http://a,b", "queue://a:1,b:2", "boson://a,,b", "goms://a,b:x"])
def test_several_nodes_are_refused_where_they_make_no_sense(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(url)
    assert caught.value.code == "client.url"
