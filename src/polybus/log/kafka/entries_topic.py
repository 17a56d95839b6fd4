"""What the nodes of a cluster share beside messages: entries in one compacted Kafka topic.

Every node reads all of it when it starts, and follows it. A batch of entries is one RecordBatch of
one partition, so it is visible completely or not at all, and all nodes see the batches in one
order. The reader (`polybus.services.cluster_table`) decides what an entry means, and which of two
writers was first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from polybus.batch import Batch
from polybus.log.interface import SHARED
from polybus.log.kafka.fetch_session import Followed
from polybus.log.kafka.following import read_to
from polybus.log.kafka.link import LATEST, KafkaLink
from polybus.log.kafka.producing import TopicQueue
from polybus.log.kafka.record_batch import encode_tombstones
from polybus.log.kafka.registry import KafkaTopics


class EntriesTopic(Followed):
    """The topic of the entries. Its coroutines run on the link's loop."""

    def __init__(
        self, link: KafkaLink, kafka: KafkaTopics, hand_on: Callable[[Sequence[Batch]], None]
    ) -> None:
        super().__init__(SHARED, kafka.prefix + SHARED, 0, 0)
        self._link = link
        self._kafka = kafka
        self.hand_on = hand_on
        self.queue = TopicQueue(SHARED, self.name, 0)

    async def open(self) -> None:
        """Pass on all existing entries. Raises StorageError."""
        await self._kafka.ensure_compacted(self.name)
        await read_to(self._link, self, await self.stop(), self.hand_on)

    async def stop(self) -> int:
        """The offset after the last entry. Raises StorageError `log.unreachable`."""
        return (await self._link.offsets([self.name], LATEST))[self.name]

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Raises StorageError `log.refused`, `log.unreachable`."""
        if keys:
            data = encode_tombstones(keys, time.time_ns() // 1_000_000)
            await self._kafka.produce(self.name, data)
