"""Disks that lose, tear and refuse: nothing that was promised is lost, nothing is invented.

Each failure names its seed; `FaultyDisk(seed=…)` plays it again.
"""

from __future__ import annotations

import contextlib
import errno
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from log_contract import numbered, values_from
from test_log_files import wait_until

from polybus import config
from polybus.errors import StorageError
from polybus.log import layout
from polybus.log.files import FileLog
from polybus.log.history.handover import hand_over
from polybus.log.interface import LogCallbacks
from polybus.log.journal import committer as journal
from polybus.log.journal import floor as floors
from polybus.log.verify.verify import verify
from polybus.testing import ManualClock
from polybus.testing.faulty_disk import FaultyDisk

TOPICS = ("a", "b", "c")


def open_log(
    data: Path,
    disk: FaultyDisk | None = None,
    *,
    durability: Literal["fsync", "interval"] = "fsync",
    segment_bytes_max: int = 1 << 28,
    callbacks: LogCallbacks | None = None,
) -> FileLog:
    return FileLog(
        data,
        durability=durability,
        journal=config.Journal(
            segment_bytes_max=segment_bytes_max,
            commit_delay_ms=0.5,
            fsync_interval_ms=2.0,
        ),
        retention=config.Retention(),
        clock=ManualClock(),
        callbacks=callbacks,
        disk=disk,
        maintenance=False,
    )


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "RETRY_S", 0.01)


class Run:
    """A bus's life up to a power cut: what was appended, and what was promised."""

    def __init__(self, data: Path, seed: int) -> None:
        self.data = data
        self.draw = random.Random(seed)
        self.disk = FaultyDisk(seed=seed)
        self.appended: dict[str, int] = {}
        self.promised: dict[str, int] = {}
        self._tickets: list[tuple[int, str, int]] = []
        self._durable = 0
        self._lock = threading.Lock()

    def live(self) -> None:
        """Open, append until the power goes, crash."""
        self._tickets, self._durable = [], 0
        self.disk.cut_power_after(self.draw.randint(0, 120))
        log = None
        try:
            log = open_log(
                self.data,
                self.disk,
                durability=self.draw.choice(["fsync", "interval"]),
                segment_bytes_max=self.draw.choice([3000, 1 << 28]),
                callbacks=LogCallbacks(on_durable=self._note_durable),
            )
            self._publish(log)
        except StorageError:
            pass
        finally:
            if log is not None:
                with contextlib.suppress(StorageError):
                    log.close()
        self.disk.crash()
        for ticket, topic, stop in self._tickets:
            if ticket <= self._durable:
                self.promised[topic] = stop
        self.disk = FaultyDisk(seed=self.draw.randrange(1 << 30))

    def _publish(self, log: FileLog) -> None:
        for topic in TOPICS:
            if topic not in log.topics():
                log.create_topic(topic)
                self.promised.setdefault(topic, 0)
        for _ in range(300):
            topic = self.draw.choice(TOPICS)
            first = log.bounds(topic).stop
            count = self.draw.randint(1, 20)
            urgent = self.draw.random() < 0.3
            ticket = log.append(numbered(topic, first, count), urgent=urgent)
            with self._lock:
                self._tickets.append((ticket, topic, first + count))
            self.appended[topic] = max(self.appended.get(topic, 0), first + count)
            if self.draw.random() < 0.1:
                log.sync()

    def _note_durable(self, ticket: int) -> None:
        with self._lock:
            self._durable = ticket

    def check(self) -> None:
        """Open on a good disk: all that was promised is there, in order, and nothing else."""
        log = open_log(self.data)
        try:
            assert log.frozen == {}
            for topic, promised in self.promised.items():
                stop = log.bounds(topic).stop
                assert promised <= stop <= self.appended.get(topic, 0)
                expected = [b"%s-%d" % (topic.encode(), number) for number in range(stop)]
                assert values_from(log, topic, 0) == expected
                # What was lost was never promised; its offsets are given again.
                self.appended[topic] = self.promised[topic] = stop
        finally:
            log.close()


def power_cuts(tmp_path: Path, seeds: range, lives: int) -> None:
    for seed in seeds:
        run = Run(tmp_path / f"seed-{seed}", seed)
        for life in range(lives):
            try:
                run.live()
                run.check()
            except Exception as error:
                raise AssertionError(f"seed {seed}, life {life}: {error!r}") from error


def test_a_power_cut_loses_nothing_promised(tmp_path: Path) -> None:
    power_cuts(tmp_path, range(10), lives=2)


@pytest.mark.slow
def test_two_hundred_power_cuts_lose_nothing_promised(tmp_path: Path) -> None:
    power_cuts(tmp_path, range(1000, 1050), lives=4)


@pytest.mark.parametrize("operation", ["write", "fsync"])
@pytest.mark.parametrize(("error", "code"), [(errno.ENOSPC, "log.full"), (errno.EIO, "log.failed")])
@pytest.mark.parametrize("durability", ["fsync", "interval"])
def test_a_failing_disk_stops_receipts_and_appends_and_heals_by_itself(
    tmp_path: Path,
    operation: Literal["write", "fsync"],
    error: int,
    code: str,
    durability: Literal["fsync", "interval"],
) -> None:
    disk = FaultyDisk(seed=1)
    failures: list[StorageError] = []
    durable: list[int] = []
    callbacks = LogCallbacks(on_failed=failures.append, on_durable=durable.append)
    log = open_log(tmp_path, disk, durability=durability, callbacks=callbacks)
    log.create_topic("a")
    safe = log.append(numbered("a", 0, 3))
    log.sync()
    disk.fail(operation, error)
    log.append(numbered("a", 3, 3))
    wait_until(lambda: log.failure is not None)
    with pytest.raises(StorageError) as caught:
        log.append(numbered("a", 6, 3))
    assert caught.value.code == code
    assert log.durable == safe
    assert durable[-1] == safe
    assert (log.pending_bytes > 0) == (operation == "write"), "what is written is not held"
    assert values_from(log, "a", 0) == [b"a-%d" % n for n in range(6)]
    disk.heal()
    wait_until(lambda: log.failure is None)
    log.append(numbered("a", 6, 3))
    log.sync()
    assert [failure.code for failure in failures] == [code]
    assert log.pending_bytes == 0
    log.close()
    disk.crash()
    log = open_log(tmp_path)
    assert values_from(log, "a", 0) == [b"a-%d" % n for n in range(9)]
    log.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_disk_that_fails_at_any_moment_and_heals_costs_nothing(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    disk = FaultyDisk(seed=seed)
    log = open_log(
        tmp_path,
        disk,
        durability=draw.choice(["fsync", "interval"]),
        segment_bytes_max=draw.choice([3000, 1 << 28]),
    )
    log.create_topic("a")
    count = 0
    for _ in range(5):
        operation: Literal["write", "fsync", "open"] = draw.choice(["write", "fsync", "open"])
        disk.fail(operation, errno.ENOSPC, after=draw.randint(0, 6))
        for _ in range(20):
            with contextlib.suppress(StorageError):
                log.append(numbered("a", count, 2))
                count += 2
            if draw.random() < 0.3:
                with contextlib.suppress(StorageError):
                    log.sync()
        disk.heal()
        wait_until(lambda: log.failure is None)
    log.sync()
    log.close()
    disk.crash()
    log = open_log(tmp_path)
    assert values_from(log, "a", 0) == [b"a-%d" % n for n in range(count)], f"seed {seed}"
    log.close()


def test_sync_and_close_say_so_when_the_disk_fails(tmp_path: Path) -> None:
    disk = FaultyDisk(seed=1)
    log = open_log(tmp_path, disk)
    log.create_topic("a")
    disk.fail("fsync", errno.EIO)
    log.append(numbered("a", 0, 1))
    for call in (log.sync, log.close):
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.code == "log.failed"
    log = open_log(tmp_path)
    assert log.bounds("a").stop in (0, 1)
    log.close()


def test_what_is_refused_while_the_disk_fails_is_not_kept(tmp_path: Path) -> None:
    """The failure is raised for each of them, and must not gather the frames of every raise."""
    disk = FaultyDisk(seed=1)
    log = open_log(tmp_path, disk)
    log.create_topic("a")
    disk.fail("write", errno.EIO)
    log.append(numbered("a", 0, 1))
    wait_until(lambda: log.failure is not None)
    failure = log.failure
    assert failure is not None
    frames = failure.__traceback__
    for call in (
        lambda: log.append(numbered("a", 1, 1)),
        lambda: log.append_all([numbered("a", 1, 1)]),
        log.sync,
    ):
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.args == failure.args
        assert failure.__traceback__ is frames
    disk.heal()
    wait_until(lambda: log.failure is None)
    log.close()


def test_a_topic_that_cannot_be_stored_is_not_created(tmp_path: Path) -> None:
    disk = FaultyDisk(seed=1)
    log = open_log(tmp_path, disk)
    disk.fail("write", errno.ENOSPC)
    with pytest.raises(StorageError) as caught:
        log.create_topic("a")
    assert caught.value.code == "log.full"
    assert list(log.topics()) == []
    disk.heal()
    log.create_topic("a")
    log.close()


def test_a_defect_in_the_committer_is_a_failure_and_not_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    log.create_topic("a")
    with monkeypatch.context() as patched:
        patched.setattr("polybus.log.journal.commit.Encoder.encode", _broken)
        log.append(numbered("a", 0, 1), urgent=True)
        wait_until(lambda: log.failure is not None)
    wait_until(lambda: log.failure is None)
    log.sync()
    assert values_from(log, "a", 0) == [b"a-0"]
    log.close()


def test_a_listener_that_fails_does_not_look_like_a_failing_disk(tmp_path: Path) -> None:
    log = open_log(tmp_path, callbacks=LogCallbacks(on_durable=_broken))
    log.create_topic("a")
    log.append(numbered("a", 0, 1))
    log.sync()
    log.append(numbered("a", 1, 1))
    log.sync()
    assert log.failure is None
    log.close()


def _broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError


# FaultyDisk itself: a test kit that never loses anything proves nothing.


def lost_after_crash(act: Callable[[FaultyDisk, Path], None], folder: Path) -> set[bytes | None]:
    """What the file may hold after a crash, over many seeds."""
    outcomes: set[bytes | None] = set()
    for seed in range(60):
        path = folder / f"file-{seed}"
        disk = FaultyDisk(seed=seed)
        act(disk, path)
        disk.crash()
        outcomes.add(path.read_bytes() if path.exists() else None)
    return outcomes


def test_the_faulty_disk_keeps_synced_bytes_and_loses_others(tmp_path: Path) -> None:
    def act(disk: FaultyDisk, path: Path) -> None:
        file = disk.open(path)
        disk.sync_folder(path.parent)
        file.append(b"safe")
        file.sync()
        file.append(b"12")
        file.close()

    outcomes = lost_after_crash(act, tmp_path)
    assert {b"safe", b"safe1", b"safe12"} <= outcomes
    assert all(outcome is not None and outcome.startswith(b"safe") for outcome in outcomes)


def test_the_faulty_disk_may_drop_a_name_whose_folder_was_not_synced(tmp_path: Path) -> None:
    def act(disk: FaultyDisk, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        for target, content in ((path, b"old"), (temporary, b"new")):
            file = disk.open(target)
            file.append(content)
            file.sync()
            file.close()
            disk.sync_folder(path.parent)
        disk.rename(temporary, path)

    assert lost_after_crash(act, tmp_path) == {b"old", b"new"}


def test_the_faulty_disk_does_not_make_up_for_a_failed_fsync(tmp_path: Path) -> None:
    def act(disk: FaultyDisk, path: Path) -> None:
        file = disk.open(path)
        disk.sync_folder(path.parent)
        file.append(b"1234")
        disk.fail("fsync", errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            file.sync()
        disk.heal()
        file.sync()
        file.close()

    assert b"" in lost_after_crash(act, tmp_path)


def test_segments_are_where_the_layout_says(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.close()
    assert [path.name for path in layout.segments(tmp_path)] == ["00000000000000000001.arrows"]


@pytest.mark.parametrize("after", range(8))
def test_a_deletion_that_the_disk_interrupts_loses_no_receipt_and_can_be_repeated(
    tmp_path: Path, after: int
) -> None:
    disk = FaultyDisk(seed=1)
    log = open_log(tmp_path, disk)
    log.create_topic("news")
    log.append(numbered("news", 0, 2))
    log.sync()
    disk.fail("fsync", errno.EIO, after=after)
    try:
        log.delete_topic("news")
    except StorageError as error:
        assert error.code == "log.failed"
        disk.heal()
        is_gone = not layout.topic_folder(tmp_path, "news").exists()
        if is_gone:
            with pytest.raises(StorageError, match="delete it again"):
                log.append(numbered("news", 2, 1))
        log.delete_topic("news")
    disk.crash()
    with contextlib.suppress(Exception):
        log.close()
    again = open_log(tmp_path)
    assert again.topics() == [] and again.frozen == {}
    again.close()


def test_a_topic_whose_file_cannot_be_read_is_deleted_with_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(folder: Path) -> int:
        raise StorageError("log.damaged", f"{folder}: Input/output error")

    log = open_log(tmp_path)
    log.create_topic("news")
    log.append(numbered("news", 0, 2))
    log.sync()
    with monkeypatch.context() as patch:
        patch.setattr("polybus.log.topics.epoch_of", failing)
        log.delete_topic("news")
    log.close()
    again = open_log(tmp_path)
    assert again.topics() == [] and again.frozen == {}
    again.close()


def with_a_deleted_topic(data: Path, disk: FaultyDisk | None = None) -> FileLog:
    """A log whose floor has a deleted topic, and whose sealed segment has a row of it."""
    log = open_log(data, disk)
    for topic in ("kept", "gone"):
        log.create_topic(topic)
    for offset in range(2):
        for topic in ("kept", "gone"):
            log.append(numbered(topic, offset, 1))
        log.seal()
        if not offset:
            log.after_handover(hand_over(data))
    log.delete_topic("gone")
    return log


def check_deleted(data: Path, kept: list[bytes]) -> None:
    """The topic is gone without a trace, and the other one has its messages."""
    assert verify(data).damages == []
    log = open_log(data)
    assert (log.topics(), log.frozen) == (["kept"], {})
    assert values_from(log, "kept", 0) == kept
    log.close()
    assert not list(layout.trash_folder(data).iterdir())
    assert "gone" not in (floors.load(data) or {})


@pytest.mark.parametrize("operation", ["rename", "fsync", "open"])
@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("retried", [False, True])
def test_segments_that_the_disk_does_not_delete_are_deleted_later_and_before_the_tombstone(
    tmp_path: Path, operation: Literal["rename", "fsync", "open"], after: int, retried: bool
) -> None:
    data = tmp_path / "data"
    disk = FaultyDisk(seed=after)
    log = with_a_deleted_topic(data, disk)
    done = hand_over(data)
    disk.fail(operation, errno.ENOSPC, after=after)
    with contextlib.suppress(OSError):
        log.after_handover(done)
    disk.heal()
    log.apply_retention(0)
    if retried:
        # The next hand-over has nothing to do with these segments.
        log.after_handover([])
        log.apply_retention(0)
        assert log.sealed_segments() == layout.orphan_indexes(data) == []
        assert len(layout.segments(data)) == 1
    disk.crash()
    with contextlib.suppress(Exception):
        log.close()
    assert verify(data).damages == []
    log = open_log(data)
    log.after_handover(hand_over(data))
    log.close()
    check_deleted(data, [b"kept-0", b"kept-1"])


def test_a_tombstone_stays_as_long_as_the_index_of_a_lost_segment_has_its_topic(
    tmp_path: Path,
) -> None:
    log = with_a_deleted_topic(tmp_path)
    log.close()
    layout.segments(tmp_path)[0].unlink()
    log = open_log(tmp_path)
    assert list(log.frozen) == ["kept"], "its second message is lost"
    log.delete_topic("kept")
    log.create_topic("kept")
    log.append(numbered("kept", 0, 1))
    log.seal()
    log.after_handover(hand_over(tmp_path))
    log.apply_retention(0)
    log.close()
    # The first start removes the index, and the second one the tombstones.
    open_log(tmp_path).close()
    check_deleted(tmp_path, [b"kept-0"])


def with_a_topic_in_the_floor(data: Path, disk: FaultyDisk | None = None) -> FileLog:
    log = open_log(data, disk)
    log.create_topic("kept")
    log.create_topic("gone")
    log.append(numbered("gone", 0, 1))
    log.seal()
    log.after_handover(hand_over(data))
    assert list(floors.load(data) or {}) == ["gone"]
    return log


@pytest.mark.parametrize("seed", range(4))
def test_a_tombstone_stays_until_the_floor_without_its_topic_is_durable(
    tmp_path: Path, seed: int
) -> None:
    disk = FaultyDisk(seed=seed)
    log = with_a_topic_in_the_floor(tmp_path, disk)
    log.delete_topic("gone")
    # After the rename, in the fsync of the folder.
    disk.fail("fsync", errno.EIO, after=1)
    with pytest.raises(OSError, match="Input/output error"):
        log.apply_retention(0)
    disk.heal()
    log.apply_retention(0)
    assert not [path for path in layout.trash_folder(tmp_path).iterdir() if path.name.isdigit()]
    disk.crash()
    with contextlib.suppress(Exception):
        log.close()
    check_deleted(tmp_path, [])


@pytest.mark.parametrize("name", ["topic.json", "floor.json"])
@pytest.mark.parametrize("when", ["hand-over", "start"])
def test_a_topic_stays_deleted_if_its_tombstone_or_the_floor_cannot_be_read_for_a_while(
    tmp_path: Path, name: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    read = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name == name and path.parents[1].name in ("trash", "data"):
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    log = with_a_topic_in_the_floor(data)
    log.delete_topic("gone")
    with monkeypatch.context() as patch, contextlib.suppress(StorageError):
        patch.setattr(Path, "read_bytes", failing)
        if when == "hand-over":
            log.apply_retention(0)
        else:
            log.close()
            open_log(data).close()
    log.close()
    check_deleted(data, [])


def test_a_segment_that_reaches_its_age_at_the_last_moment_has_all_its_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path, durability="interval")
    log.create_topic("news")
    due = iter([False, False, True])
    monkeypatch.setattr(log._journal, "_roll_is_due", lambda: next(due, False))
    rarely = msgspec.structs.replace(log._journal._settings, fsync_interval_ms=1e6)
    monkeypatch.setattr(log._journal, "_settings", rarely)
    log.append(numbered("news", 0, 2))
    wait_until(lambda: len(log.sealed_segments()) == 1)
    log.append(numbered("news", 2, 2))
    log.close()
    assert verify(tmp_path).damages == []
    again = open_log(tmp_path)
    assert again.frozen == {} and len(values_from(again, "news", 0)) == 4
    again.close()
