"""What Kafka refuses has codes of its own: the advice is about brokers, not about a disk."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polybus.batch import Batch
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.interface import TopicSettings
from polybus.log.kafka import registry
from polybus.log.kafka.link import KafkaLink
from polybus.log.kafka.producing import Producing, ProducingCallbacks, QueuedBatch, TopicQueue
from polybus.log.kafka.recent import KafkaTopic
from polybus.log.kafka.registry import KafkaOptions, KafkaTopics, TopicRecord
from polybus.log.kafka.transacting import KafkaTransaction

TOO_LARGE, NOT_ENOUGH_REPLICAS, TOPIC_DENIED, POLICY = 10, 19, 29, 44


class RefusingLink:
    """One broker that answers every request with an error."""

    def __init__(self, error: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.error = error
        self.broker_ids = [1]
        self.partitions: dict[str, Any] = {}
        self.on_refreshed: list[Any] = []
        self.tasks: list[asyncio.Task[None]] = []

    def leader_of(self, name: str) -> int:
        return 1

    def soon(self, callback: Any) -> None:
        self.loop.call_soon(callback)

    def start(self, work: Any) -> None:
        self.tasks.append(self.loop.create_task(work))

    def stale(self) -> None:
        pass

    async def refreshed(self, tries: int = 0) -> None:
        await asyncio.sleep(0)

    async def coordinator(self, kind: Any, name: str) -> int:
        return 1

    async def ask(self, request: Any) -> Any:
        return SimpleNamespace(
            error_code=0,
            producer_id=1,
            producer_epoch=0,
            topic_errors=[("t", self.error, "why")],
            resources=[(self.error, "why", 2, "t")],
            responses=[("t", bytes(16), self.error, "why", {})],
        )

    async def send(self, broker: int, request: Any, group: str) -> Any:
        return SimpleNamespace(
            error_code=0,
            producer_id=1,
            producer_epoch=0,
            errors=[("t", [(0, 0)])],
            topics=[("t", ((0, self.error, -1),))],
        )


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (TOPIC_DENIED, "log.refused", StorageError),
        (NOT_ENOUGH_REPLICAS, "log.replicas", StorageError),
        (TOO_LARGE, "log.too-large", UsageError),
    ],
)
async def test_publishing_names_what_kafka_refused(
    error: int, code: str, kind: type[PolybusError]
) -> None:
    link = RefusingLink(error)
    queue = TopicQueue("t", "t", 1)
    found: asyncio.Future[PolybusError] = link.loop.create_future()

    def note(error: PolybusError) -> None:
        if not found.done():
            found.set_result(error)

    tell = ProducingCallbacks(
        acked=lambda taken: None,
        refused=lambda taken, error: note(error),
        failed=lambda _, error: note(error),
    )
    producing = Producing(cast(KafkaLink, link), {"t": queue}.get, tell)
    await producing.open()
    producing.put(QueuedBatch(1, Batch.of("t", [b"x"]), 1))
    said = await found
    for task in link.tasks:
        task.cancel()
    assert (said.code, type(said)) == (code, kind)
    assert " t" in said.text


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [(TOPIC_DENIED, "log.refused", StorageError), (TOO_LARGE, "log.too-large", UsageError)],
)
async def test_a_transaction_names_what_kafka_refused(
    error: int, code: str, kind: type[PolybusError]
) -> None:
    transaction = KafkaTransaction(cast(KafkaLink, RefusingLink(error)), "producer", 5.0)
    topic = KafkaTopic(TopicRecord("t", 1, "id"), "t")
    await transaction.begin()
    with pytest.raises(kind) as caught:
        await transaction.append([(topic, [Batch.of("t", [b"x"])])])
    assert caught.value.code == code


async def test_topics_that_kafka_does_not_create_change_or_delete_are_refused() -> None:
    """None of it is about the name of the topic, or about a disk."""
    kafka = KafkaTopics(cast(KafkaLink, RefusingLink(TOPIC_DENIED)), KafkaOptions(node="n"))
    wanted = {"t": kafka.configs(TopicSettings())}
    with pytest.raises(StorageError) as caught:
        await kafka.remove("t", "00" * 16)
    _, refused = await kafka.make(wanted)
    for error in (caught.value, refused["t"], (await kafka.change(wanted))["t"]):
        assert error.code == "log.refused"
        assert "TopicAuthorizationFailedError" in error.text


@pytest.mark.parametrize(
    ("error", "code"), [(NOT_ENOUGH_REPLICAS, "log.replicas"), (POLICY, "log.refused")]
)
async def test_a_record_that_kafka_does_not_store_is_given_up_with_its_error(
    error: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ANSWER_TIMEOUT_S", 0.02)
    kafka = KafkaTopics(cast(KafkaLink, RefusingLink(error)), KafkaOptions(node="n"))
    with pytest.raises(StorageError) as caught:
        await kafka.produce("t", b"")
    assert caught.value.code == code


async def test_a_topic_that_kafka_does_not_list_counts_as_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "ANSWER_TIMEOUT_S", 0.02)
    kafka = KafkaTopics(cast(KafkaLink, RefusingLink(0)), KafkaOptions(node="n"))
    found, refused = await kafka.ids_of({"t": ""})
    assert (found, refused["t"].code) == ({}, "log.unreachable")
