"""Queues on the bus: a connector's port is a topic.

a connect            subscribe to the connector's topic, from now on
a message            publish to it; everybody gets it but the queue it came on
a message of the topic is sent to every queue, without its headers

A queue has no words but messages, so an error is not told but noted, and where a message of the
peer's is lost by it the connection ends: the end of a queue is the one thing its program hears. It
is a reset, so that a program that has said goodbye already can tell it from the bus's own goodbye.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from polybus.batch import Batch, Buffer
from polybus.edges.protocols.translator import Peer, Translator
from polybus.errors import PeerError, PolybusError
from polybus.wire import queue as wire
from polybus.wire.codec import Bad, Publish

if TYPE_CHECKING:
    from polybus.config import Connector
    from polybus.edges.server import Server


class QueuePeer(Peer, Protocol):
    def reset(self) -> None:
        """End the connection so that the peer knows it was no goodbye."""
        ...


class QueueTranslator(Translator):
    """A queue's side of the bus; without its topic there is none, and the connection ends."""

    protocol = wire.PROTOCOL
    takes_own = False

    def __init__(self, server: Server, peer: QueuePeer, connector: Connector) -> None:
        super().__init__(server, peer)
        self._reset = peer.reset
        assert connector.topic is not None, "the config check asks for it"
        topic = connector.topic.lower()
        self.codec = wire.QueueCodec(server.config.limits, topic)
        try:
            self.subscribe(topic)
        except PolybusError as error:
            self._end(error.code, error.text)

    def handle(self, event: wire.Event) -> None:
        match event:
            case Publish(batches, whole):
                self.publish(batches, whole)
            case Bad(error):
                self.bad(error)

    def encode(self, batch: Batch) -> Buffer:
        return wire.encode(batch)

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        self._end(error.code, f"{error.text} ({len(batch)} messages)")

    def topic_deleted(self, topic: str) -> None:
        self.subscriptions.discard(topic)
        # No message of the peer's is lost by it.
        self.complain("topic.deleted", f"the topic {topic!r} was deleted")
        self.peer.close()

    def bad(self, error: PeerError) -> None:
        self._end(error.code, error.text)

    def send_error(self, code: str, text: str) -> None:
        """There is no way to say it."""

    def _end(self, code: str, text: str) -> None:
        self.complain(code, text)
        self._reset()
