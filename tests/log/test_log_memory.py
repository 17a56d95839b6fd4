"""MemoryLog keeps the Log's promises, and its bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from log_contract import LogContract, OpenLog, values_from

from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.log.interface import LogCallbacks
from polybus.log.memory import MemoryLog
from polybus.testing import ManualClock


class TestMemoryLog(LogContract):
    keeps_messages = False

    @pytest.fixture
    def open_log(self, tmp_path: Path, callbacks: LogCallbacks) -> OpenLog:
        clock = ManualClock()
        data = tmp_path / "data"
        return lambda: MemoryLog(clock=clock, bytes_max=64 << 20, data=data, callbacks=callbacks)


def test_over_its_bound_the_oldest_messages_of_any_topic_go_first() -> None:
    log = MemoryLog(clock=ManualClock(), bytes_max=100_000)
    log.create_topic("quiet")
    log.create_topic("busy")
    log.append(Batch.of("quiet", [b"q"]))
    for number in range(2000):
        log.append(Batch.of("busy", [b"%04d" % number * 25]))
    quiet, busy = log.bounds("quiet"), log.bounds("busy")
    assert (quiet.start, quiet.stop) == (1, 1)
    assert 0 < busy.start < busy.stop == 2000
    kept = values_from(log, "busy", busy.start)
    assert kept[-1] == b"1999" * 25
    assert sum(map(len, kept)) <= 100_000
    with pytest.raises(UsageError) as caught:
        log.read("busy", busy.start - 1)
    assert caught.value.code == "log.offset-unknown"


def test_a_message_larger_than_the_bound_is_kept_until_the_next_one_comes() -> None:
    log = MemoryLog(clock=ManualClock(), bytes_max=1000)
    log.create_topic("a")
    log.append(Batch.of("a", [b"x" * 5000]))
    assert len(log.read("a", 0)[0].value(0)) == 5000
    log.append(Batch.of("a", [b"y"]))
    assert log.bounds("a").start == 1


def test_a_small_message_does_not_keep_the_large_read_it_came_in() -> None:
    log = MemoryLog(clock=ManualClock(), bytes_max=1 << 20)
    log.create_topic("a")
    read = bytes(256 << 10)
    for _ in range(100):
        batch = Batch.of("a", [b"small"])
        batch.buffer = read
        log.append(batch)
    assert log.bounds("a").start == 0
    assert all(len(batch.buffer) == 5 for batch in log.read("a", 0))


def test_deleting_a_topic_gives_its_room_back() -> None:
    log = MemoryLog(clock=ManualClock(), bytes_max=10_000)
    log.create_topic("a")
    log.create_topic("b")
    log.append(Batch.of("a", [b"x" * 8000]))
    log.delete_topic("a")
    log.append(Batch.of("b", [b"y" * 4000]))
    log.append(Batch.of("b", [b"y" * 4000]))
    assert log.bounds("b").start == 0


def test_encodings_that_subscribers_make_are_not_kept_in_the_log() -> None:
    log = MemoryLog(clock=ManualClock(), bytes_max=10_000)
    log.create_topic("a")
    log.append(Batch.of("a", [b"x"]))
    log.read("a", 0)[0].carry_encoding("goms", b"long")
    assert log.read("a", 0)[0].encoded("goms", lambda batch: b"fresh") == b"fresh"


def test_one_data_directory_has_one_log(tmp_path: Path) -> None:
    first = MemoryLog(clock=ManualClock(), bytes_max=1000, data=tmp_path)
    with pytest.raises(StorageError) as caught:
        MemoryLog(clock=ManualClock(), bytes_max=1000, data=tmp_path)
    assert caught.value.code == "log.locked"
    first.close()
