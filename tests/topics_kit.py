"""A data folder with messages in history and in the journal, without a bus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from log_kit import opened_log

from polybus.batch import Batch
from polybus.log.history.handover import compact

DAY_US = 86_400_000_000
NOON_US = 1_769_860_800_000_000  # 2026-01-31T12:00:00Z


def publish(
    data: Path, topic: str, values: Sequence[bytes], *, timestamp_us: int = NOON_US
) -> None:
    """Append to the journal of a stopped bus; the topic is made if it is not there."""
    data.mkdir(exist_ok=True)
    log = opened_log(data, lambda: timestamp_us)
    try:
        if topic not in log.topics():
            log.create_topic(topic)
        batch = Batch.of(
            topic,
            values,
            headers=[{"n": str(index).encode()} for index in range(len(values))],
            keys=[f"key {index}".encode() for index in range(len(values))],
        )
        batch.protocol, batch.sender = "boson", "test"
        log.append(batch)
        log.sync()
    finally:
        log.close()


def hand_over(data: Path) -> None:
    """Turn the journal into history."""
    compact(data)


def make_topic(data: Path, topic: str = "orders", *, count: int = 30) -> list[bytes]:
    """A third of the messages in a settled file, a third in a small last one, the rest fresh."""
    values = [b'{"n": %d}' % index for index in range(count)]
    third = count // 3
    publish(data, topic, values[:third], timestamp_us=NOON_US)
    publish(data, topic, values[third : 2 * third], timestamp_us=NOON_US + DAY_US)
    hand_over(data)
    publish(data, topic, values[2 * third :], timestamp_us=NOON_US + DAY_US + 1)
    return values
