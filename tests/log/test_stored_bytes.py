"""The size of a topic counts its history and what the journal has of it, also after a restart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polybus import config
from polybus.batch import Batch
from polybus.log import layout
from polybus.log.files import FileLog
from polybus.log.history.handover import hand_over
from polybus.log.journal import restored
from polybus.testing import ManualClock

Opener = Callable[[], FileLog]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Opens the log of the test's data directory, and closes the one before."""
    clock = ManualClock()
    with contextlib.ExitStack() as opened:

        def open_log() -> FileLog:
            opened.close()
            log = FileLog(
                tmp_path / "data",
                durability="fsync",
                journal=config.Journal(),
                retention=config.Retention(),
                clock=clock,
                maintenance=False,
            )
            opened.callback(log.close)
            return log

        yield open_log


def filled(log: FileLog) -> None:
    """One commit: 10 messages of 1000 bytes in `large`, 100 of 3 bytes in `small`."""
    log.create_topic("large")
    log.create_topic("small")
    log.append_all([Batch.of("large", [b"x" * 1000] * 10), Batch.of("small", [b"abc"] * 100)])
    log.sync()


def test_the_size_of_new_messages_is_that_of_the_callers_counters(opener: Opener) -> None:
    log = opener()
    filled(log)
    assert log.stored_bytes("large", 10, 10_000) == 10_000
    assert log.stored_bytes("small", 100, 300) == 300


def test_topics_that_share_a_commit_have_their_own_sizes_after_a_restart(opener: Opener) -> None:
    filled(opener())
    log = opener()
    assert (log.stored_bytes("large"), log.stored_bytes("small")) == (10_000, 300)
    log.append(Batch.of("small", [b"x" * 500] * 2))
    assert log.stored_bytes("small", 2, 1000) == 300 + 1000


def test_what_is_handed_over_counts_as_history_alone(opener: Opener) -> None:
    filled(opener())
    log = opener()
    log.seal()
    log.after_handover(hand_over(log.data))
    history_bytes = log.describe("large")["history-bytes"]
    assert log.stored_bytes("large", 0, 0) == history_bytes > 0
    log.append(Batch.of("large", [b"x" * 70]))
    assert log.stored_bytes("large", 1, 70) == history_bytes + 70


def test_beyond_the_sample_a_topic_has_the_mean_of_the_others(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opener()
    log.create_topic("first")
    log.create_topic("last")
    for topic, value in (("first", b"x" * 1000), ("last", b"x" * 10)):
        log.append(Batch.of(topic, [value] * 5))
        log.sync()
    monkeypatch.setattr(restored, "SAMPLE_COMMITS_MAX", 1)
    log = opener()
    assert (log.stored_bytes("last"), log.stored_bytes("first")) == (50, 50)


def test_a_commit_that_cannot_be_read_does_not_hinder_the_start(opener: Opener) -> None:
    log = opener()
    filled(log)
    log.seal()
    log.close()
    [segment, *_] = layout.segments(log.data)
    content = bytearray(segment.read_bytes())
    content[content.index(b"x" * 1000)] ^= 1
    segment.write_bytes(content)
    assert opener().stored_bytes("large") == 0
