"""A journal segment that is gone while its index is still there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from log_kit import opened_log

from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log.files import FileLog
from polybus.log.history.handover import hand_over
from polybus.log.interface import LogCallbacks
from polybus.log.layout import index_path, orphan_indexes, segments
from polybus.log.verify.verify import verify


def opened(data: Path, callbacks: LogCallbacks | None = None) -> FileLog:
    return opened_log(data, lambda: time.time_ns() // 1000, callbacks)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    log = opened(tmp_path)
    for topic in ("lost", "kept"):
        log.create_topic(topic)
    log.append(Batch.of("lost", [b"1", b"2"]))
    log.sync()
    log.close()
    return tmp_path


def test_its_topics_are_frozen_and_verify_names_their_offsets(data: Path) -> None:
    segments(data)[-1].unlink()
    damages = verify(data).damages
    assert [(one.topic, one.first, one.last) for one in damages] == [("lost", 0, 1)]
    log = opened(data)
    try:
        assert set(log.frozen) == {"lost"}
        with pytest.raises(StorageError, match="is missing"):
            log.bounds("lost")
        assert log.bounds("kept").stop == 0
    finally:
        log.close()
    assert verify(data).damages == damages, "a start does not hide it"


def test_damage_is_reported_only_if_it_is_found_after_the_log_was_opened(data: Path) -> None:
    segment = segments(data)[-1]
    content = segment.read_bytes()
    reported: list[str] = []
    segment.unlink()
    log = opened(data, LogCallbacks(on_frozen=reported.append))
    assert set(log.frozen) == {"lost"} and not reported
    log.close()
    segment.write_bytes(content)
    log = opened(data, LogCallbacks(on_frozen=reported.append))
    assert not log.frozen
    segment.write_bytes(bytes(len(content)))
    with pytest.raises(StorageError, match="log.damaged"):
        log.read("lost", 0)
    assert set(log.frozen) == {"lost"} and reported == ["lost"]
    log.close()


def test_an_index_that_a_hand_over_left_is_removed(data: Path) -> None:
    log = opened(data)
    log.seal()
    log.close()
    [segment] = hand_over(data)
    segment.unlink()
    assert orphan_indexes(data) == [index_path(segment)]
    assert verify(data).intact
    log = opened(data)
    assert not log.frozen
    log.close()
    assert not orphan_indexes(data)
