"""Topics of another log in a Kafka cluster: with their epochs, so that positions stay valid."""

from __future__ import annotations

from polybus.log.copying import not_a_copy
from polybus.log.interface import Bounds, TopicSettings
from polybus.log.kafka.log import KafkaLog


class KafkaTarget:
    """A cluster that topics are copied to. A topic with the epoch of its source is its copy."""

    def __init__(self, log: KafkaLog) -> None:
        self.log = log

    def messages_in(self, topic: str, source: Bounds) -> int | None:
        if topic not in self.log.topics():
            return None
        self.log.catch_up(topic)
        bounds = self.log.bounds(topic)
        if bounds.epoch != source.epoch or bounds.stop < source.start:
            raise not_a_copy(topic)
        return bounds.stop - source.start

    def create(self, topic: str, source: Bounds, settings: TopicSettings) -> None:
        self.log.import_topic(topic, settings, source)
