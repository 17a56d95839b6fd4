"""Small commits without the committer's thread: the same promises, whatever the disk does."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from log_contract import LogContract, OpenLog, numbered, values_from
from test_log_files import wait_until

from polybus import config
from polybus.errors import StorageError
from polybus.log import layout
from polybus.log.files import FileLog
from polybus.log.interface import LogCallbacks
from polybus.log.journal import committer, direct
from polybus.log.journal.segment import read_index
from polybus.log.reading.reader import LogReader
from polybus.log.verify.verify import verify
from polybus.testing import ManualClock
from polybus.testing.faulty_disk import FaultyDisk

Durability = Literal["fsync", "interval"]


class Bus:
    """The thread of the bus: a log whose results it takes, and what that announces."""

    def __init__(self, data: Path, durability: Durability = "fsync", **settings: Any) -> None:
        self.announced: list[tuple[int, str]] = []
        self.log = FileLog(
            data,
            durability=durability,
            journal=config.Journal(**{"fsync_interval_ms": 10.0, **settings}),
            retention=config.Retention(),
            clock=ManualClock(),
            callbacks=LogCallbacks(on_durable=self._note),
            maintenance=False,
        )
        self.journal: Any = self.log._journal
        self.event = self.log.watch()
        assert self.event >= 0
        if "a" not in self.log.topics():
            self.log.create_topic("a")
        self.count = len(values_from(self.log, "a", 0))

    def _note(self, ticket: int) -> None:
        self.announced.append((ticket, threading.current_thread().name))

    def publish(self, count: int = 1, *, urgent: bool = True) -> int:
        batch = numbered("a", self.count, count)
        self.count += count
        return self.log.append(batch, urgent=urgent)

    def turn(self, timeout_s: float = 0.0) -> None:
        """A turn of the loop, or its wait."""
        if select.select([self.event], [], [], timeout_s)[0]:
            self.log.take_results()

    def has_failed(self) -> bool:
        self.turn()
        return self.log.failure is not None

    def until_durable(self, ticket: int) -> None:
        deadline = time.monotonic() + 5.0
        while self.log.durable < ticket:
            assert time.monotonic() < deadline
            self.turn(0.01)

    def check_whole(self) -> None:
        """Close it; every message is there once, and the files are intact."""
        self.log.close()
        report = verify(self.log.data)
        assert report.damages == []
        again = Bus(self.log.data)
        expected = [b"a-%d" % number for number in range(self.count)]
        assert values_from(again.log, "a", 0) == expected
        again.log.close()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "RETRY_S", 0.01)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


class WatchedContract(LogContract):
    """Nobody takes the results: the committer's thread does, at the latest when it is asked to."""

    durability: Durability

    @pytest.fixture
    def open_log(self, data: Path, callbacks: LogCallbacks) -> Iterator[OpenLog]:
        clock, opened = ManualClock(), []

        def open_log() -> FileLog:
            log = FileLog(
                data,
                durability=self.durability,
                journal=config.Journal(fsync_interval_ms=10.0, commit_delay_ms=0.5),
                retention=config.Retention(),
                clock=clock,
                callbacks=callbacks,
                maintenance=False,
            )
            assert log.watch() >= 0
            opened.append(log)
            return log

        yield open_log
        for log in opened:
            with contextlib.suppress(StorageError):
                log.close()


class TestFsync(WatchedContract):
    durability = "fsync"


class TestInterval(WatchedContract):
    durability = "interval"


def test_a_small_commit_is_announced_on_the_thread_of_the_bus_and_indexed_before(
    data: Path,
) -> None:
    bus = Bus(data)
    for expected in range(1, 21):
        bus.until_durable(bus.publish())
        # Another process sees it as soon as the publisher knows.
        assert LogReader(data).bounds("a").stop == expected
    own = threading.current_thread().name
    # The committer's thread may be awake during the first.
    assert bus.announced[2:] == [(ticket, own) for ticket in range(3, 21)]
    bus.check_whole()


def test_with_interval_the_thread_of_the_bus_writes_syncs_and_announces(data: Path) -> None:
    bus = Bus(data, "interval")
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        bus.publish(urgent=False)
        bus.turn(0.0005)
    bus.log.sync()
    assert threading.current_thread().name in {name for _, name in bus.announced}
    bus.check_whole()


@pytest.mark.parametrize("durability", ["fsync", "interval"])
def test_a_sync_does_not_wait_for_the_thread_of_the_bus(data: Path, durability: Durability) -> None:
    bus = Bus(data, durability)
    bus.until_durable(bus.publish())
    for _ in range(20):
        ticket = bus.publish(urgent=True)
        bus.log.sync()
        assert bus.log.durable >= ticket
        bus.turn()
    bus.check_whole()


def test_a_message_without_a_receipt_does_not_wait_for_the_next_one(data: Path) -> None:
    bus = Bus(data)
    bus.until_durable(bus.publish())
    for _ in range(20):
        bus.publish()
        bus.until_durable(bus.publish(urgent=False))
    bus.check_whole()


@pytest.mark.parametrize("durability", ["fsync", "interval"])
@pytest.mark.parametrize("seed", range(3))
def test_small_and_large_commits_keep_their_order(
    data: Path, durability: Durability, seed: int
) -> None:
    draw = random.Random(seed)
    bus = Bus(data, durability, commit_delay_ms=0.5, segment_bytes_max=200_000)
    for _ in range(150):
        bus.publish(draw.choice([1, 1, 1, 2, 5000]), urgent=draw.random() < 0.5)
        bus.turn(draw.choice([0.0, 0.0, 0.001]))
        if draw.random() < 0.01:
            bus.log.sync()
    assert [ticket for ticket, _ in bus.announced] == sorted({one for one, _ in bus.announced})
    bus.check_whole()


def test_a_commit_that_is_written_in_part_is_cut_off_and_written_again(data: Path) -> None:
    bus = Bus(data)
    bus.until_durable(bus.publish())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system writes up to the limit, and refuses the rest.
    resource.setrlimit(resource.RLIMIT_FSIZE, (bus.journal._writer.bytes + 100, before[1]))
    try:
        ticket = bus.publish(20)
        wait_until(bus.has_failed)
        with pytest.raises(StorageError, match=r"."):
            bus.publish()
        bus.count -= 1
        assert bus.log.durable < ticket
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    bus.until_durable(ticket)
    assert bus.log.failure is None
    bus.check_whole()


@contextmanager
def replaced(descriptor: int, path: str, flags: int) -> Iterator[None]:
    """Let an open descriptor mean another file."""
    other = os.open(path, flags)
    os.dup2(other, descriptor)
    os.close(other)
    yield


def test_a_full_disk_refuses_publishes_until_the_commit_is_written(data: Path) -> None:
    bus = Bus(data)
    bus.until_durable(bus.publish())
    # A repair opens the real file again.
    with replaced(bus.journal._writer.descriptor, "/dev/full", os.O_WRONLY):
        ticket = bus.publish()
        wait_until(bus.has_failed)
        failure = bus.log.failure
    assert failure is not None and failure.code == "log.full"
    bus.until_durable(ticket)
    bus.check_whole()


@pytest.mark.parametrize("durability", ["fsync", "interval"])
def test_what_a_failed_sync_may_have_lost_is_written_again(
    data: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = Bus(data, durability, commit_delay_ms=0.5)
    bus.until_durable(bus.publish())
    rewritten: list[int] = []
    repair = bus.journal._writer.repair

    def noting(entries: list[Any]) -> None:
        rewritten.extend(entry.commit for entry in entries)
        repair(entries)

    monkeypatch.setattr(bus.journal._writer, "repair", noting)
    writers = bus.journal._writers
    failing = FailingSync(writers[-1][0])
    writers[-1] = (failing, writers[-1][1])
    ticket = bus.publish()
    wait_until(lambda: _step(bus, failing))
    bus.until_durable(ticket)
    assert rewritten
    bus.check_whole()


def _step(bus: Bus, failing: FailingSync) -> bool:
    if not failing.failed and bus.log.failure is None:
        bus.publish(urgent=False)
    bus.turn(0.001)
    return failing.failed and bus.log.failure is None


class FailingSync:
    """A writer whose first sync fails after it was done."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def result(self) -> tuple[int, int, int, float]:
        write_error, sync_error, index_error, took_s = self._writer.result()
        if not self.failed:
            self.failed = True
            sync_error = errno.EIO
        return write_error, sync_error, index_error, took_s


def test_an_index_that_cannot_be_written_is_written_with_the_next_commit(data: Path) -> None:
    bus = Bus(data)
    bus.until_durable(bus.publish())
    index = bus.journal._writer._index.descriptor
    kept = os.dup(index)
    with replaced(index, "/dev/full", os.O_WRONLY):
        bus.until_durable(bus.publish())
    os.dup2(kept, index)
    os.close(kept)
    assert bus.log.failure is None
    bus.until_durable(bus.publish())
    path = layout.index_path(next(iter(layout.segments(data))))
    assert [entry.commit for entry in read_index(path).entries] == [1, 2, 3]
    bus.check_whole()


def test_a_reader_does_not_delay_a_receipt(data: Path) -> None:
    bus = Bus(data)
    bus.until_durable(bus.publish())
    with bus.log._shared.lock:
        bus.until_durable(bus.publish())
    assert values_from(bus.log, "a", 0) == [b"a-0", b"a-1"]
    bus.until_durable(bus.publish())
    bus.log.seal()
    bus.check_whole()


@pytest.mark.parametrize("durability", ["fsync", "interval"])
def test_a_log_is_closed_while_a_commit_is_written(data: Path, durability: Durability) -> None:
    for _ in range(20):
        bus = Bus(data, durability, commit_delay_ms=0.1)
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            bus.publish()
        bus.log.close()
        assert len(os.listdir("/proc/self/fd")) < descriptors
    bus = Bus(data)
    assert bus.count == 60
    bus.check_whole()


def test_a_defect_is_a_failure_and_not_silence(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Bus(data)
    with monkeypatch.context() as patched:
        patched.setattr("polybus.log.journal.commit.Encoder.encode", _broken)
        ticket = bus.publish()
        wait_until(lambda: bus.log.failure is not None)
    bus.until_durable(ticket)
    bus.check_whole()


def _broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError


def test_a_segment_is_sealed_at_its_age_though_its_thread_slept_all_the_time(data: Path) -> None:
    bus = Bus(data, segment_age_s=0.2)
    bus.until_durable(bus.publish())
    wait_until(lambda: len(bus.log.sealed_segments()) == 1)
    bus.check_whole()


def test_another_disk_or_no_compiled_module_leaves_everything_to_the_committer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(name: str, **more: Any) -> FileLog:
        return FileLog(
            tmp_path / name,
            durability="fsync",
            journal=config.Journal(),
            retention=config.Retention(),
            clock=ManualClock(),
            maintenance=False,
            **more,
        )

    faulty = opened("faulty", disk=FaultyDisk(seed=0))
    monkeypatch.setattr(direct, "_writing", None)
    for log in (faulty, opened("pure")):
        assert log.watch() == -1
        log.create_topic("a")
        log.append(numbered("a", 0, 2), urgent=True)
        log.sync()
        assert values_from(log, "a", 0) == [b"a-0", b"a-1"]
        log.close()


# The compiled module.


def test_a_writer_writes_all_of_a_message_through_a_pipe_that_takes_it_in_parts() -> None:
    reading, writing = os.pipe()
    event = os.eventfd(0, os.EFD_NONBLOCK)
    writer = direct._writing.Writer(event)
    thread = threading.Thread(target=writer.run)
    thread.start()
    message = os.urandom(1 << 20)
    writer.begin(writing, -1, message, b"")
    assert not writer.is_done()
    got = b""
    while len(got) < len(message):
        got += os.read(reading, 1 << 16)
    assert got == message and writer.result()[:3] == (0, 0, 0)
    # A pipe cannot be synced, and without `records` nothing is reported.
    with pytest.raises(BlockingIOError):
        os.eventfd_read(event)
    writer.begin(writing, -1, b"x", b"records")
    assert writer.result()[:3] == (0, errno.EINVAL, 0)
    writer.begin(-1, -1, b"x", b"")
    assert writer.result()[0] == errno.EBADF
    writer.stop()
    thread.join()
    assert os.eventfd_read(event) == 1
    for descriptor in (reading, writing, event):
        os.close(descriptor)


@pytest.mark.parametrize(("then_s", "least_s", "most_s"), [(0.3, 0.25, 5.0), (0.0, 0.0, 0.5)])
def test_an_alarm_is_put_off_or_brought_forward(
    then_s: float, least_s: float, most_s: float
) -> None:
    alarm = direct._writing.Alarm()
    first_s = 0.1 if then_s else 60.0
    took: list[float] = []

    def wait() -> None:
        began = time.monotonic()
        alarm.wait(first_s)
        took.append(time.monotonic() - began)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.03)
    alarm.put_off(then_s)
    thread.join(10)
    assert least_s <= took[0] < most_s


def test_an_alarm_that_was_set_before_wakes_once() -> None:
    alarm = direct._writing.Alarm()
    alarm.set()
    alarm.set()
    alarm.wait(60.0)
    began = time.monotonic()
    alarm.wait(0.02)
    assert time.monotonic() - began >= 0.02
    alarm.set()
    alarm.clear()
    alarm.wait(0.0)
