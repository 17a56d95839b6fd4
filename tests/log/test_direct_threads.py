"""Small commits when two threads meet, a job fails, or nothing further comes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from log_contract import values_from
from test_direct import Bus
from test_log_files import wait_until

from polybus.log.journal import committer, direct
from polybus.torture.bus.control import SYNC, Shim

HOUR_MS = 3_600_000.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def quiet(bus: Bus) -> Bus:
    """Something is durable and indexed, and the committer's thread has nothing to do."""
    bus.publish()
    bus.log.sync()
    until_asleep(bus)
    return bus


def until_asleep(bus: Bus) -> None:
    """Wait until the committer's thread has decided how long it sleeps."""
    wait_until(lambda: bus.journal._wake_at == 1 and not bus.journal._turn.locked())


class Proxy:
    """A writer, changed in part, in the place of another."""

    def __init__(self, bus: Bus, at: int) -> None:
        self._writer, thread = bus.journal._writers[at]
        bus.journal._writers[at] = (self, thread)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


class Held(Proxy):
    """A writer whose jobs begin when it is let go."""

    def __init__(self, bus: Bus, at: int) -> None:
        super().__init__(bus, at)
        self.begun = 0
        self._job: tuple[Any, ...] | None = None
        self._free = threading.Event()

    def let_go(self) -> None:
        assert self._job is not None
        self._writer.begin(*self._job)
        self._free.set()

    def begin(self, *job: Any) -> None:
        self.begun += 1
        if self._free.is_set():
            self._writer.begin(*job)
        else:
            self._job = job

    def is_done(self) -> bool:
        return self._free.is_set() and bool(self._writer.is_done())

    def result(self) -> Any:
        assert self._free.wait(10.0)
        return self._writer.result()


class Failing(Proxy):
    """A writer of which the first job fails after it was done: its write, sync or index."""

    def __init__(self, bus: Bus, at: int, part: int) -> None:
        super().__init__(bus, at)
        self._part: int | None = part

    def result(self) -> Any:
        result = list(self._writer.result())
        if self._part is not None:
            result[self._part] = errno.EIO
            self._part = None
        return tuple(result)


def with_a_sync_that_runs(data: Path, fsync_interval_ms: float) -> tuple[Bus, Held, int]:
    """A commit was written during a sync, and its thread sleeps; the next sync is due by now."""
    settings = {"fsync_interval_ms": fsync_interval_ms, "commit_delay_ms": 0.5}
    bus = quiet(Bus(data, "interval", **settings))
    held, journal = Held(bus, 1), bus.journal

    def interval_ends() -> None:
        with journal._turn:
            journal._synced_at -= fsync_interval_ms / 1000

    bus.publish()
    wait_until(lambda: bool(journal._unsynced or held.begun))
    interval_ends()
    journal._wake_up.set()
    wait_until(lambda: held.begun == 1)
    until_asleep(bus)
    ticket = bus.publish()
    wait_until(lambda: len(journal._unsynced) == 1)
    until_asleep(bus)
    interval_ends()
    return bus, held, ticket


def test_commits_written_during_a_sync_are_synced_after_it_without_further_traffic(
    data: Path,
) -> None:
    bus, held, ticket = with_a_sync_that_runs(data, HOUR_MS)
    held.let_go()
    bus.until_durable(ticket)
    bus.check_whole()


def test_the_next_sync_does_not_wait_for_a_loop_that_is_blocked(data: Path) -> None:
    bus, held, _ = with_a_sync_that_runs(data, 20.0)
    held.let_go()
    wait_until(lambda: held.begun == 2, timeout_s=5.0)
    bus.check_whole()


def test_without_an_interval_the_committer_sleeps_while_a_sync_runs(data: Path) -> None:
    bus, held, _ = with_a_sync_that_runs(data, 0.0)
    with bus.journal._turn:
        assert bus.journal._due_in_s() > 0
    held.let_go()
    bus.check_whole()


def test_while_the_disk_stays_broken_a_repair_is_tried_only_after_the_retry_time(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "RETRY_S", 0.05)
    bus = quiet(Bus(data))
    tried: list[float] = []
    repair = bus.journal._writer.repair

    def broken_twice(entries: list[Any]) -> None:
        # Now the committer's thread has the turn, so the results are left to it.
        os.eventfd_write(bus.event, 1)
        bus.log.take_results()
        tried.append(time.monotonic())
        if len(tried) < 3:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        repair(entries)

    monkeypatch.setattr(bus.journal._writer, "repair", broken_twice)
    Failing(bus, 0, part=1)
    bus.until_durable(bus.publish())
    assert len(tried) == 3
    assert all(later - earlier >= 0.05 for earlier, later in zip(tried, tried[1:], strict=False))
    bus.check_whole()


@pytest.mark.parametrize("name", ["_records_of", "_Begun"])
def test_an_error_before_a_commit_is_with_the_writer_loses_nothing(
    data: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "RETRY_S", 0.01)
    bus = quiet(Bus(data))
    failed: list[int] = []

    def broken(*_: object) -> None:
        failed.append(bus.journal.last_ticket)
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(direct, name, broken)
        ticket = bus.publish()
    assert failed == [ticket]
    bus.until_durable(ticket)
    wait_until(lambda: bus.log.failure is None)
    bus.until_durable(bus.publish())
    bus.check_whole()


def test_a_close_just_before_the_committer_sleeps_ends_it(data: Path) -> None:
    bus = quiet(Bus(data))
    journal, alarm = bus.journal, bus.journal._wake_up

    class ClosedBefore:
        """An alarm that is set by `close` just before it is cleared."""

        def __getattr__(self, name: str) -> Any:
            return getattr(alarm, name)

        def clear(self) -> None:
            journal._closing = True
            alarm.set()
            alarm.clear()

    journal._wake_up = ClosedBefore()
    alarm.set()
    journal._thread.join(2.0)
    assert not journal._thread.is_alive()
    bus.check_whole()


@pytest.mark.parametrize("part", [0, 1], ids=["write", "sync"])
def test_a_repair_that_finds_a_failed_commit_writes_it_again_itself(
    data: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "RETRY_S", 0.01)
    bus = quiet(Bus(data))
    end, repair = bus.journal._end, bus.journal._repair
    repairs: list[int] = []

    def broken_once() -> None:
        bus.journal._end = end
        raise ZeroDivisionError

    def counted() -> None:
        repairs.append(1)
        repair()

    monkeypatch.setattr(bus.journal, "_end", broken_once)
    monkeypatch.setattr(bus.journal, "_repair", counted)
    Failing(bus, 0, part)
    bus.until_durable(bus.publish())
    assert bus.journal._end == end and len(repairs) == 1
    bus.check_whole()


def test_a_reader_that_stays_bounds_the_commits_in_memory_and_all_are_readable(
    data: Path,
) -> None:
    bus = quiet(Bus(data))
    # Nothing stays in memory but what cannot be read from the segment yet.
    bus.log._shared._recent._bytes_max = 0
    journal, count = bus.journal, direct.UNPLACED_MAX
    bus.until_durable(bus.publish())
    with bus.log._shared.lock:
        first = bus.count
        for _ in range(count):
            bus.until_durable(bus.publish())
        assert len(journal._unplaced) == count
        ticket = bus.publish()
        # The committer's thread has the turn, and waits for the reader.
        wait_until(journal._turn.locked, timeout_s=5.0)
        assert len(journal._unplaced) == count and bus.log.durable < ticket
        expected = [b"a-%d" % number for number in range(first, bus.count)]
        assert values_from(bus.log, "a", first) == expected
    bus.until_durable(ticket)
    assert not journal._unplaced
    assert values_from(bus.log, "a", first) == expected
    bus.check_whole()


SYNCED = """
import os, sys, threading
from polybus.log.journal import _writing
flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
file, index = (os.open(os.path.join(sys.argv[1], name), flags) for name in ("file", "index"))
writer = _writing.Writer(os.eventfd(0))
threading.Thread(target=writer.run, daemon=True).start()
writer.begin(file, index, b"message", b"records")
print(writer.result()[:3])
"""


def test_a_sync_that_a_signal_interrupts_is_done_again(tmp_path: Path) -> None:
    shim = Shim(tmp_path)
    shim.root.mkdir()
    shim.fail(errno.EINTR, SYNC, "*", count=1)
    done = subprocess.run(
        [sys.executable, "-c", SYNCED, str(shim.root)],
        capture_output=True,
        text=True,
        env={**os.environ, **shim.environment},
        timeout=20,
        check=True,
    )
    assert shim.failures == 1 and done.stdout == "(0, 0, 0)\n"
    assert (shim.root / "index").read_bytes() == b"records"
