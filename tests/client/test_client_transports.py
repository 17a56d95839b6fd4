"""Transports: what each protocol's bytes mean to a client."""

from __future__ import annotations

import pytest

from polybus.batch import Batch
from polybus.client.protocols import SCHEMES, GomsTransport
from polybus.client.transport import (
    Delivery,
    PendingPublish,
    Refusal,
    Stored,
    Subscribed,
    Transport,
    TransportEvent,
    add_message,
)
from polybus.errors import BusyError, PeerError, UsageError
from polybus.wire import boson_frames, boson_properties, goms
from polybus.wire.goms_objects import Code
from polybus.wire.positions import Position

LIMIT = 1 << 20


def batch(first_offset: int, values: list[bytes]) -> Batch:
    made = Batch.of("news", values)
    made.epoch, made.first_offset = 3, first_offset
    return made


# A bus says nothing on a queue but messages: tests/client/test_client_queue.py.
@pytest.fixture(params=sorted(SCHEMES.keys() - {"queue"}))
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def told(scheme: str, topic: str, offset: int) -> bytes:
    """The bus's confirmation of a subscription from `latest`."""
    if scheme == "boson":
        return boson_frames.encode_position(topic, 3, offset)
    if scheme == "boson+properties":
        return boson_properties.encode_position(topic, 3, offset)
    return goms.encode_reg_ack([topic], [Position(3, offset)])


def delivered(scheme: str, messages: Batch) -> bytes:
    if scheme == "boson":
        return bytes(boson_frames.encode(messages))
    if scheme == "boson+properties":
        return boson_properties.encode(messages)
    return goms.encode_with_offsets(messages)


def receipt(scheme: str, receipt_id: str, offset: int) -> bytes:
    if scheme == "boson":
        return boson_frames.encode_frame(b"$receipt", f"{receipt_id} 3:{offset}".encode())
    if scheme == "boson+properties":
        return boson_properties.encode_receipt("news", receipt_id.encode(), 3, offset)
    return goms.encode_send_ack(["news"], [Position(3, offset)])


def subscribed(scheme: str) -> Transport:
    transport = SCHEMES[scheme](LIMIT)
    transport.subscribe({"news": "latest"}, positions=True)
    transport.receive(told(scheme, "news", 10))
    return transport


def test_a_confirmed_subscription_tells_its_place(scheme: str) -> None:
    transport = SCHEMES[scheme](LIMIT)
    transport.subscribe({"news": "latest"}, positions=True)
    assert transport.receive(told(scheme, "news", 10)) == [Subscribed("news", Position(3, 10))]


def test_messages_next_to_each_other_come_as_one_run_with_a_position(scheme: str) -> None:
    transport = subscribed(scheme)
    (event,) = transport.receive(delivered(scheme, batch(10, [b"a", b"b", b"\xff"])))
    assert isinstance(event, Delivery)
    assert (event.topic, list(event.values)) == ("news", [b"a", b"b", b"\xff"])
    assert event.position == Position(3, 10)


def test_positions_go_on_from_read_to_read(scheme: str) -> None:
    transport = subscribed(scheme)
    transport.receive(delivered(scheme, batch(10, [b"a", b"b"])))
    (event,) = transport.receive(delivered(scheme, batch(12, [b"c"])))
    assert isinstance(event, Delivery)
    assert event.position == Position(3, 12)


def test_a_receipt_is_told_by_the_id_it_was_asked_with(scheme: str) -> None:
    transport = SCHEMES[scheme](LIMIT)
    transport.publish(PendingPublish("news", [b"a"], receipt_id="first"))
    transport.publish(PendingPublish("news", [b"b", b"c"], receipt_id="second"))
    events = transport.receive(receipt(scheme, "first", 1) + receipt(scheme, "second", 3))
    assert events == [Stored("first", Position(3, 1)), Stored("second", Position(3, 3))]


def test_an_error_is_a_refusal_with_the_code_of_the_bus(scheme: str) -> None:
    encoders = {
        "boson": boson_frames.encode_error("topic.unknown", "there is no topic 'x'"),
        "boson+properties": boson_properties.encode_error("topic.unknown", "no topic 'x'"),
        "goms": goms.encode_error("001001", "x"),
    }
    (event,) = SCHEMES[scheme](LIMIT).receive(encoders[scheme])
    assert isinstance(event, Refusal)
    assert isinstance(event.error, UsageError)
    assert event.error.code == "topic.unknown"


@pytest.mark.parametrize("scheme", ["boson+properties", "goms"])
def test_headers_come_with_their_messages(scheme: str) -> None:
    messages = Batch.of("news", [b"a", b"b"], headers=[{"k": b"v"}, None])
    messages.epoch, messages.first_offset = 3, 10
    (event,) = subscribed(scheme).receive(delivered(scheme, messages))
    assert isinstance(event, Delivery)
    assert event.headers is not None
    assert [dict(headers or {}) for headers in event.headers] == [{"k": b"v"}, {}]


def test_boson_frames_refuse_headers_rather_than_lose_them() -> None:
    with pytest.raises(UsageError, match="headers.invalid"):
        SCHEMES["boson"](LIMIT).publish(PendingPublish("news", [b"a"], {"k": b"v"}))


def test_garbage_ends_with_a_final_refusal(scheme: str) -> None:
    events = SCHEMES[scheme](LIMIT).receive(b"\x7f\xff\xff\xff garbage, and more of it\n" * 3)
    last = events[-1]
    assert isinstance(last, Refusal) and last.final
    assert isinstance(last.error, PeerError)


def test_goms_acks_of_different_topics_need_not_come_in_order() -> None:
    transport = GomsTransport(LIMIT)
    transport.publish(PendingPublish("a", [b"1"], receipt_id="of a"))
    transport.publish(PendingPublish("b", [b"2"], receipt_id="of b"))
    data = goms.encode_send_ack(["b"], [Position(1, 2)]) + goms.encode_send_ack(
        ["a"], [Position(1, 1)]
    )
    assert transport.receive(data) == [
        Stored("of b", Position(1, 2)),
        Stored("of a", Position(1, 1)),
    ]


def test_a_goms_ack_that_says_nothing_was_stored_gives_the_connection_up() -> None:
    transport = GomsTransport(LIMIT)
    transport.publish(PendingPublish("a", [b"1"], receipt_id="1"))
    (event,) = transport.receive(goms.encode_send_ack([], []))
    assert isinstance(event, Refusal) and event.final
    assert event.error.code == "goms.ack-unknown"


ABOUT_SENDS = [code for code in Code if code[:3] in ("000", "002") and code != "000429"]


@pytest.mark.parametrize("code", ABOUT_SENDS)
def test_a_goms_error_while_acks_are_due_gives_the_connection_up(code: str) -> None:
    transport = GomsTransport(LIMIT)
    transport.publish(PendingPublish("a", [b"1"], receipt_id="1"))
    (event,) = transport.receive(goms.encode_error(code, "log.full: no space"))
    assert isinstance(event, Refusal) and event.final and not event.registering
    assert event.error.code == "log.full"


@pytest.mark.parametrize("code", ["000429", "001002", "001003", "003001"])
def test_a_goms_error_about_anything_else_leaves_the_acks_that_are_due(code: str) -> None:
    transport = GomsTransport(LIMIT)
    transport.publish(PendingPublish("a", [b"1"], receipt_id="1"))
    (event, stored) = transport.receive(
        goms.encode_error(code, "why") + goms.encode_send_ack(["a"], [Position(3, 5)])
    )
    assert isinstance(event, Refusal) and not event.final
    assert event.registering or isinstance(event.error, BusyError)
    assert stored == Stored("1", Position(3, 5))


def test_a_boson_properties_error_names_the_receipt_it_ends() -> None:
    data = boson_properties.encode_error("topic.invalid", "no", b"7")
    (event,) = SCHEMES["boson+properties"](LIMIT).receive(data)
    assert isinstance(event, Refusal)
    assert event.receipt_id == "7"


def test_a_goms_registration_in_the_past_waits_for_messages_to_know_its_place() -> None:
    """The ack tells the topic's end, which is not where a replay begins."""
    transport = GomsTransport(LIMIT)
    transport.subscribe({"news": "earliest"}, positions=True)
    events = transport.receive(goms.encode_reg_ack(["news"], [Position(3, 10)]))
    assert events == [Subscribed("news", None)]


def test_a_goms_message_to_several_topics_is_a_message_of_each() -> None:
    data = goms.encode_message(["a", "b"], b"x", None, [Position(1, 5), Position(2, 6)])
    events = GomsTransport(LIMIT).receive(data)
    places = [(event.topic, event.position) for event in events if isinstance(event, Delivery)]
    assert places == [("a", Position(1, 5)), ("b", Position(2, 6))]


def test_runs_end_where_offsets_jump_or_the_topic_changes() -> None:
    runs: list[TransportEvent] = []
    for topic, offset in [("a", 1), ("a", 2), ("a", 4), ("b", 5), ("b", 6)]:
        add_message(runs, topic, str(offset).encode(), None, Position(1, offset))
    shapes = [(one.topic, len(one.values)) for one in runs if isinstance(one, Delivery)]
    assert shapes == [("a", 2), ("a", 1), ("b", 2)]


def test_runs_keep_other_events_in_their_place() -> None:
    runs: list[TransportEvent] = []
    add_message(runs, "a", b"1", None, Position(1, 1))
    runs.append(Subscribed("a", Position(1, 2)))
    add_message(runs, "a", b"2", None, Position(1, 2))
    kinds: list[type[TransportEvent]] = [type(event) for event in runs]
    assert kinds == [Delivery, Subscribed, Delivery]
