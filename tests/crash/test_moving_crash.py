"""Topics that are copied into a data folder are whole, or a start says that they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crash_kit import Crash, Run, crashes
from opened_kit import all_messages, opened_log, publish

from polybus.errors import StorageError, UsageError
from polybus.log.copying import FilesTarget, check_copied, copy_topic
from polybus.log.interface import TopicSettings

WHOLE = {"a": ["1", "2", "3"], "b": ["4"]}


def prepare(run: Run) -> None:
    for name in ("source", "target"):
        (run.data / name).mkdir()
        with opened_log(run.data / name) as log:
            if name == "source":
                log.create_topics({"a": TopicSettings(), "b": TopicSettings()})
                publish(log, "a", "1", "2", "3")
                publish(log, "b", "4")


def copy(run: Run) -> None:
    """What `polybus migrate` does."""
    data = run.data / "target"
    run.pause()
    with opened_log(run.data / "source") as source, opened_log(data) as log:
        run.resume()
        target = FilesTarget(data, log)
        target.begin({topic: source.bounds(topic) for topic in WHOLE})
        for topic in WHOLE:
            copy_topic(topic, source, target)
        target.finish(list(WHOLE))
        run.acknowledge("copied")
        run.pause()


def copy_again(run: Run) -> None:
    try:
        copy(run)
    except UsageError as error:
        # The first copy was complete.
        assert error.code == "topic.exists", error


def look(data: Path) -> Any:
    try:
        check_copied(data / "target")
    except StorageError as error:
        return error.code
    with opened_log(data / "target") as log:
        return all_messages(log)


def check_copy(crash: Crash) -> None:
    """Nothing was copied yet, all of it was, or the bus does not start."""
    assert crash.seen in ({}, WHOLE, "migrate.incomplete"), crash
    if crash.acknowledged:
        assert crash.seen == WHOLE, crash
    assert crash.end == WHOLE, crash


def test_a_copy_that_was_killed_before_any_write_is_refused_or_whole_and_can_be_ended() -> None:
    seen = set()
    for crash in crashes(copy, look, start=prepare, proceed=copy_again, verified=False):
        check_copy(crash)
        seen.add(str(crash.seen))
    assert len(seen) == 3


def test_a_topic_that_was_deleted_in_the_source_keeps_no_bus_from_starting(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    data = tmp_path / "target"
    data.mkdir()
    with opened_log(tmp_path / "source") as source, opened_log(data) as log:
        for topic in WHOLE:
            source.create_topic(topic)
        FilesTarget(data, log).begin({topic: source.bounds(topic) for topic in WHOLE})
        source.delete_topic("b")
        target = FilesTarget(data, log)
        target.begin({"a": source.bounds("a")})
        copy_topic("a", source, target)
        # This topic alone was chosen.
        target.finish(["a"])
        with pytest.raises(StorageError):
            check_copied(data)
        target.begin({"a": source.bounds("a")})
        copy_topic("a", source, target)
        target.finish()
    check_copied(data)
