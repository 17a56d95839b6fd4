"""The log's loops over many batches: one contract, the compiled module and its twin."""

from __future__ import annotations

from array import array
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from polybus.errors import StorageError
from polybus.scan import Batch, batch, plain

PURE = plain.from_source("polybus.scan.batch")
BOTH = pytest.mark.parametrize("scan", [batch, PURE], ids=["compiled", "pure"])


class Placed:
    """Places of a topic, all in one segment."""

    def __init__(self) -> None:
        self.entries = array("q")
        self.asked: list[Path] = []

    def in_segment(self, segment: Path) -> Placed:
        self.asked.append(segment)
        return self


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
def test_batches_are_taken_in_order_at_the_end_of_their_logs(scan: ModuleType) -> None:
    one, other = (scan.TopicEnd(epoch, stop, Placed()) for epoch, stop in ((7, 10), (8, 0)))
    batches = [
        Batch.of("a", [b"1", b"2"]),
        Batch.of("b", [b"3"]),
        Batch.of("a", []),
        Batch.of("a", [b"4"]),
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
        made: Batch = Batch.of(topic, [b"x"] * count)
        made.epoch, made.first_offset, made.timestamp_us = epoch, first, time_us
        return made

    batches = [
        batch("a", 1, 5, 2, 30),
        batch("b", 1, 0, 1, 20),
        batch("a", 1, 7, 3, 10),
        batch("a", 2, 0, 1, 40),
    ]
    ordered, topics, columns = scan.rows_by_topic(batches, Part, "me")
    assert ordered == [batches[0], batches[2], batches[1], batches[3]]
    assert topics == (
        Part("me", "a", 1, 5, 5, 0, 10, 30),
        Part("me", "b", 1, 0, 1, 5, 20, 20),
        Part("me", "a", 2, 0, 1, 6, 40, 40),
    )
    assert all(type(part) is Part for part in topics)
    assert columns == (["a", "b", "a"], array("q", [5, 0, 0]), array("q", [5, 1, 1]))


@BOTH
def test_ends_are_found_unless_one_is_gone_or_takes_no_writes(scan: ModuleType) -> None:
    ends = {name: scan.TopicEnd(1, 0, Placed()) for name in "ab"}
    batches = [Batch.of(name, [b"x"]) for name in "ab"]
    assert scan.find_ends(batches, ends) == [ends["a"], ends["b"]]
    assert scan.find_ends([Batch.of("gone", [b"x"])], ends) is None
    ends["b"].frozen = StorageError("log.frozen", "damaged")
    assert scan.find_ends(batches, ends) is None
    assert scan.find_ends(batches[:1], ends) == [ends["a"]]


@BOTH
def test_a_kept_batch_weighs_its_read_once(scan: ModuleType) -> None:
    logs = {"a": scan.TopicEnd(1, 0, Placed()), "b": scan.TopicEnd(2, 0, Placed())}
    read, small = bytes(1000), b"x" * 40

    def batch(topic: str, buffer: bytes | memoryview, epoch: int) -> Batch:
        made: Batch = Batch(topic, buffer, array("i", [0, 10, 20, 30]))
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
    reads, owner = scan.keep_batches(batches, logs, None, 100, lambda batch: 7)
    each = 100 + 4 * 4
    assert [weight for _, weight in reads] == [2 * each + 1007, each + 40]
    assert [[id(tail) for tail in tails] for tails, _ in reads] == [
        [id(logs["a"].tail), id(logs["b"].tail)],
        [id(logs["a"].tail)],
    ]
    assert owner is small
    assert batches[0].encoded("p", lambda batch: b"new") == b"new"
    reads, owner = scan.keep_batches(batches[2:3], logs, owner, 100, lambda batch: 7)
    assert ([weight for _, weight in reads], owner) == ([each], small)
    assert scan.keep_batches(batches[3:], logs, owner, 100, lambda batch: 7) == ([], small)


@BOTH
def test_the_oldest_batches_leave_their_tails_until_the_rest_fits(scan: ModuleType) -> None:
    one, other = deque([1, 2, 3]), deque([4, 5])
    reads = deque([([one, other, one], 10), ([other], 5), ([one], 1)])
    assert scan.drop_oldest(reads, 16, 15, 9) == 6
    assert (list(one), list(other), len(reads)) == ([3], [5], 2)
    assert scan.drop_oldest(reads, 6, 15, 1) == 1
    assert (list(one), list(other), len(reads)) == ([3], [], 1)
    assert scan.drop_oldest(deque(), 0, 15, 1) == 0


@BOTH
def test_a_queue_is_emptied_into_groups_up_to_a_weight(scan: ModuleType) -> None:
    one, two, three, four = [Batch.of("a", [b"x"]) for _ in range(4)]
    queue = deque([([one, two], 6), ([three], 4), ([four], 70)])
    assert scan.take_groups(queue, 10) == [([one, two, three], 10), ([four], 70)]
    assert not queue
    assert scan.take_groups(queue, 10) == []


@BOTH
def test_keys_and_headers_of_any_batch_are_seen(scan: ModuleType) -> None:
    plain, rich = Batch.of("a", [b"x"]), Batch.of("a", [b"x"], keys=[b"k"])
    assert not scan.have_extras([plain, plain])
    assert scan.have_extras([plain, rich])


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
    asked = len(logs["a"].places.asked)
    logs["a"].forget_entries()
    scan.add_places([Part("me", "a", 1, 11, 1, 0, 1, 40)], logs, another, 17, 9)
    assert len(logs["a"].places.asked) == asked + 1
