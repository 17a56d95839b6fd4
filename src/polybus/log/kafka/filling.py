"""Makes the offsets of a new Kafka topic begin where those of its source begin.

Kafka gives the first record the offset 0. So empty records are written up to the first offset, and
removed again. Each has a sequence number, so it is stored once however often it is sent, and its
offset shows whether another program has written to the topic meanwhile: then nothing is removed.
"""

from __future__ import annotations

import time

from polybus.batch import Batch
from polybus.errors import UsageError
from polybus.log.kafka.link import KafkaLink
from polybus.log.kafka.producing import new_producer
from polybus.log.kafka.record_batch import ProducerState, encode_batch
from polybus.log.kafka.registry import KafkaTopics

FILL_COUNT = 100_000


async def fill(link: KafkaLink, kafka: KafkaTopics, name: str, start: int) -> None:
    """Write and remove empty records in a Kafka topic without records.

    Raises UsageError `topic.exists` if it has other records; StorageError.
    """
    producer = await new_producer(link)
    stop = 0
    while stop < start:
        batch = Batch.of(name, [b""] * min(FILL_COUNT, start - stop))
        batch.timestamp_us = time.time_ns() // 1000
        state = ProducerState(*producer, stop & 0x7FFFFFFF)
        if await kafka.produce(name, encode_batch([batch], state)) != stop:
            raise has_messages(name)
        stop += len(batch)
    if start:
        await kafka.discard(name, start)


def has_messages(name: str) -> UsageError:
    text = f"Kafka has a topic {name!r} with messages of another program"
    return UsageError("topic.exists", f"{text}; delete it there first, or use cluster.prefix")
