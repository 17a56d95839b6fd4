"""FileLog keeps the Log's promises; the journal on disk is what it says it is."""

from __future__ import annotations

import contextlib
import itertools
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from log_contract import LogContract, OpenLog, numbered, values_from

from polybus import config
from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log import columns, layout
from polybus.log.files import FileLog
from polybus.log.history.handover import hand_over
from polybus.log.interface import LogCallbacks
from polybus.log.journal import committer
from polybus.log.journal.segment import Segment
from polybus.log.journal.topics import REREAD_BYTES_MAX
from polybus.log.reading.reader import LogReader
from polybus.log.verify.verify import verify
from polybus.testing import ManualClock

Durability = Literal["fsync", "interval"]
Opener = Callable[..., FileLog]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Opens the log of the test's data directory; closes at the end what the test left open."""
    clock = ManualClock()
    opened: list[FileLog] = []

    def open_log(
        durability: Durability = "fsync",
        callbacks: LogCallbacks | None = None,
        **settings: Any,
    ) -> FileLog:
        log = FileLog(
            tmp_path / "data",
            durability=durability,
            journal=config.Journal(**{"fsync_interval_ms": 10.0, **settings}),
            retention=config.Retention(),
            clock=clock,
            callbacks=callbacks,
            maintenance=False,
        )
        opened.append(log)
        return log

    yield open_log
    for log in opened:
        with contextlib.suppress(StorageError):
            log.close()


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


class FileLogContract(LogContract):
    durability: Durability

    @pytest.fixture
    def open_log(self, opener: Opener, callbacks: LogCallbacks) -> OpenLog:
        return lambda: opener(self.durability, callbacks)


class TestFsync(FileLogContract):
    durability = "fsync"


class TestInterval(FileLogContract):
    durability = "interval"


class TestTinySegments(FileLogContract):
    """The same promises when every commit rolls the segment."""

    durability = "fsync"

    @pytest.fixture
    def open_log(self, opener: Opener, callbacks: LogCallbacks) -> OpenLog:
        return lambda: opener("fsync", callbacks, segment_bytes_max=1000)


class TestHandedOver(FileLogContract):
    """The same promises when every sync moves all there is into history."""

    durability = "fsync"

    @pytest.fixture
    def open_log(self, opener: Opener, callbacks: LogCallbacks) -> OpenLog:
        def open_log() -> FileLog:
            log = opener("fsync", callbacks)
            sync = log.sync

            def sync_and_hand_over() -> None:
                sync()
                log.seal()
                log.after_handover(hand_over(log.data))

            log.sync = sync_and_hand_over  # type: ignore[method-assign]
            return log

        return open_log


def read_stream(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


@pytest.mark.slow
def test_small_commits_that_were_read_are_counted_with_what_arrow_takes(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polybus.log.journal.topics.RECENT_BYTES_MAX", 0)
    log = opener()
    log.create_topic("a")
    for number in range(1000):
        log.append(numbered("a", number, 1))
        log.sync()
    offset = reads = 0
    while offset < 1000:
        found = log.read("a", offset, bytes_max=1 << 30)
        assert len(found) <= 256
        offset = found[-1].last_offset + 1
        reads += 1
    assert reads > 1
    kept = len(log._shared._reread._kept)
    assert 0 < kept * columns.STORED_OVERHEAD_BYTES <= REREAD_BYTES_MAX


def test_plain_pyarrow_reads_a_live_segment_and_a_sealed_one(opener: Opener) -> None:
    log = opener()
    log.create_topic("a")
    log.append(numbered("a", 0, 3))
    log.sync()
    (live,) = layout.segments(log.data)
    assert read_stream(live)["value"].to_pylist() == [b"a-0", b"a-1", b"a-2"]
    log.append(numbered("a", 3, 1))
    log.seal()
    (sealed,) = log.sealed_segments()
    assert sealed == live
    assert read_stream(sealed)["offset"].to_pylist() == [0, 1, 2, 3]
    assert read_stream(layout.segments(log.data)[-1]).num_rows == 0


def test_one_commit_holds_all_topics_that_waited_their_rows_grouped(opener: Opener) -> None:
    log = opener(commit_delay_ms=200.0)
    for topic in "abc":
        log.create_topic(topic)
    for number in range(5):
        for topic in "abc":
            log.append(numbered(topic, number, 1))
    log.sync()
    (entry,) = Segment(layout.segments(log.data)[0]).entries
    assert [(rows.topic, rows.first_row, rows.row_count) for rows in entry.topics] == [
        ("a", 0, 5), ("b", 5, 5), ("c", 10, 5),
    ]  # fmt: skip


def test_an_append_after_the_delay_begins_the_commit(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer comes later, so that a commit follows a delivery and does not meet one."""
    monkeypatch.setattr(committer, "GRACE", 1e9)
    log = opener(commit_delay_ms=5.0)
    log.create_topic("a")
    log.append(numbered("a", 0, 1))
    for number in itertools.count(1):
        if log.durable:
            break
        log.append(numbered("a", number, 1))
        time.sleep(0.001)


def test_segments_roll_by_size_and_commit_numbers_go_on(opener: Opener) -> None:
    log = opener(segment_bytes_max=5000)
    log.create_topic("a")
    for number in range(20):
        log.append(numbered("a", number, 1))
        log.sync()
    paths = layout.segments(log.data)
    assert len(paths) > 2
    numbers = [entry.commit for path in paths for entry in Segment(path).entries]
    assert numbers == list(range(1, 21))
    assert [layout.first_commit_of(path) for path in paths] == sorted(
        layout.first_commit_of(path) for path in paths
    )
    assert all(Segment(path).sealed for path in paths[:-1])


def test_a_quiet_segment_is_sealed_by_its_age_and_an_empty_one_never(opener: Opener) -> None:
    log = opener(segment_age_s=0.05)
    log.create_topic("a")
    log.append(numbered("a", 0, 1))
    wait_until(lambda: len(log.sealed_segments()) == 1)
    log.append(numbered("a", 1, 1))
    wait_until(lambda: len(log.sealed_segments()) == 2)
    with pytest.raises(AssertionError):
        wait_until(lambda: len(log.sealed_segments()) == 3, timeout_s=0.2)


def test_a_reopened_log_goes_on_in_its_last_segment(opener: Opener) -> None:
    for number in range(3):
        log = opener()
        if not number:
            log.create_topic("a")
        log.append(numbered("a", number, 1))
        log.close()
    log = opener()
    assert len(layout.segments(log.data)) == 1
    assert values_from(log, "a", 0) == [b"a-0", b"a-1", b"a-2"]


def test_handed_over_segments_are_deleted_and_offsets_go_on_from_the_manifest(
    opener: Opener,
) -> None:
    log = opener()
    log.create_topic("a")
    log.append(numbered("a", 0, 5))
    log.seal()
    log.after_handover(hand_over(log.data))
    assert log.sealed_segments() == []
    assert len(layout.segments(log.data)) == 1
    log.close()
    log = opener()
    assert log.bounds("a").stop == 5
    log.append(numbered("a", 5, 1))
    assert values_from(log, "a", 0) == [b"a-%d" % n for n in range(6)]


def test_a_segment_that_is_not_in_history_is_never_deleted(opener: Opener) -> None:
    log = opener()
    log.create_topic("a")
    log.append(numbered("a", 0, 5))
    log.seal()
    log.after_handover(log.sealed_segments())
    assert len(log.sealed_segments()) == 1
    assert values_from(log, "a", 0) == [b"a-%d" % n for n in range(5)]


def test_rows_of_a_deleted_topic_are_not_seen_by_its_successor_after_a_restart(
    opener: Opener,
) -> None:
    log = opener()
    log.create_topic("a")
    log.append(numbered("a", 0, 5))
    log.sync()
    log.delete_topic("a")
    bounds = log.create_topic("a")
    log.close()
    log = opener()
    assert log.bounds("a") == bounds
    log.seal()
    log.after_handover(hand_over(log.data))
    log.apply_retention(0)
    assert not list((log.data / "trash").glob("*"))


def test_a_second_bus_on_the_same_data_is_refused(opener: Opener) -> None:
    opener()
    with pytest.raises(StorageError) as caught:
        opener()
    assert caught.value.code == "log.locked"


def test_data_of_a_newer_format_is_refused(opener: Opener) -> None:
    log = opener()
    log.close()
    (log.data / "polybus.json").write_text('{"format": 2}')
    with pytest.raises(StorageError) as caught:
        opener()
    assert caught.value.code == "log.format"


def test_pending_bytes_counts_what_is_held_and_comes_back_to_zero(opener: Opener) -> None:
    log = opener(commit_delay_ms=60_000.0, commit_bytes=1 << 30)
    log.create_topic("a")
    log.append(Batch.of("a", [b"x" * 1000] * 10))
    assert log.pending_bytes >= 10_000
    log.sync()
    assert log.pending_bytes == 0


def test_recent_messages_are_served_from_memory_and_old_ones_are_not(opener: Opener) -> None:
    log = opener()
    log.create_topic("a")
    for _ in range(20):
        log.append(Batch.of("a", [b"x" * (1 << 20)]))
        log.sync()
    assert log.read_recent("a", 0) is None
    recent = log.read_recent("a", 18)
    assert recent is not None
    assert [batch.first_offset for batch in recent] == [18, 19]


def test_a_recent_message_counts_with_all_of_the_read_it_came_in(opener: Opener) -> None:
    log = opener()
    log.create_topic("a")
    log.create_topic("b")
    for number in range(10):
        read = memoryview(bytearray(2 << 20))
        for topic in ("a", "b"):
            log.append(Batch(topic, read[:10], array("i", [0, 3, 3, 10])))
        del read
        log.sync()
        assert log.read_recent("a", number * 2) is not None
    assert log.read_recent("a", 0) is None
    for topic in ("a", "b"):
        kept = [offset for offset in range(20) if log.read_recent(topic, offset) is not None]
        assert len(kept) in (6, 8)
    assert values_from(log, "b", 0) == [bytes(3), bytes(7)] * 10


def test_what_readers_make_of_recent_messages_is_not_kept_with_them(opener: Opener) -> None:
    log = opener()
    log.create_topic("a")
    batch = numbered("a", 0, 3)
    batch.carry_encoding("test", b"as it came")
    log.append(batch)
    log.sync()
    for _ in range(2):
        made = []
        for read in (log.read("a", 0), log.read_recent("a", 0) or []):
            made += [one.encoded("test", lambda _: b"made anew") for one in read]
        assert made == [b"made anew"] * 2


def test_many_small_recent_batches_are_left_to_a_slower_read(opener: Opener) -> None:
    log = opener()
    log.create_topic("a")
    for number in range(2000):
        log.append(numbered("a", number, 1))
    assert log.read_recent("a", 0) is None
    assert [batch.first_offset for batch in log.read_recent("a", 1990) or []] == list(
        range(1990, 2000)
    )


def test_a_message_of_a_hundred_megabytes_is_one_commit(opener: Opener) -> None:
    log = opener()
    log.create_topic("a")
    log.append(Batch.of("a", [bytes(100 << 20)]))
    log.append(numbered("a", 1, 1))
    log.sync()
    assert len(log.read("a", 0, bytes_max=1)[0].value(0)) == 100 << 20
    assert values_from(log, "a", 1) == [b"a-1"]


def test_a_topic_of_an_account_has_its_folder_and_its_account_in_every_row(
    tmp_path: Path, opener: Opener
) -> None:
    """Also after a restart; a name with a slash alone makes no account."""
    data = tmp_path / "data"
    (data / "accounts" / "shop").mkdir(parents=True)
    for start in range(2):
        log = opener()
        for topic in ("news", "shop/news", "other/news"):
            if start == 0:
                log.create_topic(topic)
            log.append_all([Batch.of(topic, [b"x", b"y"])])
        log.sync()
        log.close()
    folders = {path.parent.relative_to(data) for path in data.glob("accounts/*/topics/*/*")}
    assert folders == {
        Path("accounts/default/topics/news"),
        Path("accounts/default/topics/other%2Fnews"),
        Path("accounts/shop/topics/news"),
    }
    reader = LogReader(data)
    owners = {"news": "default", "other/news": "default", "shop/news": "shop"}
    assert set(reader.topics()) == set(owners)
    for topic, owner in owners.items():
        rows = [row for piece in rows_in(data) for row in piece if row["topic"] == topic]
        assert [row["account"] for row in rows] == [owner] * 4
    assert verify(data).damages == []


def rows_in(data: Path) -> list[list[dict[str, object]]]:
    """The rows of every commit in the journal."""
    found = []
    for segment in layout.segments(data):
        with pa.OSFile(str(segment)) as file, pa.ipc.open_stream(file) as stream:
            found += [batch.to_pylist() for batch in stream]
    return found
