"""Queues on the bus: a connector's port is a topic.

a connect            subscribe to the connector's topic, from now on
the first message    a token, if the connector requires one; a wrong one ends the connection
a message            publish to it; every subscriber gets it but the queue it came from
a message of the topic is sent to every queue, without its headers

The queue protocol has no errors. An error is counted and logged, and if it costs one of the peer's
messages the connection is reset. A reset differs from an orderly close, so a program that has
already closed its side can tell that a message was lost.
"""

from typing import Any, Protocol

from polybus import names
from polybus.batch import Batch
from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.edges.protocols.outgoing_payload import PayloadFraming, reference_of
from polybus.edges.protocols.peer import Peer
from polybus.edges.protocols.translator import Translator
from polybus.errors import PeerError, PolybusError
from polybus.services.accounts.access import AccountAccess
from polybus.wire import queue as wire
from polybus.wire.codec import LOGIN_BYTES_MAX, Login, Publish


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
        self._account = connector.account
        self._topic = names.full(connector.account, connector.topic.lower())
        self._needs_token = connector.token_required
        self.codec = wire.QueueCodec(self.limits, self._topic)
        if self._needs_token:
            self.access = edge.accounts.nobody
        else:
            access = edge.accounts.of_queue(self._account, peer.ip)
            if access is None:
                self._end("auth.needed", f"the account {self._account!r} cannot be used from here")
                return
            try:
                self.enter(access)
            except PolybusError as error:
                self._end(error.code, error.text)

    def take(self, event: Any) -> None:
        if self._needs_token and isinstance(event, Publish):
            self._needs_token = False
            first, *others = event.batches
            token = first.value(0)[:LOGIN_BYTES_MAX].decode(errors="replace").strip()
            super().take(Login("", token))
            rest = [batch for batch in (first.slice(1, len(first)), *others) if len(batch)]
            if not rest:
                return
            event = Publish(rest)
        super().take(event)

    def enter_by_certificate(self) -> None:
        """Ignored: the account of the connector owns the queue."""

    def enter(self, access: AccountAccess) -> None:
        if access.account != self._account:
            self._end("auth.failed", f"the token is not one of account {self._account!r}")
            return
        super().enter(access)
        try:
            # A peer that may only publish gets no messages.
            if self._topic in access.readable or self._topic not in (access.topics or ()):
                self.subscribe(self._topic)
        except PolybusError as error:
            self._end(error.code, error.text)

    def payload_framing(self, batch: Batch) -> PayloadFraming:
        return PayloadFraming(head=wire.encode_size(reference_of(batch).size))

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
        """The protocol has no errors; one about a login ends the connection."""
        if code.startswith("auth."):
            self._reset()

    def _end(self, code: str, text: str) -> None:
        self.complain(code, text)
        self._reset()
