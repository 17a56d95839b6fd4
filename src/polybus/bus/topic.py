"""A topic of a running bus: its subscribers, and its traffic since the bus started.

Incoming messages are counted once per batch. Outgoing ones are computed: incoming messages times
subscribers, settled whenever the subscribers change or the figures are read.
"""

from collections import Counter

from polybus.batch import Batch
from polybus.bus.subscriptions import Subscriber
from polybus.scan import Traffic


class Topic:
    """`taken` and `delivered` are its traffic by protocol; `settle` brings `delivered` up to date.

    `scan` reads `subscribers` and counts in `taken`.
    """

    __slots__ = ("_settled", "delivered", "name", "subscribers", "taken")

    def __init__(self, name: str) -> None:
        self.name = name
        # A tuple, replaced on change: a delivery may continue over the old one meanwhile.
        self.subscribers: tuple[Subscriber, ...] = ()
        self.taken: dict[str, Traffic] = {}
        self.delivered: dict[str, Traffic] = {}
        self._settled = Traffic()

    @property
    def messages_in(self) -> int:
        return sum(traffic.messages for traffic in self.taken.values())

    def listen(self, subscribers: tuple[Subscriber, ...]) -> None:
        """Replace the subscribers."""
        self.settle()
        self.subscribers = subscribers

    def take(self, batch: Batch) -> None:
        """Count a batch that was accepted."""
        traffic = self.taken.get(batch.protocol)
        if traffic is None:
            traffic = self.taken[batch.protocol] = Traffic()
        traffic.add(len(batch), batch.value_bytes)

    def spare(self, batch: Batch, protocol: str) -> None:
        """Subtract a batch that a subscriber did not get because it sent it."""
        self._deliver(protocol, -len(batch), -batch.value_bytes)

    def past_delivered(self, batch: Batch, protocol: str) -> None:
        """Count a batch from the log that one subscriber got."""
        self._deliver(protocol, len(batch), batch.value_bytes)

    def settle(self) -> None:
        """Count what the subscribers got since the last call."""
        value_bytes = sum(traffic.value_bytes for traffic in self.taken.values())
        taken, before = Traffic(self.messages_in, value_bytes), self._settled
        self._settled = taken
        messages, value_bytes = taken.messages - before.messages, value_bytes - before.value_bytes
        if messages:
            for protocol, count in Counter(one.protocol for one in self.subscribers).items():
                self._deliver(protocol, count * messages, count * value_bytes)

    def _deliver(self, protocol: str, messages: int, value_bytes: int) -> None:
        self.delivered.setdefault(protocol, Traffic()).add(messages, value_bytes)
