"""Fetching from a leader, which is played here: no broker runs."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log.kafka import following
from polybus.log.kafka.fetch_session import TOPIC_BYTES_MAX, Followed, SessionFetch
from polybus.log.kafka.following import Following, fetch_at
from polybus.log.kafka.link import KafkaLink
from polybus.log.kafka.recent import KEPT_MAX, KafkaTopic, ReadAhead
from polybus.log.kafka.record_batch import encode_batch
from polybus.log.kafka.registry import TopicRecord

FORGOTTEN = 70


class Leader:
    """Answers fetches in turn with these messages, and the end that it knows."""

    def __init__(self, *answers: tuple[list[bytes], int]) -> None:
        self._answers = list(answers)
        self.asked: list[int] = []

    def leader_of(self, name: str) -> int:
        return 1

    def stale(self) -> None: ...

    async def send(self, broker: int, request: Any, group: str) -> Any:
        ((_, ((_, position, _),)),) = request._topics
        self.asked.append(position)
        values, stable = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        data = encode_batch([Batch.of("t", values)]) if values else b""
        return SimpleNamespace(topics=[("t", [(0, 0, stable, stable, 0, None, data)])])


def fetch(leader: Leader, offset: int, stop: int, within_s: float = 30.0) -> list[bytes]:
    followed = Followed("t", "t", 1, 0)
    work = fetch_at(cast(KafkaLink, leader), followed, offset, stop, 1 << 20, within_s)
    return [value for batch in asyncio.run(work) for value in batch.values()]


def test_a_new_leader_that_knows_less_than_the_last_one_is_asked_again() -> None:
    leader = Leader(([], 0), ([], 0), ([b"0", b"1"], 2))
    assert fetch(leader, 0, 2) == [b"0", b"1"]
    assert leader.asked == [0, 0, 0]


def test_a_leader_that_never_has_what_was_confirmed_is_an_error() -> None:
    leader = Leader(([], 0))
    with pytest.raises(StorageError) as caught:
        fetch(leader, 0, 2, within_s=0.05)
    assert len(leader.asked) > 1
    assert caught.value.code == "log.unreachable"


class PlayedBroker:
    """Leads all topics. Gives a RecordBatch over the limit to the first topic with messages only.

    `logs` has the RecordBatches of each topic, by their offset. It remembers fetches if it has
    sessions.
    """

    def __init__(self, *, has_sessions: bool = True) -> None:
        self.broker_ids = [1]
        self.on_refreshed: list[Any] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.logs: dict[str, dict[int, bytes]] = {}
        self.requests: list[SessionFetch] = []
        self.has_sessions = has_sessions
        self.session: dict[str, tuple[int, int]] = {}
        self.asked = asyncio.Event()

    def write(self, topic: str, offset: int, *values: bytes) -> bytes:
        data = offset.to_bytes(8) + encode_batch([Batch.of(topic, values)])[8:]
        self.logs.setdefault(topic, {})[offset] = data
        return data

    def leader_of(self, name: str) -> int:
        return 1

    def stale(self) -> None: ...

    def start(self, work: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def forget(self) -> None:
        self.session = {}

    async def send(self, broker: int, request: SessionFetch, group: str) -> Any:
        self.requests.append(request)
        self.asked.set()
        await asyncio.sleep(0)
        wanted = {name: (offset, limit) for name, ((_, offset, _, limit),) in request.wanted}
        if request.number == 0:
            self.session = wanted
        elif not self.session:
            return SimpleNamespace(error_code=FORGOTTEN, session_id=0, topics=[])
        else:
            self.session.update(wanted)
            for name, _ in request.left:
                del self.session[name]
        answers: list[Any] = []
        for name, (position, limit) in list(self.session.items()):
            data = self.logs.get(name, {}).get(position, b"")
            if data and (not answers or len(data) <= limit):
                answers.append((name, [(0, 0, 0, 0, 0, None, data)]))
                self.session[name] = self.session.pop(name)
        return SimpleNamespace(error_code=0, session_id=int(self.has_sessions), topics=answers)


class Node:
    """Follows topics of a broker; `arrived` has the values of each."""

    def __init__(self, broker: PlayedBroker, *topics: str) -> None:
        self.broker = broker
        self.followed = {name: Followed(name, name, 1, 0) for name in topics}
        self.arrived: dict[str, list[bytes]] = {name: [] for name in topics}
        self.following = Following(cast(KafkaLink, broker), self.followed, self._arrive)

    def _arrive(self, one: Followed, batches: list[Batch]) -> None:
        values = self.arrived.setdefault(one.topic, [])
        for batch in batches:
            assert batch.epoch == one.epoch
            values += batch.values()

    async def __aenter__(self) -> Node:
        self.following.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.broker.tasks:
            task.cancel()
        await asyncio.gather(*self.broker.tasks, return_exceptions=True)

    async def fetched(self, count: int = 2) -> None:
        """Wait for some more requests."""
        stop = len(self.broker.requests) + count
        while len(self.broker.requests) < stop:
            self.broker.asked.clear()
            await self.broker.asked.wait()


@pytest.mark.parametrize("has_sessions", [True, False])
async def test_a_large_batch_beside_a_topic_that_always_has_messages_is_delivered(
    has_sessions: bool,
) -> None:
    broker = PlayedBroker(has_sessions=has_sessions)
    broker.write("large", 0, os.urandom(3 << 20))
    for offset in range(100):
        broker.write("busy", offset, b"y")
    async with Node(broker, "busy", "large") as node:
        await node.fetched(8)
    assert len(node.arrived["large"]) == 1
    assert len(node.arrived["busy"]) > 1


async def test_a_fetch_names_only_topics_whose_position_has_changed() -> None:
    broker = PlayedBroker()
    names = [f"t{number}" for number in range(1000)]
    async with Node(broker, *names) as node:
        await node.fetched()
        assert len(broker.requests[0].wanted) == 1000
        broker.write("t7", 0, b"a", b"b")
        await node.fetched(3)
        del node.followed["t8"]
        node.followed["new"] = Followed("new", "new", 1, 5)
        for look in broker.on_refreshed:
            look()
        await node.fetched(3)
    assert node.arrived["t7"] == [b"a", b"b"]
    later = [request for request in broker.requests[1:] if request.wanted or request.left]
    assert [[name for name, _ in one.wanted] for one in later] == [["t7"], ["new"]]
    assert later[0].wanted == [("t7", [(0, 2, -1, TOPIC_BYTES_MAX)])]
    assert [one.left for one in later] == [[], [("t8", [0])]]


async def test_a_session_that_its_broker_forgot_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(following, "RETRY_S", 0)
    broker = PlayedBroker()
    async with Node(broker, "t", "u") as node:
        broker.write("t", 0, b"a")
        await node.fetched(3)
        broker.forget()
        broker.write("t", 1, b"b")
        await node.fetched(4)
    assert node.arrived["t"] == [b"a", b"b"]
    assert [len(one.wanted) for one in broker.requests if one.number == 0] == [2, 2]


async def test_an_answer_for_a_topic_that_was_recreated_meanwhile_is_not_taken() -> None:
    broker = PlayedBroker()
    async with Node(broker, "t") as node:
        await node.fetched(1)
        broker.write("t", 0, b"of the old one")
        node.followed["t"] = Followed("t", "t", 2, 0)
        for look in broker.on_refreshed:
            look()
        await node.fetched(1)
        broker.write("t", 0, b"new")
        await node.fetched(3)
    assert node.arrived["t"] == [b"new"]


# What the node has published itself


# Reading ahead


def stored(first: int, count: int) -> list[Batch]:
    batch = Batch.of("t", [b"%d" % number for number in range(first, first + count)])
    batch.epoch, batch.first_offset = 1, first
    return [batch]


def test_only_a_reader_that_reads_on_has_the_next_fetch_begun() -> None:
    begun: dict[int, Future[list[Batch]]] = {}
    ahead = ReadAhead(lambda _, offset: begun.setdefault(offset, Future()))
    topic = KafkaTopic(TopicRecord("t", 1, "id"), "t")
    ahead.keep(topic, stored(0, 100), 30)
    assert begun == {}

    found = ahead.take(topic, 30, 250)
    assert found is not None and found[0].first_offset == 30
    ahead.keep(topic, found, 60)
    ahead.take(topic, 60, 250)
    assert list(begun) == [100], "once, and not for each piece"

    begun[100].set_result(stored(100, 200))
    found = ahead.take(topic, 100, 250)
    assert found is not None and len(found[0]) == 150, "what is not confirmed yet is not there"
    assert list(begun) == [100], "there is nothing behind it"


def test_a_fetch_that_failed_before_it_was_asked_for_is_repeated() -> None:
    begun: list[Future[list[Batch]]] = []

    def begin(_: KafkaTopic, offset: int) -> Future[list[Batch]]:
        if offset > 200:
            raise StorageError("log.closed", "the log is closed")
        begun.append(Future())
        return begun[-1]

    ahead = ReadAhead(begin)
    topic = KafkaTopic(TopicRecord("t", 1, "id"), "t")
    for error in (StorageError("log.unreachable", "no leader"), LookupError(100)):
        ahead.keep(topic, stored(0, 100), 50)
        assert ahead.take(topic, 50, 400) is not None
        begun[-1].set_exception(error)
        assert ahead.take(topic, 100, 400) is None
    ahead.keep(topic, stored(100, 150), 150)
    assert ahead.take(topic, 150, 400) is not None, "although the next fetch cannot begin"


def test_the_oldest_of_many_fetches_that_nobody_takes_is_ended() -> None:
    begun: list[Future[list[Batch]]] = []

    def begin(_: KafkaTopic, offset: int) -> Future[list[Batch]]:
        begun.append(Future())
        return begun[-1]

    ahead = ReadAhead(begin)
    for number in range(KEPT_MAX + 1):
        topic = KafkaTopic(TopicRecord("t", 1, "id"), f"t{number}")
        ahead.keep(topic, stored(0, 100), 50)
        ahead.take(topic, 50, 400)
    assert [one.cancelled() for one in begun] == [True] + [False] * KEPT_MAX
