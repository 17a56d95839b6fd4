"""Batch and the loops over many batches: one contract, the compiled module and its twin."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from polybus.batch import Batch
from polybus.bus.traffic import Traffic
from polybus.errors import StorageError
from polybus.scan import _batch, batch_py

BOTH = pytest.mark.parametrize("scan", [_batch, batch_py], ids=["compiled", "pure"])


class Placed:
    """Places of a topic, all in one segment."""

    def __init__(self) -> None:
        self.entries = array("q")
        self.asked: list[Path] = []

    def in_segment(self, segment: Path) -> Placed:
        self.asked.append(segment)
        return self


@dataclass
class BusTopic:
    """A topic with its figures and listeners."""

    subscribers: list[str]

    def __post_init__(self) -> None:
        self.traffic = Traffic()


class Part(NamedTuple):
    """What rows_by_topic makes of each topic."""

    account: str
    topic: str
    epoch: int
    first_offset: int
    rows: int
    first_row: int
    earliest_us: int
    latest_us: int


@BOTH
def test_a_batch_of_values_gives_them_back(scan: ModuleType) -> None:
    batch = scan.Batch.of("t", [b"one", b"", b"three"])
    assert len(batch) == 3
    assert list(batch.values()) == [b"one", b"", b"three"]
    assert batch.value(2) == b"three"
    assert batch.value_bytes == 8


@BOTH
def test_headers_and_keys_that_are_all_empty_are_none(scan: ModuleType) -> None:
    assert scan.Batch.of("t", [b"a"], headers=[None], keys=[None]).headers is None
    assert scan.Batch.of("t", [b"a"], headers=[{"h": b"1"}]).headers == [{"h": b"1"}]


@BOTH
def test_a_slice_shares_the_buffer_and_keeps_its_place(scan: ModuleType) -> None:
    batch = scan.Batch.of("t", [b"a", b"b", b"c"], headers=[{"n": b"0"}, None, {"n": b"2"}])
    batch.epoch, batch.first_offset, batch.sender = 7, 10, "me"
    part = batch.slice(1, 3)
    assert part.buffer is batch.buffer
    assert list(part.values()) == [b"b", b"c"]
    assert (part.epoch, part.first_offset, part.last_offset, part.sender) == (7, 11, 12, "me")
    assert part.headers == [None, {"n": b"2"}]


@BOTH
def test_an_encoding_is_made_once_for_all_subscribers(scan: ModuleType) -> None:
    made = []

    def encode(batch: Batch) -> bytes:
        made.append(batch)
        return b"encoded"

    batch = scan.Batch("t", b"abc", array("i", [0, 3]))
    assert batch.encoded("p", encode) is batch.encoded("p", encode)
    assert len(made) == 1
    batch.carry_encoding("other", b"arrived so")
    assert batch.encoded("other", encode) == b"arrived so"


@BOTH
def test_a_batch_is_told_where_it_came_from_and_where_it_is_stored(scan: ModuleType) -> None:
    batch = scan.Batch("t", b"abc", array("i", [0, 3]))
    assert (batch.keys, batch.headers, batch.receipt_ids, batch.stored) == (None, None, None, None)
    assert (batch.protocol, batch.sender, batch.timestamp_us) == ("", "", 0)
    assert (batch.epoch, batch.first_offset) == (0, -1)
    assert repr(batch) == "<Batch 't' 0:-1 of 1>"


@BOTH
def test_encodings_can_be_forgotten(scan: ModuleType) -> None:
    batch = scan.Batch.of("t", [b"a"])
    batch.carry_encoding("p", b"old")
    batch.forget_encodings()
    assert batch.encoded("p", lambda batch: b"new") == b"new"


@BOTH
def test_the_weight_counts_values_messages_and_batches(scan: ModuleType) -> None:
    batches = [scan.Batch.of("a", [b"xx", b"yyy"]), scan.Batch.of("b", [b""])]
    assert scan.weigh(batches, 10, 100) == 5 + 3 * 10 + 2 * 100
    assert scan.weigh([], 10, 100) == 0


@BOTH
def test_batches_are_taken_in_order_at_the_end_of_their_logs(scan: ModuleType) -> None:
    one, other = (scan.TopicEnd(epoch, stop, Placed()) for epoch, stop in ((7, 10), (8, 0)))
    batches = [
        scan.Batch.of("a", [b"1", b"2"]),
        scan.Batch.of("b", [b"3"]),
        scan.Batch.of("a", []),
        scan.Batch.of("a", [b"4"]),
    ]
    batches[3].timestamp_us = 5
    taken = scan.take_batches(batches, [one, other, one, one], 9)
    assert taken == [batches[0], batches[1], batches[3]]
    assert [batch.timestamp_us for batch in taken] == [9, 9, 5]
    places = [(batch.epoch, batch.first_offset) for batch in batches]
    assert places == [(7, 10), (8, 0), (7, 12), (7, 12)]
    assert (one.stop, other.stop) == (13, 1)
    assert list(one.tail) == [batches[0], batches[3]]
    assert list(other.tail) == [batches[1]]
    with pytest.raises(ValueError):
        scan.take_batches(batches, [one], 9)


@BOTH
def test_rows_are_ordered_by_topic_and_epoch(scan: ModuleType) -> None:
    def batch(topic: str, epoch: int, first: int, count: int, time_us: int) -> Batch:
        made: Batch = scan.Batch.of(topic, [b"x"] * count)
        made.epoch, made.first_offset, made.timestamp_us = epoch, first, time_us
        return made

    batches = [
        batch("a", 1, 5, 2, 30),
        batch("b", 1, 0, 1, 20),
        batch("a", 1, 7, 3, 10),
        batch("a", 2, 0, 1, 40),
    ]
    ordered, counts, topics, columns = scan.rows_by_topic(batches, Part, "me")
    assert ordered == [batches[0], batches[2], batches[1], batches[3]]
    assert counts == array("q", [2, 3, 1, 1])
    assert topics == (
        Part("me", "a", 1, 5, 5, 0, 10, 30),
        Part("me", "b", 1, 0, 1, 5, 20, 20),
        Part("me", "a", 2, 0, 1, 6, 40, 40),
    )
    assert all(type(part) is Part for part in topics)
    assert columns == (["a", "b", "a"], array("q", [5, 0, 0]), array("q", [5, 1, 1]))


@BOTH
def test_what_was_taken_is_counted_by_topic_and_protocol(scan: ModuleType) -> None:
    one, other = BusTopic([]), BusTopic([])
    one.traffic.taken["p"] = scan.Flow(5, 100)
    batches = [scan.Batch.of("a", [b"xx", b"yyy"]), scan.Batch.of("b", [b""])]
    batches[0].protocol = "p"
    scan.count_taken(batches, [one, other])
    scan.count_taken(batches[:1], [one])
    flow = one.traffic.taken["p"]
    assert (flow.messages, flow.value_bytes) == (9, 110)
    flow = other.traffic.taken[""]
    assert (flow.messages, flow.value_bytes) == (1, 0)
    with pytest.raises(ValueError):
        scan.count_taken(batches, [one])


@BOTH
def test_topics_are_found_for_all_batches_or_for_none(scan: ModuleType) -> None:
    topics = {"a": BusTopic([]), "b": BusTopic([])}
    batches = [scan.Batch.of(name, [b"x"]) for name in ("b", "a", "b")]
    assert scan.find_topics(batches, topics, 9) == [topics["b"], topics["a"], topics["b"]]
    assert [batch.timestamp_us for batch in batches] == [9, 9, 9]
    assert scan.find_topics([*batches, scan.Batch.of("gone", [b"x"])], topics, 9) is None


@BOTH
def test_ends_are_found_unless_one_is_gone_or_takes_no_writes(scan: ModuleType) -> None:
    ends = {name: scan.TopicEnd(1, 0, Placed()) for name in "ab"}
    batches = [scan.Batch.of(name, [b"x"]) for name in "ab"]
    assert scan.find_ends(batches, ends) == [ends["a"], ends["b"]]
    assert scan.find_ends([scan.Batch.of("gone", [b"x"])], ends) is None
    ends["b"].frozen = StorageError("log.frozen", "damaged")
    assert scan.find_ends(batches, ends) is None
    assert scan.find_ends(batches[:1], ends) == [ends["a"]]


@BOTH
def test_topics_listen_alike_when_all_have_the_same_subscribers(scan: ModuleType) -> None:
    one, same, other = BusTopic(["s"]), BusTopic(["s"]), BusTopic(["s", "t"])
    assert scan.listen_alike([one, same])
    assert not scan.listen_alike([one, same, other])
    assert scan.listen_alike([])


@BOTH
def test_a_receipt_is_counted_for_each_id_and_for_a_request_without(scan: ModuleType) -> None:
    three, none, whole = (scan.Batch.of("a", [b"ids"] * 4) for _ in range(3))
    three.receipt_ids = array("i", [0, 1, 2, 2, 2, 3, 3, 9])
    whole.receipt_ids = array("i")
    assert scan.count_receipts([three, none, whole]) == 4
    assert scan.count_receipts([none]) == 0


@BOTH
def test_a_kept_batch_weighs_its_read_once(scan: ModuleType) -> None:
    logs = {"a": scan.TopicEnd(1, 0, Placed()), "b": scan.TopicEnd(2, 0, Placed())}
    read, small = bytes(1000), b"x" * 40

    def batch(topic: str, buffer: bytes | memoryview, epoch: int) -> Batch:
        made: Batch = scan.Batch(topic, buffer, array("i", [0, 10, 20, 30]))
        made.epoch = epoch
        return made

    batches = [
        batch("a", memoryview(read)[:500], 1),
        batch("b", read, 2),
        batch("a", small, 1),
        batch("a", read, 9),
        batch("gone", read, 1),
    ]
    batches[0].carry_encoding("p", b"old")
    batches[1].keys = [b"k", None]
    tails, weight, owner = scan.keep_batches(batches, logs, None, 100, lambda batch: 7)
    each = 100 + 4 * 4
    assert [id(tail) for tail in tails] == [id(logs[name].tail) for name in "aba"]
    assert (weight, owner) == (3 * each + 1047, small)
    assert batches[0].encoded("p", lambda batch: b"new") == b"new"
    _, weight, owner = scan.keep_batches(batches[2:3], logs, owner, 100, lambda batch: 7)
    assert (weight, owner) == (each, small)


@BOTH
def test_the_oldest_batch_leaves_each_tail(scan: ModuleType) -> None:
    one, other = deque([1, 2, 3]), deque([4])
    scan.drop_oldest([one, other, one])
    assert (list(one), list(other)) == ([3], [])


@BOTH
def test_rows_of_equal_time_protocol_and_sender_are_merged(scan: ModuleType) -> None:
    def batch(time_us: int, protocol: str, sender: str) -> Batch:
        made: Batch = scan.Batch.of("a", [b"x"])
        made.timestamp_us, made.protocol, made.sender = time_us, protocol, sender
        return made

    batches = [batch(1, "p", "s"), batch(1, "p", "t"), batch(2, "p", "t"), batch(1, "q", "t")]
    assert scan.merge_runs(batches, array("q", [1, 2, 3, 4])) == (
        (array("q", [1, 2, 1]), array("q", [3, 3, 4])),
        (["p", "q"], array("q", [6, 4])),
        (["s", "t"], array("q", [1, 9])),
    )
    nothing: tuple[list[str], array[int]] = ([], array("q"))
    assert scan.merge_runs([], array("q")) == ((array("q"), array("q")), nothing, nothing)
    with pytest.raises(ValueError):
        scan.merge_runs(batches, array("q", [1]))


@BOTH
def test_places_are_entered_for_the_topics_that_are_there(scan: ModuleType) -> None:
    logs = {"a": scan.TopicEnd(1, 0, Placed()), "b": scan.TopicEnd(2, 0, Placed())}
    segment = Path("segment")
    parts = [
        Part("me", "a", 1, 5, 2, 0, 10, 30),
        Part("me", "b", 1, 0, 9, 2, 10, 20),
        Part("me", "gone", 1, 0, 9, 2, 10, 20),
    ]
    scan.add_places(parts, logs, segment, 1000, 77)
    scan.add_places([Part("me", "a", 1, 7, 3, 4, 1, 20)], logs, segment, 1077, 88)
    first = [5, 2, 1000, 77, 0, 30]
    # The clock was set back: the largest time so far stays.
    assert list(logs["a"].places.entries) == [*first, 7, 3, 1077, 88, 4, 30]
    assert not logs["b"].places.entries
    another = Path("another")
    scan.add_places([Part("me", "a", 1, 10, 1, 0, 1, 40)], logs, another, 8, 9)
    assert logs["a"].places.asked[-1] is another
