"""Transactions over Kafka's own: messages of many topics that readers see together, or never.

The name of a producer is Kafka's transactional id. `begin` asks the coordinator for a new epoch of
it: an open transaction of an earlier epoch is aborted, one that is being committed is waited for,
and a node with the earlier epoch can no longer write (fencing). So when `begin` has returned, every
earlier transaction of the producer is committed or aborted, on whichever node it was.

Order of requests: each topic is added to the transaction before its first RecordBatch; a commit is
asked for when all RecordBatches have their answers. A node that dies before that leaves an open
transaction, which the next `begin` or the timeout aborts. Until then readers of these topics get no
later messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiokafka.client import CoordinationType
from aiokafka.errors import for_code
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
)

from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log.kafka.link import LINK_ERRORS, RETRY_S, TRANSACT, KafkaLink
from polybus.log.kafka.producing import TOO_LARGE, too_large
from polybus.log.kafka.recent import KafkaTopic
from polybus.log.kafka.record_batch import ProducerState, encode_batch

FENCED = (47, 48, 49, 90)
DENIED = (29, 31, 53)
DUPLICATE = 46
BROKER_TIMEOUT_MS = 5_000
ENDING_S = 2.0
"""If an abort takes longer, the transaction is left to its timeout."""
Request = Callable[[], Awaitable[int]]


class KafkaTransaction:
    """One transaction of a producer. Everything runs on the link's loop."""

    def __init__(self, link: KafkaLink, name: str, timeout_s: float) -> None:
        self._link = link
        self._name = name
        self._timeout_s = timeout_s
        self._deadline_s = link.loop.time() + timeout_s
        self._coordinator: int | None = None
        self._producer = (-1, -1)
        self._sequences: dict[str, int] = {}

    async def begin(self) -> None:
        """Raises StorageError."""

        async def ask() -> int:
            request = InitProducerIdRequest(self._name, int(self._timeout_s * 1000))
            answer = await self._ask(request)
            self._producer = (answer.producer_id, answer.producer_epoch)
            return int(answer.error_code)

        await self._until_done(ask)

    async def append(self, by_topic: Sequence[tuple[KafkaTopic, list[Batch]]]) -> None:
        """Write batches, and give them their offsets.

        Raises UsageError `log.too-large`; StorageError.
        """
        new = [topic.name for topic, _ in by_topic if topic.name not in self._sequences]

        async def add() -> int:
            wanted = [(name, [0]) for name in new]
            answer = await self._ask(AddPartitionsToTxnRequest(self._name, *self._producer, wanted))
            errors = [error for _, parts in answer.errors for _, error in parts]
            return max(errors, default=0)

        if new:
            await self._until_done(add)
            self._sequences |= dict.fromkeys(new, 0)
        for topic, batches in by_topic:
            await self._produce(topic, batches)

    async def _produce(self, topic: KafkaTopic, batches: list[Batch]) -> None:
        sequence = self._sequences[topic.name]
        sender = ProducerState(*self._producer, sequence)
        data = encode_batch(batches, sender, is_transactional=True)
        parts = [(topic.name, [(0, data)])]
        request = ProduceRequest(self._name, -1, BROKER_TIMEOUT_MS, parts)
        found = -1

        async def send() -> int:
            nonlocal found
            leader = self._link.leader_of(topic.name)
            if leader is None:
                raise OSError("no leader")
            answer = await self._link.send(leader, request, TRANSACT)
            ((_, ((_, error, found, *_),)),) = answer.topics
            if error in TOO_LARGE:
                raise too_large(topic.name, batches)
            if error:
                self._link.stale()
            return 0 if error == DUPLICATE else int(error)

        await self._until_done(send)
        for batch in batches:
            batch.epoch, batch.first_offset = topic.epoch, found
            found += len(batch)
        self._sequences[topic.name] = sequence + sum(map(len, batches))

    async def end(self, *, is_committed: bool) -> None:
        """Raises StorageError if the transaction may or may not be committed."""

        async def ask() -> int:
            answer = await self._ask(EndTxnRequest(self._name, *self._producer, is_committed))
            return int(answer.error_code)

        if not is_committed:
            self._deadline_s = self._link.loop.time() + ENDING_S
        if self._sequences:
            await self._until_done(ask)

    async def _ask(self, request: Any) -> Any:
        """Ask the coordinator. Raises one of LINK_ERRORS."""
        if self._coordinator is None:
            self._coordinator = await self._link.coordinator(
                CoordinationType.TRANSACTION, self._name
            )
        return await self._link.send(self._coordinator, request, TRANSACT)

    async def _until_done(self, ask: Request) -> None:
        """Repeat a request until there is a definite answer. Raises StorageError."""
        while True:
            error = -1
            try:
                error = await ask()
            except LINK_ERRORS:
                self._link.stale()
            if error == 0:
                return
            if error in FENCED:
                text = "another node has begun a transaction of the producer; ask again"
                raise StorageError("commit.fenced", text)
            if error in DENIED:
                text = f"Kafka refused a request of the transaction: {for_code(error).__name__}"
                raise StorageError("log.refused", text)
            self._coordinator = None
            if self._link.loop.time() > self._deadline_s:
                text = f"Kafka did not finish the transaction within {self._timeout_s:.0f} s"
                raise StorageError("log.unreachable", f"{text}; ask again")
            await asyncio.sleep(RETRY_S)
