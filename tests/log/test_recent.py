"""What was written last stays in memory, as much as fits."""

from __future__ import annotations

from array import array

from polybus.batch import Batch
from polybus.log.journal.cache import RecentBatches
from polybus.log.journal.topic_commits import TopicCommits
from polybus.scan import TopicEnd

READ_BYTES = 1000


def written(recent: RecentBatches, ends: dict[str, TopicEnd], *, reads: int) -> None:
    """A commit of this many reads, each with a batch of every topic."""
    batches = []
    for _ in range(reads):
        read = bytes(READ_BYTES)
        for name, end in ends.items():
            batch = Batch(name, read, array("i", [0, 10]))
            batch.epoch = end.epoch
            end.tail.append(batch)
            batches.append(batch)
    recent.keep(batches, ends)


def test_of_a_commit_that_is_too_large_the_last_reads_stay() -> None:
    ends = {name: TopicEnd(1, 0, TopicCommits()) for name in "ab"}
    recent = RecentBatches(bytes_max=8 * READ_BYTES)
    written(recent, ends, reads=10)
    kept = len(ends["a"].tail)
    assert 2 <= kept < 8
    last = ends["a"].tail[-1]
    written(recent, ends, reads=1)
    assert len(ends["a"].tail) == len(ends["b"].tail) == kept
    assert last in ends["a"].tail


def test_of_many_small_reads_a_thousand_stay() -> None:
    ends = {"a": TopicEnd(1, 0, TopicCommits())}
    recent = RecentBatches(bytes_max=1 << 30)
    for _ in range(3):
        written(recent, ends, reads=1000)
    assert len(ends["a"].tail) == 1024


def test_a_read_that_is_larger_than_all_does_not_stay() -> None:
    ends = {"a": TopicEnd(1, 0, TopicCommits())}
    recent = RecentBatches(bytes_max=READ_BYTES // 2)
    written(recent, ends, reads=1)
    assert not ends["a"].tail


def test_a_topic_that_is_gone_counts_for_nothing() -> None:
    gone = {"a": TopicEnd(1, 0, TopicCommits())}
    ends = {"b": TopicEnd(1, 0, TopicCommits())}
    recent = RecentBatches(bytes_max=3 * READ_BYTES)
    for _ in range(10):
        read = Batch("a", bytes(READ_BYTES), array("i", [0, 10]))
        read.epoch = 1
        gone["a"].tail.append(read)
        recent.keep([read], ends)
    written(recent, ends, reads=1)
    assert len(ends["b"].tail) == 1
