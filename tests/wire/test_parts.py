"""Messages in parts: the three ways of delivery, the first part's rule, and the bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.batch import Batch
from polybus.errors import PeerError
from polybus.wire.boson import AT_ONCE, JOINED, SPLIT, WHOLE, Parts, ReceiptOwed, requested
from polybus.wire.codec import Publish


def parts(parts_max: int = 100, parts_bytes_max: int = 10_000) -> Parts:
    return Parts(parts_max, parts_bytes_max)


Finished = Publish | ReceiptOwed | None


def batch_of(finished: Finished) -> Batch:
    assert isinstance(finished, Publish)
    (batch,) = finished.batches
    return batch


def ready(finished: Finished) -> list[bytes]:
    return list(batch_of(finished).values())


def test_a_whole_message_is_ready_at_once() -> None:
    finished = parts().add(WHOLE, "a", b"hello", b"id", {"k": b"v"})
    assert finished is not None
    assert (batch_of(finished).topic, ready(finished)) == ("a", [b"hello"])
    assert (requested(finished), batch_of(finished).headers) == (b"id", [{"k": b"v"}])


def test_flag_1_gives_one_message_of_all_parts_at_the_end() -> None:
    sequence = parts()
    assert sequence.add(JOINED, "a", b"one ") is None
    assert sequence.add(JOINED, "", b"two ") is None
    assert sequence.open
    assert ready(sequence.add(WHOLE, "", b"three")) == [b"one two three"]
    assert not sequence.open


def test_flag_2_gives_the_parts_as_messages_once_all_have_arrived() -> None:
    sequence = parts()
    assert sequence.add(SPLIT, "a", b"one") is None
    assert sequence.add(SPLIT, "", b"two") is None
    assert ready(sequence.add(WHOLE, "", b"three")) == [b"one", b"two", b"three"]


def test_flag_3_gives_each_part_at_once() -> None:
    sequence = parts()
    assert ready(sequence.add(AT_ONCE, "a", b"one")) == [b"one"]
    assert ready(sequence.add(AT_ONCE, "", b"two")) == [b"two"]
    assert ready(sequence.add(WHOLE, "", b"three")) == [b"three"]


@pytest.mark.parametrize(
    ("flag", "at_the_end"), [(JOINED, [b"one"]), (SPLIT, [b"one"]), (AT_ONCE, None)]
)
def test_an_empty_end_adds_nothing(flag: int, at_the_end: list[bytes] | None) -> None:
    sequence = parts()
    sequence.add(flag, "a", b"one")
    finished = sequence.add(WHOLE, "", b"")
    assert (finished and ready(finished)) == at_the_end
    assert not sequence.open


def test_an_empty_part_is_an_empty_message_when_parts_are_split() -> None:
    sequence = parts()
    sequence.add(SPLIT, "a", b"")
    assert ready(sequence.add(WHOLE, "", b"")) == [b""]


@pytest.mark.parametrize("flag", [JOINED, SPLIT, AT_ONCE])
def test_the_topic_of_the_first_part_wins(flag: int) -> None:
    sequence = parts()
    sequence.add(flag, "first", b"one")
    finished = sequence.add(WHOLE, "second", b"two")
    assert batch_of(finished).topic == "first"


def test_the_flag_of_the_first_part_wins() -> None:
    sequence = parts()
    sequence.add(JOINED, "a", b"one")
    assert sequence.add(SPLIT, "a", b"two") is None
    assert sequence.add(AT_ONCE, "a", b"three") is None
    assert ready(sequence.add(WHOLE, "a", b"")) == [b"onetwothree"]


def test_a_receipt_asked_for_with_the_first_part_is_that_of_the_last_message() -> None:
    sequence = parts()
    sequence.add(SPLIT, "a", b"one", b"first")
    finished = sequence.add(WHOLE, "", b"two", b"ignored")
    batch = batch_of(finished)
    assert batch.receipt_ids is not None
    ids = [bytes(batch.buffer[batch.receipt_ids[i] : batch.receipt_ids[i + 1]]) for i in (0, 2)]
    assert ids == [b"", b"first"]
    assert list(batch.values()) == [b"one", b"two"]


def test_a_receipt_for_parts_handed_on_at_once_is_due_at_the_end() -> None:
    sequence = parts()
    part = sequence.add(AT_ONCE, "a", b"one", b"id")
    end = sequence.add(WHOLE, "", b"")
    assert batch_of(part).receipt_ids is None
    assert end == ReceiptOwed("a", b"id")


def test_joined_parts_share_their_headers_and_the_first_wins() -> None:
    sequence = parts()
    sequence.add(JOINED, "a", b"1", headers={"k": b"first"})
    finished = sequence.add(WHOLE, "", b"2", headers={"k": b"second", "other": b"x"})
    assert batch_of(finished).headers == [{"k": b"first", "other": b"x"}]


def test_split_parts_keep_their_own_headers() -> None:
    sequence = parts()
    sequence.add(SPLIT, "a", b"1", headers={"k": b"first"})
    finished = sequence.add(WHOLE, "", b"2")
    assert batch_of(finished).headers == [{"k": b"first"}, None]


def test_a_sequence_leaves_nothing_to_the_next() -> None:
    sequence = parts()
    sequence.add(SPLIT, "a", b"1", b"id", {"k": b"v"})
    sequence.add(WHOLE, "", b"")
    sequence.add(JOINED, "b", b"2")
    finished = sequence.add(WHOLE, "", b"3")
    batch = batch_of(finished)
    assert (batch.topic, ready(finished)) == ("b", [b"23"])
    assert (batch.receipt_ids, batch.headers) == (None, None)


@pytest.mark.parametrize("flag", [JOINED, SPLIT, AT_ONCE])
def test_one_part_over_the_count_is_a_final_error(flag: int) -> None:
    sequence = parts(parts_max=3)
    for _ in range(3):
        sequence.add(flag, "a", b"x")
    with pytest.raises(PeerError) as caught:
        sequence.add(flag, "a", b"x")
    assert (caught.value.code, caught.value.final) == ("boson.parts-too-many", True)
    assert (sequence.open, sequence.held_bytes) == (False, 0)


@pytest.mark.parametrize("flag", [JOINED, SPLIT, AT_ONCE])
def test_one_byte_over_the_total_is_a_final_error(flag: int) -> None:
    sequence = parts(parts_bytes_max=10)
    sequence.add(flag, "a", b"12345")
    sequence.add(flag, "a", b"67890")
    with pytest.raises(PeerError) as caught:
        sequence.add(WHOLE, "a", b"x")
    assert (caught.value.code, caught.value.final) == ("boson.parts-too-large", True)
    assert (sequence.open, sequence.held_bytes) == (False, 0)


def test_headers_count_towards_the_total() -> None:
    sequence = parts(parts_bytes_max=10_000)
    with pytest.raises(PeerError, match="too-large"):
        for number in range(50):
            sequence.add(JOINED, "a", b"", headers={str(number): b""})


def test_the_bounds_hold_for_each_sequence_anew() -> None:
    sequence = parts(parts_max=2)
    for _ in range(5):
        sequence.add(JOINED, "a", b"x")
        assert ready(sequence.add(WHOLE, "", b"y")) == [b"xy"]


def test_parts_in_flight_are_counted_as_held() -> None:
    sequence = parts()
    sequence.add(JOINED, "a", b"x" * 100)
    assert sequence.held_bytes >= 100
    sequence.close()
    assert (sequence.open, sequence.held_bytes) == (False, 0)


@given(st.sampled_from([JOINED, SPLIT, AT_ONCE]), st.lists(st.binary(max_size=8), min_size=1))
def test_no_byte_is_lost_or_added(flag: int, contents: list[bytes]) -> None:
    sequence = Parts(1000, 100_000)
    values: list[bytes] = []
    for content in contents:
        finished = sequence.add(flag, "a", content)
        values += ready(finished) if finished else []
    finished = sequence.add(WHOLE, "", b"")
    values += ready(finished) if finished else []
    assert values == ([b"".join(contents)] if flag == JOINED else contents)
