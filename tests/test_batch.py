"""Batch: messages as spans of one buffer."""

from __future__ import annotations

from array import array

from polybus.batch import Batch


def test_a_batch_of_values_gives_them_back() -> None:
    batch = Batch.of("t", [b"one", b"", b"three"])
    assert len(batch) == 3
    assert list(batch.values()) == [b"one", b"", b"three"]
    assert batch.value(2) == b"three"
    assert batch.value_bytes == 8


def test_headers_and_keys_that_are_all_empty_are_none() -> None:
    assert Batch.of("t", [b"a"], headers=[None], keys=[None]).headers is None
    assert Batch.of("t", [b"a"], headers=[{"h": b"1"}]).headers == [{"h": b"1"}]


def test_a_slice_shares_the_buffer_and_keeps_its_place() -> None:
    batch = Batch.of("t", [b"a", b"b", b"c"], headers=[{"n": b"0"}, None, {"n": b"2"}])
    batch.epoch, batch.first_offset, batch.sender = 7, 10, "me"
    part = batch.slice(1, 3)
    assert part.buffer is batch.buffer
    assert list(part.values()) == [b"b", b"c"]
    assert (part.epoch, part.first_offset, part.last_offset, part.sender) == (7, 11, 12, "me")
    assert part.headers == [None, {"n": b"2"}]


def test_an_encoding_is_made_once_for_all_subscribers() -> None:
    made = []

    def encode(batch: Batch) -> bytes:
        made.append(batch)
        return b"encoded"

    batch = Batch("t", b"abc", array("i", [0, 3]))
    assert batch.encoded("p", encode) is batch.encoded("p", encode)
    assert len(made) == 1
    batch.carry_encoding("other", b"arrived so")
    assert batch.encoded("other", encode) == b"arrived so"
