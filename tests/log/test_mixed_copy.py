"""A copy of a running bus that mixes two moments: a hand-over came in between."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from log_kit import opened_log

from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log.files import FileLog
from polybus.log.history.handover import hand_over
from polybus.log.journal.floor import NAME
from polybus.log.verify.verify import verify

TOPICS = ("idle", "busy", "empty")


def opened(data: Path) -> FileLog:
    return opened_log(data, lambda: 1_700_000_000_000_000)


def pass_on(log: FileLog) -> None:
    """A hand-over, as the bus does it."""
    log.seal()
    log.after_handover(hand_over(log.data))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A data folder, and a copy: accounts/ before a hand-over, journal/ after it."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    log = opened(data)
    for topic in TOPICS:
        log.create_topic(topic)
    for value in (b"1", b"2"):
        log.append(Batch.of("idle", [value]))
        log.append(Batch.of("busy", [value]))
        log.sync()
        if value == b"1":
            pass_on(log)
            shutil.copytree(data / "accounts", copy / "accounts")
    pass_on(log)
    log.append(Batch.of("busy", [b"3"]))
    log.sync()
    shutil.copytree(data / "journal", copy / "journal")
    shutil.copyfile(data / "polybus.json", copy / "polybus.json")
    log.close()
    return data, copy


def test_topics_that_miss_rows_are_named_and_frozen(folders: tuple[Path, Path]) -> None:
    """Also a topic without a later row, which leaves no gap."""
    _, copy = folders
    lost = {(one.topic, one.first, one.last) for one in verify(copy).damages}
    assert {("idle", 1, 1), ("busy", 1, 1)} <= lost
    log = opened(copy)
    try:
        assert set(log.frozen) == {"idle", "busy"}
        assert "offsets 1 to 1" in log.frozen["idle"].text
        with pytest.raises(StorageError):
            log.append(Batch.of("idle", [b"9"]))
        log.append(Batch.of("empty", [b"goes on"]))
        log.sync()
    finally:
        log.close()


def test_the_folder_itself_is_intact(folders: tuple[Path, Path]) -> None:
    data, _ = folders
    assert verify(data).intact
    log = opened(data)
    assert log.frozen == {}
    log.delete_topic("idle")
    log.create_topic("idle")
    log.append(Batch.of("busy", [b"4"]))
    log.sync()
    pass_on(log)
    log.close()
    log = opened(data)
    assert log.frozen == {}
    log.close()


def test_a_damaged_floor_is_told_and_given_up(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    data, _ = folders
    path = data / "journal" / NAME
    path.write_bytes(path.read_bytes().replace(b"idle", b"idol"))
    log = opened(data)
    assert log.frozen == {}
    log.close()
    assert NAME in caplog.text
