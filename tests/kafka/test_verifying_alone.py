"""verify over a Kafka that answers as told: what no broker does on demand."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log.cluster_location import ClusterLocation
from polybus.log.interface import SHARED
from polybus.log.kafka import verifying
from polybus.log.kafka.fetch_session import Followed
from polybus.log.kafka.kafka_names import REGISTRY
from polybus.log.kafka.link import EARLIEST, LATEST, KafkaLink
from polybus.log.kafka.metadata import PartitionState
from polybus.log.kafka.record_batch import encode_batch
from polybus.log.kafka.registry import TopicRecord
from polybus.log.verify.verify import VerifyReport

Page = bytes | Exception


def stored(first: int, *values: bytes, topic: str = "t") -> bytes:
    """A RecordBatch as the brokers have it, at an offset."""
    batch = Batch.of(topic, list(values))
    batch.protocol, batch.timestamp_us = "goms", 1_000
    return struct.pack(">q", first) + encode_batch([batch])[8:]


def changed(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def record(topic: str, kafka_id: bytes, *, epoch: int = 1, deleted: bool = False) -> bytes:
    return msgspec.json.encode(TopicRecord(topic, epoch, kafka_id.hex(), deleted=deleted))


class ToldLink:
    """Topics, each with a begin, an end and what a fetch at each offset gives."""

    def __init__(self) -> None:
        self.partitions: dict[str, PartitionState] = {}
        self.ends: dict[str, int] = {}
        self.pages: dict[str, dict[int, Page]] = {}
        self.silent: set[str] = set()
        """Topics whose leader does not answer."""
        self.fetches = 0
        self.config_error = 0
        self.on_refresh: list[Callable[[], None]] = []
        self.on_fetch: dict[str, Callable[[], None]] = {}
        self.put(SHARED, 0)
        self.put(REGISTRY, 0)

    def put(self, name: str, end: int, pages: dict[int, Page] | None = None) -> bytes:
        topic_id = len(self.partitions).to_bytes(16)
        self.partitions[name] = PartitionState(topic_id, 1, 1)
        self.ends[name], self.pages[name] = end, pages or {}
        return topic_id

    def register(self, *values: bytes) -> None:
        first = self.ends[REGISTRY]
        self.pages[REGISTRY][first] = stored(first, *values, topic=REGISTRY)
        self.ends[REGISTRY] += len(values)

    def topic(self, name: str, end: int, pages: dict[int, Page]) -> None:
        self.register(record(name, self.put(name, end, pages)))

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 0) -> Any:
        return asyncio.run(work)

    async def refreshed(self, tries: int = 0) -> None:
        if self.on_refresh:
            self.on_refresh.pop(0)()

    async def offsets_known(self, names: list[str], when: int) -> tuple[dict[str, int], set[str]]:
        silent = {name for name in names if name in self.silent}
        known = [name for name in names if name in self.partitions and name not in silent]
        return {name: 0 if when == EARLIEST else self.ends[name] for name in known}, silent

    async def ask(self, request: Any) -> Any:
        names = [name for _, name, _ in request.resources]
        return SimpleNamespace(resources=[(self.config_error, "", 2, one, []) for one in names])

    async def fetch(self, _: Any, one: Followed, at: int, *_limits: Any) -> tuple[bytes, list[Any]]:
        self.fetches += 1
        assert self.fetches < 10_000, "it fetches forever"
        if one.name in self.on_fetch:
            self.on_fetch.pop(one.name)()
        page = self.pages[one.name].get(at, b"")
        if isinstance(page, Exception):
            raise page
        return page, []


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> ToldLink:
    found = ToldLink()
    monkeypatch.setattr(verifying, "shared_link", lambda _: found)
    monkeypatch.setattr(verifying, "fetch_bytes", found.fetch)
    monkeypatch.setattr(verifying, "DescribeConfigsRequest", Asked)
    monkeypatch.setattr(verifying, "LEADER_S", 0.0)
    return found


class Asked:
    def __init__(self, resources: list[Any]) -> None:
        self.resources = resources


def check() -> VerifyReport:
    place = ClusterLocation(log="kafka://127.0.0.1:1")
    return verifying.ClusterCheck(place, lambda topic, batch: (), None).run()


def said(report: VerifyReport) -> list[tuple[str | None, str, int | None, int | None]]:
    return [(one.topic, one.reason, one.first, one.last) for one in report.damages]


SILENT = StorageError("log.unreachable", "Kafka's leader does not answer")


def test_a_topic_is_read_to_the_end_that_it_had(link: ToldLink) -> None:
    link.topic("t", 2, {0: stored(0, b"a"), 1: stored(1, b"b")})
    report = check()
    assert (report.intact, report.messages, report.notes) == (True, 2, [])


@pytest.mark.parametrize("page", [b"", SILENT], ids=["empty", "out of range"])
def test_a_topic_that_was_recreated_meanwhile_does_not_stop_the_check(
    link: ToldLink, page: Page
) -> None:
    link.topic("t", 9, {0: stored(0, b"a"), 1: page})
    link.topic("u", 1, {0: stored(0, b"b")})
    link.on_fetch["t"] = lambda: link.partitions.update(t=PartitionState(b"another", 1, 1))
    report = check()
    assert (report.intact, report.messages) == (True, 2)
    assert report.notes == ["topic 't' was recreated meanwhile"]


@pytest.mark.parametrize("page", [b"", SILENT], ids=["empty", "out of range"])
def test_a_topic_that_has_lost_its_end_is_named(link: ToldLink, page: Page) -> None:
    link.topic("t", 9, {0: stored(0, b"a"), 1: page})
    link.topic("u", 1, {0: stored(0, b"b")})
    link.on_fetch["t"] = lambda: link.ends.update(t=1)
    report = check()
    ((topic, reason, *offsets),) = said(report)
    assert (topic, *offsets, report.messages) == ("t", 1, 8, 2)
    assert "its end is missing" in reason


def test_a_leader_that_is_behind_for_a_while_is_asked_again(
    link: ToldLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "LEADER_S", 60.0)
    link.topic("t", 2, {0: stored(0, b"a")})

    def catch_up() -> None:
        link.ends["t"] = 2
        link.pages["t"][1] = stored(1, b"b")

    link.on_fetch["t"] = lambda: link.ends.update(t=1)
    link.on_refresh = [lambda: None, lambda: None, catch_up]
    report = check()
    assert (report.intact, report.messages) == (True, 2)


def test_offsets_for_which_kafka_has_nothing_are_named(link: ToldLink) -> None:
    link.topic("t", 2, {0: stored(0, b"a")})
    ((_, reason, *offsets),) = said(check())
    assert offsets == [1, 1]
    assert "no messages" in reason


def test_a_topic_without_a_leader_is_named_and_the_others_are_checked(link: ToldLink) -> None:
    link.topic("t", 9, {})
    link.topic("u", 1, {0: stored(0, b"b")})
    link.silent = {"t", SHARED}
    report = check()
    assert [(topic, reason) for topic, reason, *_ in said(report)] == [
        (SHARED, verifying.NO_LEADER),
        ("t", verifying.NO_LEADER),
    ]
    assert report.messages == 1


def test_a_topic_that_loses_its_leader_meanwhile_is_named(link: ToldLink) -> None:
    link.topic("t", 9, {0: stored(0, b"a"), 1: SILENT})
    link.topic("u", 1, {0: stored(0, b"b")})
    link.on_fetch["t"] = lambda: link.silent.add("t")
    report = check()
    assert said(report) == [("t", verifying.NO_LEADER, 1, 8)]
    assert report.messages == 2


def test_topics_that_are_not_known_are_a_damage(link: ToldLink) -> None:
    link.silent = {REGISTRY}
    report = check()
    assert {topic for topic, *_ in said(report)} == {REGISTRY}


async def test_offsets_of_a_topic_without_a_leader_do_not_keep_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polybus.log.kafka.link.ANSWER_TIMEOUT_S", 0.0)

    class OneLeader:
        loop = asyncio.get_running_loop()
        partitions = {"t": None, "u": 1}
        leader_of = partitions.get

        async def send(self, *_: object) -> Any:
            return SimpleNamespace(topics=[("u", [(0, 0, 0, 7)])])

        async def refreshed(self, tries: int) -> None:
            pass

        offsets_known = KafkaLink.offsets_known

    link = cast(KafkaLink, OneLeader())
    assert await KafkaLink.offsets_known(link, ["t", "u", "gone"], LATEST) == ({"u": 7}, {"t"})
    with pytest.raises(StorageError, match="no leader for"):
        await KafkaLink.offsets(link, ["t", "u"], LATEST)


BASE, LENGTH, FORMAT, LAST_DELTA = 0, 8, 16, 23
"""Where they are in the header of a RecordBatch."""


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (BASE, struct.pack(">q", 1 << 40)),
        (BASE, struct.pack(">q", -9)),
        (LENGTH, struct.pack(">i", 36)),
        (LENGTH, struct.pack(">i", 1 << 20)),
        (FORMAT, b"\x07"),
        (LAST_DELTA, struct.pack(">i", 1 << 30)),
        (LAST_DELTA, struct.pack(">i", 2)),
        (LAST_DELTA, struct.pack(">i", -1)),
    ],
)
@pytest.mark.parametrize("first", [0, 2], ids=["begins the page", "in the page"])
def test_a_damaged_header_hides_nothing_behind_its_record_batch(
    link: ToldLink, at: int, value: bytes, first: int
) -> None:
    """A fetch at each offset gives all that is stored from there on, as Kafka does."""
    batches = [stored(one, b"a", b"b") for one in range(0, 10, 2)]
    batches[first // 2] = changed(batches[first // 2], at, value)
    link.topic("t", 10, {one: b"".join(batches[one // 2 :]) for one in range(10)})
    report = check()
    damages = said(report)
    assert damages and report.messages == 8, damages
    for topic, _, begin, end in damages:
        assert topic == "t" and begin is not None and end is not None
        # What repeats is named by its own offsets, which are wrong.
        assert end < 0 or (begin, end) == (first, first + 1), damages


def test_the_last_offset_of_a_damage_is_in_the_topic(link: ToldLink) -> None:
    link.topic("t", 2, {0: changed(stored(0, b"a", b"b"), LAST_DELTA, b"\x7f")})
    ((_, _, *offsets),) = said(check())
    assert offsets == [0, 1]


def test_what_is_behind_the_end_of_a_compacted_topic_is_no_damage(
    link: ToldLink,
) -> None:
    """Compaction has removed the last records of the check; newer ones have come."""
    link.topic("t", 3, {0: stored(0, b"a") + stored(7, b"b")})
    # Settings that cannot be read: it may be compacted.
    link.config_error = 29
    report = check()
    assert (said(report), report.messages) == ([], 1)
    (note,) = [one for one in report.notes if "'t'" in one]
    assert "TopicAuthorizationFailedError" in note and "it is not checked for gaps" in note


def test_topics_that_are_recreated_all_the_time_are_no_damage(link: ToldLink) -> None:
    """A node that tests run against; the registry is read before Kafka's topics are listed."""
    ids = [bytes([number]) * 16 for number in range(20)]

    def recreate() -> None:
        epoch = 20 - len(ids)
        link.partitions["t"] = PartitionState(ids.pop(0), 1, 1)
        link.register(record("t", link.partitions["t"].topic_id, epoch=epoch + 2))
        link.on_refresh.append(recreate)

    link.topic("t", 0, {})
    link.on_refresh = [lambda: None, recreate]
    report = check()
    assert said(report) == []
    assert report.notes == ["topic 't' was created or deleted meanwhile"]


def test_a_topic_that_is_deleted_during_the_look_is_no_damage(link: ToldLink) -> None:
    link.topic("t", 0, {})
    gone = link.partitions["t"]

    def delete() -> None:
        del link.partitions["t"]
        link.register(record("t", gone.topic_id, deleted=True))

    link.on_refresh = [lambda: None, delete]
    report = check()
    assert (said(report), report.notes, report.topics) == ([], [], 0)


def test_a_topic_that_stays_away_is_a_damage(link: ToldLink) -> None:
    link.topic("t", 0, {})
    link.topic("u", 1, {0: stored(0, b"a")})
    del link.partitions["t"]
    report = check()
    assert [(topic, reason) for topic, reason, *_ in said(report)] == [
        ("t", "Kafka does not have it")
    ]
    assert (report.topics, report.messages) == (1, 1)
