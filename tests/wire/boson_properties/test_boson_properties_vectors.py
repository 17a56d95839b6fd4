"""Golden bytes: what the protocol's messages look like, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from polybus.batch import Batch
from polybus.config import Limits
from polybus.wire import boson
from polybus.wire import boson_properties as wire
from polybus.wire import boson_properties_client as replies
from polybus.wire.codec import Publish
from polybus.wire.positions import Position, SubscribeLine

VECTORS = Path(__file__).parent.parent / "vectors" / "boson_properties"


def vector(name: str) -> bytes:
    lines = (VECTORS / f"{name}.hex").read_text().splitlines()
    assert lines[0].startswith("source: ")
    return bytes.fromhex("".join(line.partition("#")[0] for line in lines[1:]))


def stored(headers: dict[str, bytes] | None) -> Batch:
    batch = Batch.of("news", [b"hello"], headers=[headers])
    batch.epoch, batch.first_offset = 3, 11
    return batch


@pytest.mark.parametrize(
    ("name", "encoded"),
    [
        ("publish", wire.encode_publish("news", b"hello", {"origin": b"\x00\xff\x01"})),
        ("publish_with_receipt", wire.encode_publish("news", b"hello", None, b"id-")),
        ("part", wire.encode_publish("news", b"one", flag=2)),
        ("subscribe", wire.encode_subscribe({"news": "earliest"})),
        ("delivered", wire.encode(stored({"origin": b"\x00\xff\x01"}))),
        ("receipt", wire.encode_receipt("news", b"id-", 3, 11)),
        ("error", wire.encode_error("topic.unknown", "no")),
    ],
)
def test_we_send_exactly_the_golden_bytes(name: str, encoded: bytes) -> None:
    assert encoded == vector(name)


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        ("publish", [{"origin": b"\x00\xff\x01"}]),
        ("publish_ascii_version", None),
        ("publish_with_receipt", None),
    ],
)
def test_golden_publishes_are_read(name: str, headers: object) -> None:
    [event] = wire.BosonPropertiesCodec(Limits()).receive(vector(name))
    assert isinstance(event, Publish)
    [batch] = event.batches
    assert (batch.topic, list(batch.values()), batch.headers) == ("news", [b"hello"], headers)


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("subscribe", boson.Subscribe([SubscribeLine("news", "earliest")])),
        ("unsubscribe_all", boson.Unsubscribe([])),
    ],
)
def test_golden_requests_are_read(name: str, event: wire.Event) -> None:
    assert wire.BosonPropertiesCodec(Limits()).receive(vector(name)) == [event]


@pytest.mark.parametrize(
    ("name", "event"),
    [
        (
            "delivered",
            replies.Delivered("news", b"hello", {"origin": b"\x00\xff\x01"}, Position(3, 11)),
        ),
        ("receipt", boson.Receipt(b"id-", Position(3, 11))),
        ("error", boson.Refused("topic.unknown", "no")),
    ],
)
def test_golden_answers_are_read_by_the_client(name: str, event: object) -> None:
    assert replies.BosonPropertiesClientCodec(Limits()).receive(vector(name)) == [event]
