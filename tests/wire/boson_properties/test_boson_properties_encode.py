"""What we send in Boson properties reads back, on either side."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.batch import Batch
from polybus.config import Limits
from polybus.errors import UsageError
from polybus.wire import boson
from polybus.wire import boson_properties as wire
from polybus.wire import boson_properties_client as replies
from polybus.wire.codec import Bad, Publish
from polybus.wire.positions import Position

HEADER_NAMES = st.text(max_size=10).filter(
    lambda name: name not in ("topic", "content") and not name.startswith("hbf")
)
HEADERS = st.dictionaries(HEADER_NAMES, st.binary(max_size=10), max_size=3)


@given(st.lists(st.tuples(st.binary(max_size=20), HEADERS), min_size=1, max_size=5))
def test_a_delivered_batch_reads_back_with_positions_and_headers(
    messages: list[tuple[bytes, dict[str, bytes]]],
) -> None:
    batch = Batch.of("a", [value for value, _ in messages], headers=[h for _, h in messages])
    batch.epoch, batch.first_offset = 2, 9
    events = replies.BosonPropertiesClientCodec(Limits()).receive(wire.encode(batch))
    assert events == [
        replies.Delivered("a", value, headers, Position(2, 9 + index))
        for index, (value, headers) in enumerate(messages)
    ]


@given(st.binary(max_size=50), HEADERS, st.binary(max_size=10))
def test_a_publish_reads_back(content: bytes, headers: dict[str, bytes], receipt: bytes) -> None:
    data = wire.encode_publish("a", content, headers, receipt)
    [event] = wire.BosonPropertiesCodec(Limits()).receive(data)
    assert isinstance(event, Publish)
    [batch] = event.batches
    assert list(batch.values()) == [content]
    assert (batch.headers or [{}])[0] == headers
    ids = batch.receipt_ids or array("i", [0, 0])
    assert bytes(batch.buffer[ids[0] : ids[1]]) == receipt


@pytest.mark.parametrize("name", ["topic", "content", "hbfe", "hbfo", "hbf", "ä" * 40_000])
def test_a_header_that_would_be_mistaken_is_left_out_for_subscribers(name: str) -> None:
    batch = Batch.of("a", [b"x"], headers=[{name: b"forged", "k": b"v"}])
    batch.epoch, batch.first_offset = 1, 0
    events = replies.BosonPropertiesClientCodec(Limits()).receive(wire.encode(batch))
    assert events == [replies.Delivered("a", b"x", {"k": b"v"}, Position(1, 0))]


@pytest.mark.parametrize("name", ["topic", "content", "hbfe", "ä" * 40_000])
def test_a_publisher_is_told_of_a_header_that_cannot_be_sent(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        wire.encode_publish("a", b"x", {name: b""})
    assert caught.value.code == "headers.invalid"


def test_receipts_go_to_those_who_asked_with_their_own_offsets() -> None:
    batch = Batch("a", b"id1id2", array("i", [0, 0, 0, 0, 0, 0]))
    batch.receipt_ids = array("i", [0, 3, 0, 0, 3, 6])
    batch.epoch, batch.first_offset = 1, 10
    events = replies.BosonPropertiesClientCodec(Limits()).receive(wire.encode_receipts(batch))
    assert events == [
        boson.Receipt(b"id1", Position(1, 10)),
        boson.Receipt(b"id2", Position(1, 12)),
    ]
    batch.receipt_ids = None
    assert wire.encode_receipts(batch) == b""


def test_a_refused_batch_is_told_to_each_that_asked_for_a_receipt() -> None:
    data = b"".join(wire.encode_publish("a", b"x", None, asked) for asked in (b"1", b"", b"2"))
    (event,) = wire.BosonPropertiesCodec(Limits()).receive(data)
    assert isinstance(event, Publish)
    (batch,) = event.batches
    told = replies.BosonPropertiesClientCodec(Limits()).receive(
        wire.encode_refusals(batch, "code", "text")
    )
    assert told == [boson.Refused("code", "text", b"1"), boson.Refused("code", "text", b"2")]
    batch.receipt_ids = None
    assert wire.encode_refusals(batch, "code", "text") == b""


def test_a_told_position_reads_back() -> None:
    events = replies.BosonPropertiesClientCodec(Limits()).receive(wire.encode_position("a", 1, 5))
    assert events == [boson.Positioned("a", Position(1, 5))]


def test_the_client_reads_byte_by_byte() -> None:
    client = replies.BosonPropertiesClientCodec(Limits())
    data = wire.encode_receipt("a", b"id", 1, 2) + wire.encode_error("code", "some text")
    events = [event for byte in data for event in client.receive(bytes([byte]))]
    assert events == [boson.Receipt(b"id", Position(1, 2)), boson.Refused("code", "some text")]
    assert (client.unfinished_bytes, client.close()) == (0, [])


@given(st.binary(max_size=200))
def test_garbage_from_a_server_gives_only_events(garbage: bytes) -> None:
    client = replies.BosonPropertiesClientCodec(Limits())
    data = wire.encode_error("code", "text") + garbage
    assert client.receive(data)[0] == boson.Refused("code", "text")


@pytest.mark.parametrize("offset", [b"", b"latest", b"1", b"\xff:1"])
def test_a_position_that_is_none_is_a_fault_of_the_server(offset: bytes) -> None:
    good = wire.encode_receipt("a", b"id", 1, 2)
    bad = good.replace(b"\x00\x00\x00\x031:2", len(offset).to_bytes(4, "big") + offset)
    [event] = replies.BosonPropertiesClientCodec(Limits()).receive(bad)
    assert isinstance(event, Bad)
    assert (event.error.code, event.error.final) == ("position.invalid", False)


def test_the_client_reads_nothing_after_a_final_error() -> None:
    client = replies.BosonPropertiesClientCodec(Limits())
    [event] = client.receive(b"\xff\xff\xff\xff")
    assert isinstance(event, Bad) and event.error.final
    assert client.receive(wire.encode_error("code", "text")) == []
