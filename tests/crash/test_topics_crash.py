"""polybus.json, topic.json and the journal: topics are created, deleted and created again."""

from __future__ import annotations

from pathlib import Path

from crash_kit import Crash, Run, crashes
from opened_kit import all_messages, look_at_log, opened_log, publish

from polybus.log import disk
from polybus.log.interface import TopicSettings

MANY = ["one", "three", "two"]


def open_and_close(run: Run) -> None:
    with opened_log(run.data):
        run.acknowledge("open")


def test_a_first_start_that_is_cut_short_is_begun_again() -> None:
    for crash in crashes(open_and_close, look_at_log):
        assert crash.seen == {}, crash


def create(run: Run) -> None:
    with opened_log(run.data) as log:
        for topic in ("one", "two"):
            if topic not in log.topics():
                log.create_topic(topic)
            run.acknowledge(topic)
            publish(log, topic, f"{topic}!")
            run.acknowledge(f"{topic}!")


def check_created(crash: Crash) -> None:
    for [fact] in crash.acknowledged:
        topic = fact.rstrip("!")
        assert topic in crash.seen, crash
        assert not fact.endswith("!") or crash.seen[topic] == [fact], crash
    assert list(crash.end) == ["one", "two"], crash


def test_a_topic_is_there_when_its_creation_is_acknowledged() -> None:
    for crash in crashes(create, look_at_log):
        check_created(crash)


def create_together(run: Run) -> None:
    disk.TOGETHER_MIN = 2
    with opened_log(run.data) as log:
        missing = [topic for topic in MANY if topic not in log.topics()]
        log.create_topics(dict.fromkeys(missing, TopicSettings(retention_bytes=7)))
        run.acknowledge("created")
        for topic in missing:
            publish(log, topic, topic)
        run.acknowledge("published")


def test_of_many_topics_each_is_whole_or_not_there_and_all_are_when_acknowledged() -> None:
    for crash in crashes(create_together, settings_and_messages):
        facts = [fact for [fact] in crash.acknowledged]
        assert all(size == 7 for size, _ in crash.seen.values()), crash
        assert not facts or list(crash.seen) == MANY, crash
        if "published" in facts:
            assert crash.seen == {topic: [7, [topic]] for topic in MANY}, crash
        assert list(crash.end) == MANY, crash


def settings_and_messages(data: Path) -> object:
    with opened_log(data) as log:
        found = all_messages(log)
        return {one: [log.settings(one).retention_bytes, found[one]] for one in found}


def with_a_topic(run: Run) -> None:
    with opened_log(run.data) as log:
        for topic in ("kept", "gone"):
            log.create_topic(topic)
            publish(log, topic, "old")


def recreate(run: Run) -> None:
    with opened_log(run.data) as log:
        if "gone" in log.topics():
            log.delete_topic("gone")
            run.acknowledge("deleted")
        log.create_topic("gone")
        run.acknowledge("created")
        publish(log, "gone", "new")
        run.acknowledge("published")


def test_a_deleted_topic_never_comes_back_and_its_messages_are_nobody_elses() -> None:
    for crash in crashes(recreate, look_at_log, start=with_a_topic):
        facts = [fact for [fact] in crash.acknowledged]
        possible = [["old"], None, [], ["new"]]
        if "deleted" in facts:
            possible.remove(["old"])
        if "created" in facts:
            possible.remove(None)
        if "published" in facts:
            possible.remove([])
        assert crash.seen.get("gone") in possible, crash
        assert crash.seen["kept"] == ["old"], crash
        assert crash.end == {"gone": ["new"], "kept": ["old"]}, crash


def epochs_and_messages(data: object) -> object:
    with opened_log(data) as log:  # type: ignore[arg-type]
        epochs = {topic: log.bounds(topic).epoch for topic in log.topics()}
        return [epochs, all_messages(log)]


def recreate_twice(run: Run) -> None:
    """The clock stands still: only what is on disk keeps the epochs apart."""
    with opened_log(run.data) as log:
        log._clock = lambda: 1_000_000
        for _ in range(2):
            if "gone" in log.topics():
                run.acknowledge("delete", log.bounds("gone").epoch)
                log.delete_topic("gone")
            log.create_topic("gone")
            run.acknowledge("created", log.bounds("gone").epoch)


def test_an_epoch_is_never_given_twice() -> None:
    for crash in crashes(recreate_twice, epochs_and_messages, start=with_a_topic):
        used = [epoch for what, epoch in crash.acknowledged if what == "delete"]
        created = [epoch for what, epoch in crash.acknowledged if what == "created"]
        assert len(set(created)) == len(created), crash
        if "gone" in crash.seen[0]:
            assert crash.seen[0]["gone"] >= max(used, default=0), crash
        assert crash.end[0]["gone"] > max([*used, *created], default=0), crash


def settings_of_kept(data: object) -> object:
    with opened_log(data) as log:  # type: ignore[arg-type]
        return [log.settings("kept").retention_bytes, all_messages(log)["kept"]]


def change(run: Run) -> None:
    with opened_log(run.data) as log:
        log.change_settings("kept", TopicSettings(retention_bytes=1000))
        run.acknowledge("changed")


def test_changed_settings_are_the_old_or_the_new_and_the_new_once_acknowledged() -> None:
    for crash in crashes(change, settings_of_kept, start=with_a_topic):
        possible = [1000] if crash.acknowledged else [None, 1000]
        assert crash.seen[0] in possible, crash
        assert crash.seen[1] == ["old"], crash
        assert crash.end == [1000, ["old"]], crash
