"""A journal segment and its index: what is published is there, in order, once."""

from __future__ import annotations

from crash_kit import Crash, Run, crashes
from opened_kit import look_at_log, opened_log, publish

from polybus.log.layout import index_path, segments


def with_topics(run: Run) -> None:
    with opened_log(run.data) as log:
        for topic in ("a", "b"):
            log.create_topic(topic)


def publish_and_seal(run: Run) -> None:
    with opened_log(run.data) as log:
        for number in range(3):
            publish(log, "a", f"{number}.1", f"{number}.2")
            run.acknowledge("a", f"{number}.1", f"{number}.2")
            publish(log, "b", f"{number}")
            run.acknowledge("b", f"{number}")
            if number == 1:
                log.seal()


def check_published(crash: Crash) -> None:
    for topic, per_batch in (("a", 2), ("b", 1)):
        acknowledged = [
            value for name, *values in crash.acknowledged for value in values if name == topic
        ]
        seen = crash.seen[topic]
        everything = ["0.1", "0.2", "1.1", "1.2", "2.1", "2.2"] if topic == "a" else ["0", "1", "2"]
        assert seen[: len(acknowledged)] == acknowledged, crash
        assert seen == everything[: len(seen)], crash
        assert len(seen) % per_batch == 0, crash
        assert crash.end[topic] == seen + everything, crash


def test_acknowledged_messages_are_there_once_and_in_order() -> None:
    for crash in crashes(publish_and_seal, look_at_log, start=with_topics):
        check_published(crash)


def with_a_torn_write(run: Run) -> None:
    """What a power cut leaves: an index that lacks commits, and half a commit behind them."""
    with_topics(run)
    with opened_log(run.data) as log:
        publish(log, "a", "1", "2")
        publish(log, "b", "1")
    segment = segments(run.data)[-1]
    content = segment.read_bytes()
    segment.write_bytes(content + content[-200:-100])
    index_path(segment).write_bytes(index_path(segment).read_bytes()[:-7])


def open_log(run: Run) -> None:
    with opened_log(run.data):
        run.acknowledge("open")


def test_a_recovery_that_is_cut_short_is_done_again() -> None:
    for crash in crashes(open_log, look_at_log, start=with_a_torn_write):
        assert crash.seen == {"a": ["1", "2"], "b": ["1"]}, crash
