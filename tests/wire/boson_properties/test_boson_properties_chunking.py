"""Boson properties in any pieces: events do not depend on where the stream is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from boson_properties_kit import Plain, codec, message, part, plain, publish, versioned
from hypothesis import given
from hypothesis import strategies as st

from polybus.errors import PeerError
from polybus.wire import boson
from polybus.wire import boson_properties as wire
from polybus.wire.codec import Bad, Publish

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
            assert isinstance(event, Publish | Bad | boson.Subscribe | boson.Unsubscribe)


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
