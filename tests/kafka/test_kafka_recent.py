"""The newest messages of topics in memory."""

from __future__ import annotations

from array import array

from polybus.batch import Batch
from polybus.log.kafka.recent import KafkaTopic, RecentMessages
from polybus.log.kafka.registry import TopicRecord

READ_BYTES = 1 << 20


def topic_of(number: int) -> KafkaTopic:
    return KafkaTopic(TopicRecord(f"t{number}", 1, "id"), f"t{number}")


def test_a_message_does_not_keep_what_was_read_beside_it_in_memory() -> None:
    """A read of a socket has messages of many topics; each topic has them for another time."""
    recent = RecentMessages(bytes_max=1 << 20)
    read = memoryview(bytes(range(256)) * (READ_BYTES // 256))
    topics = [topic_of(number) for number in range(100)]
    for number, topic in enumerate(topics):
        batch = Batch(topic.topic, read, array("i", [number, number + 3]))
        batch.epoch, batch.first_offset, batch.timestamp_us = 1, 0, 5000
        batch.sender, batch.protocol, batch.keys = "s", "p", [b"k"]
        batch.headers = [{"h": b"v"}]
        recent.add(topic, [batch], 1)
    for number, topic in enumerate(topics):
        found = recent.since(topic, 0)
        assert found is not None
        (kept,) = found
        assert list(kept.values()) == [bytes([number, number + 1, number + 2])]
        assert len(kept.buffer) == 3
        assert (kept.epoch, kept.first_offset, kept.timestamp_us) == (1, 0, 5000)
        assert (kept.sender, kept.protocol, kept.keys) == ("s", "p", [b"k"])
        assert kept.headers == [{"h": b"v"}]


def test_a_batch_that_fills_its_buffer_is_not_copied_and_counts_once() -> None:
    recent = RecentMessages(bytes_max=5 * READ_BYTES)  # Values and buffers count.
    topic = topic_of(0)
    for number in range(3):
        data = bytes(READ_BYTES)
        parts = [Batch("t0", data, array("i", [at, at + READ_BYTES // 4])) for at in range(4)]
        for place, part in enumerate(parts):
            part.first_offset = 4 * number + place
        recent.add(topic, parts, 4 * number + 4)
    found = recent.since(topic, topic.tail_start)
    assert found is not None
    assert all(len(batch.buffer) == READ_BYTES for batch in found)
    assert topic.tail_start == 2
