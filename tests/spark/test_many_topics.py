"""What a micro-batch and a look at the lag cost does not grow with topics that have nothing new."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from source_kit import WrittenLog, offsets_of, source_options, written_log

from polybus import structs
from polybus.errors import StorageError, UsageError
from polybus.log import layout
from polybus.log.history.manifest import Manifest
from polybus.log.reading import folder
from polybus.log.reading import reader as log_reader
from polybus.log.reading.folder import TopicNotes
from polybus.spark.pipelines.lag import LogEnds
from polybus.spark.source.readers import PolybusStreamReader

MANY = 300
_opened: list[str] = []
_counted_thread = [0]


def _note_open(event: str, details: tuple[Any, ...]) -> None:
    # Threads of Spark and of other tests open files, too.
    if event == "open" and _counted_thread[0] == threading.get_ident():
        _opened.append(str(details[0]))


sys.addaudithook(_note_open)


def opens(work: Callable[[], object]) -> list[str]:
    """The files that Python opens while it works."""
    _opened.clear()
    _counted_thread[0] = threading.get_ident()
    try:
        work()
    finally:
        _counted_thread[0] = 0
    # The note of the running bus is read again after some time, whatever a batch does.
    return sorted(name for path in _opened if (name := Path(path).name) != "run.json")


def filled(log: WrittenLog, topics: int) -> list[str]:
    names = [f"t{number}" for number in range(topics)]
    log.create(*names)
    for name in names:
        log.append(name, 1)
    return names


def opens_of_a_batch(data: Path, topics: int) -> list[str]:
    """What a micro-batch opens that reads ten messages of one topic, and a look at the lag."""
    with written_log(data) as log:
        names = filled(log, topics)
        options = source_options(
            log.data,
            streaming=True,
            subscribePattern="t.*",
            startingOffsets="earliest",
            failOnDamage="false",
        )
        reader, ends, limit = PolybusStreamReader(options), LogEnds(log.data), ReadAllAvailable()
        start = reader.latestOffset(reader.initialOffset(), limit)
        ends.look(names)
        log.append("t0", 10)

        def run() -> None:
            end = reader.latestOffset(start, limit)
            assert len(offsets_of(reader, reader.partitions(start, end))) == 10
            reader.reportLatestOffset()
            ends.look(names)
            assert ends.behind(dict.fromkeys(names, 1)) == 10

        return opens(run)


def test_a_batch_opens_the_same_files_among_few_and_many_topics(tmp_path: Path) -> None:
    few = opens_of_a_batch(tmp_path / "few", 1)
    assert few, "opens are counted"
    assert opens_of_a_batch(tmp_path / "many", MANY) == few


def test_a_batch_converts_the_offsets_of_topics_with_messages_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[int] = []

    def counted(found: Any, kind: Any) -> Any:
        converted.append(len(found["topics"]))
        return structs.convert(found, kind)

    with written_log(tmp_path / "data") as log:
        names = filled(log, MANY)
        options = source_options(log.data, streaming=True, subscribePattern="t.*")
        reader, limit = PolybusStreamReader(options), ReadAllAvailable()
        start = reader.initialOffset()
        log.append("t7", 10)
        monkeypatch.setattr("polybus.spark.checkpoint.convert", counted)
        assert reader.latestOffset(reader.reportLatestOffset(), limit)["topics"].keys() == {*names}
        assert converted == [0]
        end = reader.latestOffset(start, limit)
        assert offsets_of(reader, reader.partitions(start, end)) == [
            ("t7", n) for n in range(1, 11)
        ]
        assert converted == [0, 1, 1, 1]
        assert list(end["topics"]) == list(start["topics"])
        joined = {"topics": {"t7": end["topics"]["t7"] | {"from": 4}}}
        assert offsets_of(reader, reader.partitions(joined, joined)) == [
            ("t7", n) for n in range(4, 11)
        ]
        for broken in ({"logOffset": 3}, {"topics": [1]}, {"topics": {"t7": 5}}):
            with pytest.raises(UsageError, match=r"spark\.checkpoint"):
                reader.latestOffset(broken, limit)
            with pytest.raises(UsageError, match=r"spark\.checkpoint"):
                reader.partitions(start, broken)


def looks(log: WrittenLog, reader: PolybusStreamReader, start: dict[str, Any]) -> list[str]:
    """The topics whose notes a look for messages reads, after one message in one topic."""
    log.append("t0", 1)
    looked: list[str] = []
    manifest = TopicNotes.manifest

    def noted(self: TopicNotes, topic: str) -> Manifest:
        looked.append(topic)
        return manifest(self, topic)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TopicNotes, "manifest", noted)
        assert reader.latestOffset(start, ReadAllAvailable()) != start
    return looked


def test_a_look_for_messages_looks_at_the_topics_that_have_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "KNOWN_S", 3600.0)
    monkeypatch.setattr(folder, "SETTLED_NS", 0)
    with written_log(tmp_path / "data") as log:
        filled(log, MANY)
        options = source_options(
            log.data, streaming=True, subscribePattern="t.*", startingOffsets="earliest"
        )
        reader = PolybusStreamReader(options)
        start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        assert looks(log, reader, start) == ["t0"]
        # Of topics that were created, and after a hand-over, nothing is known.
        log.create("t-new")
        assert len(looks(log, reader, start)) == MANY + 1
        assert looks(log, reader, start) == ["t0"]
        log.hand_over()
        assert len(looks(log, reader, start)) == MANY + 1
        log.recreate("t1")
        with pytest.raises(UsageError, match="'t1' was deleted and created again"):
            looks(log, reader, start)


def test_what_is_known_of_topics_is_not_believed_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "KNOWN_S", -1.0)
    monkeypatch.setattr(folder, "SETTLED_NS", 0)
    with written_log(tmp_path / "data") as log:
        names = filled(log, MANY)
        reader = log_reader.LogReader(log.data)
        assert len(reader.all_bounds(names)) == MANY
        note = layout.topic_folder(log.data, "t1") / "topic.json"
        note.write_bytes(b"damaged")
        with pytest.raises(StorageError, match="topic.json"):
            reader.all_bounds(names)
