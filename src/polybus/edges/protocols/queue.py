"""Queues on the bus: a connector's port is a topic.

a connect            subscribe to the connector's topic, from now on
a message            publish to it; every subscriber gets it but the queue it came from
a message of the topic is sent to every queue, without its headers

The queue protocol has no errors. An error is counted and logged, and if it costs one of the peer's
messages the connection is reset. A reset differs from an orderly close, so a program that has
already closed its side can tell that a message was lost.
"""

from typing import Protocol

from polybus.batch import Batch
from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.edges.protocols.translator import Peer, Translator
from polybus.errors import PeerError, PolybusError
from polybus.wire import queue as wire


class QueuePeer(Peer, Protocol):
    def reset(self) -> None:
        """End the connection in a way that differs from an orderly close."""
        ...


class QueueTranslator(Translator):
    """A queue's side of the bus; the connection ends if its topic does not exist."""

    protocol = wire.PROTOCOL
    takes_own = False
    encode = staticmethod(wire.encode)

    def __init__(self, edge: Edge, peer: QueuePeer, connector: Connector) -> None:
        super().__init__(edge, peer)
        self._reset = peer.reset
        assert connector.topic is not None, "the config check requires it"
        topic = connector.topic.lower()
        self.codec = wire.QueueCodec(self.limits, topic)
        try:
            self.subscribe(topic)
        except PolybusError as error:
            self._end(error.code, error.text)

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        self._end(error.code, f"{error.text} ({len(batch)} messages)")

    def topic_deleted(self, topic: str) -> None:
        self.subscriptions.pop(topic, None)
        # None of the peer's messages is lost, so this is an orderly close.
        self.complain("topic.deleted", f"the topic {topic!r} was deleted")
        self.peer.close()

    def bad(self, error: PeerError) -> None:
        self._end(error.code, error.text)

    def send_error(self, code: str, text: str) -> None:
        """The protocol has no errors."""

    def _end(self, code: str, text: str) -> None:
        self.complain(code, text)
        self._reset()
