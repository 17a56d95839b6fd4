"""What was appended together is in the log together or not at all, whatever the disk does."""

from __future__ import annotations

import contextlib
import errno
import random
from pathlib import Path

import pytest
from log_contract import numbered, values_from
from test_faults import open_log
from test_log_files import wait_until

from polybus.errors import StorageError
from polybus.log.files import FileLog
from polybus.log.journal import committer as journal
from polybus.testing.faulty_disk import FaultyDisk

TOPICS = ("a", "b", "c")


def append_some(log: FileLog, draw: random.Random) -> None:
    """Transactions that give every topic the same number of messages, until the power goes."""
    for _ in range(60):
        count = draw.randint(1, 30)
        batches = [numbered(topic, log.bounds(topic).stop, count) for topic in TOPICS]
        draw.shuffle(batches)
        # Large enough, now and then, to be cut into several commits if it were not for the rule.
        log.append_all(batches, urgent=draw.random() < 0.5)
        log.append(numbered("noise", log.bounds("noise").stop, draw.randint(1, 5)))
        if draw.random() < 0.1:
            log.sync()


@pytest.mark.parametrize("seed", range(20))
def test_after_a_power_cut_a_transaction_is_there_as_a_whole_or_not(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "COMMIT_BYTES_FACTOR", 0)
    draw = random.Random(seed)
    stops: list[int] = []
    for _ in range(4):
        disk = FaultyDisk(seed=draw.randrange(1 << 30))
        with contextlib.suppress(StorageError):
            log = open_log(tmp_path, disk, durability=draw.choice(["fsync", "interval"]))
            try:
                for topic in (*TOPICS, "noise"):
                    if topic not in log.topics():
                        log.create_topic(topic)
                disk.cut_power_after(draw.randint(0, 60))
                append_some(log, draw)
            finally:
                with contextlib.suppress(StorageError):
                    log.close()
        disk.crash()
        log = open_log(tmp_path)
        try:
            found = {log.bounds(topic).stop for topic in TOPICS if topic in log.topics()}
            assert len(found) <= 1, f"half a transaction: {found}"
            stops += found
            for topic in TOPICS:
                if topic in log.topics():
                    expected = [b"%s-%d" % (topic.encode(), n) for n in range(max(found))]
                    assert values_from(log, topic, 0) == expected
        finally:
            log.close()
    assert stops == sorted(stops), "what was there once has gone"


def test_a_torn_write_of_a_transaction_leaves_nothing_of_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for topic in ("a", "b"):
        log.create_topic(topic)
    log.append_all([numbered("a", 0, 5), numbered("b", 0, 5)])
    log.sync()
    segment = next((tmp_path / "journal").glob("*.arrows"))
    whole = segment.stat().st_size
    log.append_all([numbered("a", 5, 500), numbered("b", 5, 500)])
    log.close()
    size = segment.stat().st_size
    for cut in (whole + 1, (whole + size) // 2, size - 1):
        with segment.open("r+b") as file:
            file.truncate(cut)
        for index in (tmp_path / "journal").glob("*.index"):
            index.unlink()
        log = open_log(tmp_path)
        assert (log.bounds("a").stop, log.bounds("b").stop) == (5, 5)
        log.append_all([numbered("a", 5, 500), numbered("b", 5, 500)])
        log.close()


def test_a_full_disk_refuses_the_next_transaction_and_keeps_the_one_it_has(tmp_path: Path) -> None:
    disk = FaultyDisk(seed=3)
    log = open_log(tmp_path, disk)
    for topic in ("a", "b"):
        log.create_topic(topic)
    disk.fail("write", errno.ENOSPC)
    log.append_all([numbered("a", 0, 3), numbered("b", 0, 3)], urgent=True)
    wait_until(lambda: log.failure is not None)
    with pytest.raises(StorageError) as caught:
        log.append_all([numbered("a", 3, 1), numbered("b", 3, 1)])
    assert caught.value.code == "log.full"
    assert (log.bounds("a").stop, log.bounds("b").stop) == (3, 3)
    disk.heal()
    wait_until(lambda: log.failure is None)
    log.sync()
    log.close()
    log = open_log(tmp_path)
    assert values_from(log, "a", 0) == [b"a-0", b"a-1", b"a-2"]
    assert values_from(log, "b", 0) == [b"b-0", b"b-1", b"b-2"]
    log.close()


def test_batches_that_subscribers_have_wait_for_a_disk_that_failed_meanwhile(
    tmp_path: Path,
) -> None:
    disk = FaultyDisk(seed=3)
    log = open_log(tmp_path, disk)
    log.create_topic("a")
    delivered = [numbered("a", 1, 2)]
    disk.fail("write", errno.ENOSPC)
    log.append(numbered("a", 0, 1), urgent=True)
    assert log.takes(delivered)
    wait_until(lambda: log.failure is not None)
    assert not log.takes(delivered)
    log.append_all(delivered, is_taken=True)
    disk.heal()
    wait_until(lambda: log.failure is None)
    assert log.takes(delivered)
    log.sync()
    log.close()
    log = open_log(tmp_path)
    assert values_from(log, "a", 0) == [b"a-0", b"a-1", b"a-2"]
    log.close()


def test_a_log_takes_batches_of_existing_topics_that_are_not_frozen(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.create_topic("a")
    log.create_topic("b")
    both = [numbered("a", 0, 1), numbered("b", 0, 1)]
    assert log.takes(both)
    assert not log.takes([*both, numbered("c", 0, 1)])
    log.freeze("b", "damaged")
    assert log.takes(both[:1])
    assert not log.takes(both)
    with pytest.raises(StorageError) as caught:
        log.append_all(both, is_taken=True)
    assert caught.value.code == "log.frozen"
    assert log.bounds("a").stop == 0
    log.close()
