"""Sending batches to brokers that answer late, or not as hoped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log.kafka import log as log_module
from polybus.log.kafka import producing as producing_module
from polybus.log.kafka.link import KafkaLink
from polybus.log.kafka.log import KafkaLog
from polybus.log.kafka.producing import Producing, ProducingCallbacks, QueuedBatch, TopicQueue
from polybus.log.kafka.recent import KafkaTopic
from polybus.log.kafka.registry import KafkaOptions, TopicRecord
from polybus.log.topics import unknown

UNKNOWN_TOPIC, TOO_LARGE, OUT_OF_ORDER, DUPLICATE = 3, 10, 45, 46


class ScriptedLink:
    """Brokers 1 and 2, which lead the topics `one` and `two`; a test answers their requests."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.broker_ids = [1, 2]
        self.on_refreshed: list[Callable[[], None]] = []
        self.requests: asyncio.Queue[tuple[int, asyncio.Future[Any]]] = asyncio.Queue()
        self.tasks: list[asyncio.Task[None]] = []
        self.producers = 0

    def leader_of(self, name: str) -> int:
        return {"one": 1, "two": 2}[name]

    def soon(self, callback: Callable[..., object], *arguments: object) -> None:
        self.loop.call_soon(callback, *arguments)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(self.loop.create_task(work))

    def stale(self) -> None:
        pass

    async def ask(self, request: Any) -> Any:
        self.producers += 1
        return SimpleNamespace(error_code=0, producer_id=self.producers, producer_epoch=0)

    async def send(self, broker: int, request: Any, group: str) -> Any:
        answer = self.loop.create_future()
        await self.requests.put((broker, answer))
        return await answer


def answered(topic: str, error: int, offset: int) -> Any:
    return SimpleNamespace(topics=[(topic, ((0, error, offset),))])


async def test_a_topic_that_must_begin_again_repeats_nothing_of_another() -> None:
    link = ScriptedLink()
    queues = {name: TopicQueue(name, name, 1) for name in ("one", "two")}
    acked: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    tell = ProducingCallbacks(
        acked=lambda taken: acked.put_nowait((taken[0].batch.topic, taken[0].batch.first_offset)),
        refused=lambda taken, error: None,
        failed=lambda topic, error: None,
    )
    producing = Producing(cast(KafkaLink, link), queues.get, tell)
    await producing.open()
    for ticket, topic in enumerate(queues, 1):
        producing.put(QueuedBatch(ticket, Batch.of(topic, [b"x"]), 1))
    waiting = dict([await link.requests.get() for _ in queues])
    waiting[1].set_result(answered("one", OUT_OF_ORDER, -1))
    broker, again = await link.requests.get()
    waiting[2].set_result(answered("two", 0, 7))
    again.set_result(answered("one", 0, 3))
    found = [await acked.get() for _ in queues]

    assert broker == 1 and sorted(found) == [("one", 3), ("two", 7)]
    assert link.requests.empty() and link.producers == 2
    for task in link.tasks:
        task.cancel()


async def test_a_batch_that_a_broker_has_without_an_offset_gets_no_receipt_and_blocks_nothing() -> (
    None
):
    link = ScriptedLink()
    queues = {"one": TopicQueue("one", "one", 1)}
    said: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    tell = ProducingCallbacks(
        acked=lambda taken: said.put_nowait(("acked", taken[0].batch.first_offset)),
        refused=lambda taken, error: said.put_nowait((error.code, taken[0].ticket)),
        failed=lambda topic, error: None,
    )
    producing = Producing(cast(KafkaLink, link), queues.get, tell)
    await producing.open()
    for ticket, offset in ((1, -1), (2, 8)):
        producing.put(QueuedBatch(ticket, Batch.of("one", [b"x"]), 1))
        _, request = await link.requests.get()
        request.set_result(answered("one", DUPLICATE if offset < 0 else 0, offset))
    assert [await said.get() for _ in range(2)] == [("log.refused", 1), ("acked", 8)]
    assert queues["one"].sequence == 2
    for task in link.tasks:
        task.cancel()


async def test_batches_that_are_too_large_together_are_sent_in_parts_and_one_alone_is_refused() -> (
    None
):
    """A topic that others made may take less at once than a node sends."""
    link = ScriptedLink()
    queues = {"one": TopicQueue("one", "one", 1)}
    said: list[tuple[str, int]] = []
    tell = ProducingCallbacks(
        acked=lambda taken: said.extend(("acked", one.ticket) for one in taken),
        refused=lambda taken, error: said.extend((error.code, one.ticket) for one in taken),
        failed=lambda topic, error: None,
    )
    producing = Producing(cast(KafkaLink, link), queues.get, tell)
    await producing.open()
    sizes = [100, 100, 900, 100, 100, 100, 100]
    for ticket, size in enumerate(sizes):
        producing.put(QueuedBatch(ticket, Batch.of("one", [b"x" * size]), size))
    offset = 0
    while len(said) < len(sizes):
        _, request = await link.requests.get()
        part = queues["one"].under_way
        assert part is not None
        if sum(one.value_bytes for one in part.taken) > 300:
            request.set_result(answered("one", TOO_LARGE, -1))
        else:
            request.set_result(answered("one", 0, offset))
            offset += part.count
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    codes = ["log.too-large" if size == 900 else "acked" for size in sizes]
    assert said == list(zip(codes, range(len(sizes)), strict=True))
    assert queues["one"].sequence == offset == len(sizes) - 1
    for task in link.tasks:
        task.cancel()


async def test_only_the_topic_whose_leader_does_not_answer_counts_as_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producing_module, "STALL_S", 0.1)
    monkeypatch.setattr(producing_module, "WATCH_S", 0.05)
    link = ScriptedLink()
    queues = {name: TopicQueue(name, name, 1) for name in ("one", "two")}
    failed: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    tell = ProducingCallbacks(
        acked=lambda taken: None,
        refused=lambda taken, error: None,
        failed=lambda topic, error: failed.put_nowait((topic, error.code)),
    )
    producing = Producing(cast(KafkaLink, link), queues.get, tell)
    await producing.open()
    producing.put(QueuedBatch(1, Batch.of("two", [b"x"]), 1))
    await link.requests.get()
    # The other topic is answered all the time.
    for offset in range(100):
        producing.put(QueuedBatch(2 + offset, Batch.of("one", [b"x"]), 1))
        _, request = await link.requests.get()
        request.set_result(answered("one", 0, offset))
        if not failed.empty():
            break
        await asyncio.sleep(0.01)
    assert await failed.get() == ("two", "log.unreachable")
    assert {topic for topic, _ in failed._queue} <= {"two"}  # type: ignore[attr-defined]
    for task in link.tasks:
        task.cancel()


@pytest.mark.parametrize("is_deleted_first", [False, True])
async def test_a_late_answer_about_a_deleted_topic_stops_nothing_of_a_new_one_of_its_name(
    is_deleted_first: bool,
) -> None:
    link = ScriptedLink()
    queues = {"one": TopicQueue("one", "one", 1)}
    said: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    tell = ProducingCallbacks(
        acked=lambda taken: said.put_nowait(("acked", taken[0].ticket)),
        refused=lambda taken, error: said.put_nowait((error.code, taken[0].ticket)),
        failed=lambda topic, error: None,
    )
    producing = Producing(cast(KafkaLink, link), queues.get, tell)
    await producing.open()
    producing.put(QueuedBatch(1, Batch.of("one", [b"x"]), 1))
    _, request = await link.requests.get()
    deleted, queues["one"] = queues["one"], TopicQueue("one", "one", 2)
    if is_deleted_first:
        producing.refuse_all(deleted, unknown("one"))
    producing.put(QueuedBatch(2, Batch.of("one", [b"y"]), 1))
    await asyncio.sleep(0)
    request.set_result(answered("one", UNKNOWN_TOPIC, -1))
    assert await said.get() == ("topic.unknown", 1)
    async with asyncio.timeout(10):
        _, request = await link.requests.get()
    request.set_result(answered("one", 0, 0))
    assert await said.get() == ("acked", 2)
    for task in link.tasks:
        task.cancel()


class IdleLink:
    """Brokers that nothing is sent to."""

    def __init__(self, *given: object, **named: object) -> None: ...

    def open(self) -> None: ...

    def stop(self) -> None: ...

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()

    def soon(self, callback: Callable[..., object], *arguments: object) -> None: ...


@pytest.mark.parametrize("is_frozen", [False, True])
async def test_a_log_takes_none_of_several_batches_if_it_does_not_take_all(
    monkeypatch: pytest.MonkeyPatch, is_frozen: bool
) -> None:
    """Who publishes them tries each on its own then, and none may be there twice."""
    monkeypatch.setattr(log_module, "KafkaLink", IdleLink)
    options = KafkaOptions(node="n", waits=False)
    log = KafkaLog("kafka://127.0.0.1:1", options=options, clock=lambda: 1)
    for topic in ("good", "bad"):
        log._directory.topics[topic] = KafkaTopic(TopicRecord(topic, 1, "id"), topic)
    if is_frozen:
        log.freeze("bad", "it is damaged")
    else:
        log._failed("bad", StorageError("log.replicas", "too few"))
    with pytest.raises(StorageError):
        log.append_all([Batch.of("good", [b"x"]), Batch.of("bad", [b"y"])])
    assert log.pending_bytes == 0
    log.append_all([Batch.of("good", [b"x"])])
    assert log.pending_bytes == 1
