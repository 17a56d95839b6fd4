"""Fetching from a leader, which is played here: no broker runs."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log.kafka.following import Followed, Following, fetch_at
from polybus.log.kafka.link import KafkaLink
from polybus.log.kafka.record_batch import encode_batch


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


class BrokerWithLimits:
    """Leads all topics. Gives a RecordBatch over the limit to the first topic with messages only.

    `busy` always has messages, `large` has one RecordBatch over the limit.
    """

    def __init__(self) -> None:
        self.broker_ids = [1]
        self.on_refreshed: list[Any] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.large = encode_batch([Batch.of("large", [os.urandom(3 << 20)])])

    def leader_of(self, name: str) -> int:
        return 1

    def stale(self) -> None: ...

    def start(self, work: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    async def send(self, broker: int, request: Any, group: str) -> Any:
        await asyncio.sleep(0)
        answers = []
        has_none = True
        for name, ((_, position, limit),) in request._topics:
            data = self.large if position == 0 else b""
            if name == "busy":
                data = position.to_bytes(8) + encode_batch([Batch.of("busy", [b"y"])])[8:]
            if len(data) > limit and not has_none:
                data = b""
            has_none &= not data
            answers.append((name, [(0, 0, 0, 0, 0, None, data)]))
        return SimpleNamespace(topics=answers)


async def test_a_large_batch_beside_a_topic_that_always_has_messages_is_delivered() -> None:
    broker = BrokerWithLimits()
    followed = {name: Followed(name, name, 1, 0) for name in ("busy", "large")}
    arrived: list[str] = []
    is_there = asyncio.Event()

    def arrive(one: Followed, batches: list[Batch]) -> None:
        arrived.append(one.topic)
        if one.topic == "large" or len(arrived) > 100:
            is_there.set()

    Following(cast(KafkaLink, broker), followed, arrive).open()
    await is_there.wait()
    for task in broker.tasks:
        task.cancel()
    assert "large" in arrived
    assert "busy" in arrived
