"""Golden bytes: what Boson frames look like, to the byte."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from polybus.batch import Batch
from polybus.config import Limits
from polybus.wire import boson_frames as wire
from polybus.wire.boson import Positioned, Receipt, Refused, Subscribe, Unsubscribe
from polybus.wire.boson_frames import (
    BosonFramesClientCodec,
    encode_publish,
    encode_subscribe,
)
from polybus.wire.codec import Publish
from polybus.wire.positions import Position, SubscribeLine

VECTORS = Path(__file__).parent.parent / "vectors" / "boson_frames"


def vector(name: str) -> bytes:
    lines = (VECTORS / f"{name}.hex").read_text().splitlines()
    assert lines[0].startswith("source: ")
    return bytes.fromhex("".join(line.partition("#")[0] for line in lines[1:]))


def owed() -> Batch:
    batch = Batch("news", b"my id", array("i", [0, 0]))
    batch.receipt_ids = array("i", [0, 5])
    batch.epoch, batch.first_offset = 3, 11
    return batch


@pytest.mark.parametrize(
    ("name", "encoded"),
    [
        ("publish", wire.encode(Batch.of("topic", [b"hello"]))),
        ("publish", encode_publish("topic", [b"hello"])),
        ("publish_with_receipt", encode_publish("news", [b"hi"], "7")),
        ("receipt", wire.encode_receipts(owed())),
        ("error", wire.encode_error("topic.unknown", "no")),
        ("position", wire.encode_position("news", 3, 11)),
    ],
)
def test_we_send_exactly_the_golden_bytes(name: str, encoded: bytes) -> None:
    assert bytes(encoded) == vector(name)


@pytest.mark.parametrize(
    ("name", "topic", "values"),
    [
        ("publish", "topic", [b"hello"]),
        ("publish_with_receipt", "news", [b"hi"]),
        ("joined", "news", [b"onetwo"]),
        ("split", "news", [b"one", b"two"]),
        ("at_once", "news", [b"one", b"two"]),
    ],
)
def test_golden_publishes_are_read(name: str, topic: str, values: list[bytes]) -> None:
    found = []
    for event in wire.BosonFramesCodec(Limits()).receive(vector(name)):
        assert isinstance(event, Publish)
        for batch in event.batches:
            found += [(batch.topic, value) for value in batch.values()]
    assert found == [(topic, value) for value in values]


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("subscribe", Subscribe([SubscribeLine("news", "earliest"), SubscribeLine("sport")])),
        ("unsubscribe_all", Unsubscribe([])),
    ],
)
def test_golden_requests_are_read(name: str, event: wire.Event) -> None:
    assert wire.BosonFramesCodec(Limits()).receive(vector(name)) == [event]


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("receipt", Receipt(b"my id", Position(3, 11))),
        ("error", Refused("topic.unknown", "no")),
        ("position", Positioned("news", Position(3, 11))),
    ],
)
def test_golden_answers_are_read_by_the_client(name: str, event: object) -> None:
    assert BosonFramesClientCodec(1 << 20).receive(vector(name)) == [event]


def test_the_clients_subscriptions_are_read_back() -> None:
    request = encode_subscribe({"two words": "3:11"}, tell=True)
    expected = Subscribe([SubscribeLine("two words", "3:11", tell=True)])
    assert wire.BosonFramesCodec(Limits()).receive(request) == [expected]
