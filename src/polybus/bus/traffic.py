"""Traffic: messages and bytes per topic and protocol.

Incoming messages are counted once per batch. Outgoing ones are computed: incoming messages times
subscribers, settled whenever the subscribers change or the figures are read.
"""

from collections import Counter
from collections.abc import Iterable

from polybus.batch import Batch
from polybus.bus.subscriptions import Subscriber
from polybus.scan import Flow


class Traffic:
    """One topic's figures since the bus started."""

    __slots__ = (
        "_settled_bytes",
        "_settled_messages",
        "delivered",
        "taken",
    )

    def __init__(self) -> None:
        self.taken: dict[str, Flow] = {}
        self.delivered: dict[str, Flow] = {}
        self._settled_messages = 0
        self._settled_bytes = 0

    @property
    def messages(self) -> int:
        return sum(flow.messages for flow in self.taken.values())

    @property
    def value_bytes(self) -> int:
        return sum(flow.value_bytes for flow in self.taken.values())

    def take(self, batch: Batch) -> None:
        """Count a batch that was accepted."""
        flow = self.taken.get(batch.protocol)
        if flow is None:
            flow = self.taken[batch.protocol] = Flow()
        flow.messages += len(batch)
        flow.value_bytes += batch.value_bytes

    def spare(self, batch: Batch, protocol: str) -> None:
        """Correct for a subscriber that did not get a batch because it sent it."""
        flow = self._delivered(protocol)
        flow.messages -= len(batch)
        flow.value_bytes -= batch.value_bytes

    def settle(self, subscribers: Iterable[Subscriber]) -> None:
        """Count what these subscribers got since the last call."""
        taken_messages, taken_bytes = self.messages, self.value_bytes
        messages = taken_messages - self._settled_messages
        value_bytes = taken_bytes - self._settled_bytes
        self._settled_messages, self._settled_bytes = taken_messages, taken_bytes
        if messages:
            for protocol, count in Counter(one.protocol for one in subscribers).items():
                flow = self._delivered(protocol)
                flow.messages += count * messages
                flow.value_bytes += count * value_bytes

    def _delivered(self, protocol: str) -> Flow:
        flow = self.delivered.get(protocol)
        if flow is None:
            flow = self.delivered[protocol] = Flow()
        return flow
