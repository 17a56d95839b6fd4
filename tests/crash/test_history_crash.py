"""The journal, manifest.json and the history's files: hand-over, compaction, retention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crash_kit import Crash, Run, crashes
from opened_kit import look_at_log, messages, opened_log, publish

from polybus.batch import Batch
from polybus.config import Retention
from polybus.log.history import retention
from polybus.log.history.handover import compact, hand_over
from polybus.log.interface import TopicSettings

DAY_US = 86_400_000_000
EVERYTHING = {"a": ["1", "2", "3", "4"], "b": ["x"]}


def sealed(run: Run) -> None:
    with opened_log(run.data) as log:
        for topic in ("a", "b"):
            log.create_topic(topic)
        publish(log, "a", "1", "2")
        publish(log, "b", "x")
        log.seal()
        publish(log, "a", "3")
        log.seal()
        publish(log, "a", "4")


def handed_over_once(run: Run) -> None:
    """The first segment is in history: its file is small, and the next hand-over merges it."""
    with opened_log(run.data) as log:
        for topic in ("a", "b"):
            log.create_topic(topic)
        publish(log, "a", "1", "2")
        publish(log, "b", "x")
        log.seal()
        log.after_handover(hand_over(run.data, grace_s=0.0))
        publish(log, "a", "3")
        log.seal()
        publish(log, "a", "4")


def hand_all_over(run: Run) -> None:
    with opened_log(run.data) as log:
        log.after_handover(hand_over(run.data, grace_s=0.0))


def check_everything(crash: Crash) -> None:
    assert crash.seen == crash.end == EVERYTHING, crash


def test_a_hand_over_loses_and_repeats_nothing() -> None:
    for crash in crashes(hand_all_over, look_at_log, start=sealed):
        check_everything(crash)


def test_a_hand_over_that_merges_a_small_file_loses_and_repeats_nothing() -> None:
    for crash in crashes(hand_all_over, look_at_log, start=handed_over_once):
        assert crash.seen == crash.end == EVERYTHING, crash


def compact_all(run: Run) -> None:
    compact(run.data)


def test_a_compaction_loses_and_repeats_nothing() -> None:
    for crash in crashes(compact_all, look_at_log, start=handed_over_once):
        assert crash.seen == crash.end == EVERYTHING, crash


def recreated(run: Run) -> None:
    """The journal and the history have messages of an older topic of the same name."""
    handed_over_once(run)
    with opened_log(run.data) as log:
        log.delete_topic("a")
        log.create_topic("a")
        publish(log, "a", "new")
        log.seal()


def test_a_hand_over_gives_no_messages_of_an_older_topic_to_a_newer_one() -> None:
    for crash in crashes(hand_all_over, look_at_log, start=recreated):
        assert crash.seen == crash.end == {"a": ["new"], "b": ["x"]}, crash


def delete_topic(run: Run) -> None:
    with opened_log(run.data) as log:
        if "a" in log.topics():
            log.delete_topic("a")
            run.acknowledge("deleted")


def test_a_deletion_takes_the_history_too_or_leaves_all_of_it() -> None:
    for crash in crashes(delete_topic, look_at_log, start=handed_over_once):
        left = {"b": ["x"]}
        assert crash.seen == left or (not crash.acknowledged and crash.seen == EVERYTHING), crash
        assert crash.end == left, crash


def five_days(run: Run) -> None:
    """One history file per day, the newest message in the journal."""
    with opened_log(run.data) as log:
        log.create_topic("a")
        for day in range(5):
            batch = Batch.of("a", [str(day).encode()])
            batch.timestamp_us = (day + 1) * DAY_US
            log.append(batch)
            log.sync()
            if day < 4:
                log.seal()
        log.after_handover(hand_over(run.data, grace_s=0.0))


def keep_two_days(run: Run) -> None:
    with opened_log(run.data):
        retention.apply(
            run.data,
            {"a": TopicSettings()},
            Retention(age_s=2.5 * 86_400),
            now_us=5 * DAY_US,
        )


def start_and_messages(data: Path) -> Any:
    with opened_log(data) as log:
        return [log.bounds("a").start, messages(log, "a")]


def test_retention_removes_whole_files_from_the_oldest_on() -> None:
    for crash in crashes(keep_two_days, start_and_messages, start=five_days):
        start, seen = crash.seen
        assert seen == ["0", "1", "2", "3", "4"][start:], crash
        assert start in (0, 2), crash
        assert crash.end == [2, ["2", "3", "4"]], crash
