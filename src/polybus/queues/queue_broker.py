"""QueueBroker: a broker whose channels carry whole messages."""

from __future__ import annotations

from polybus.queues.broker import Broker, ChannelAcceptListener, ChannelConnectListener
from polybus.queues.channel import Channel
from polybus.queues.limits import QueueLimits
from polybus.queues.message_queue import MessageQueue
from polybus.queues.pump import EventPump
from polybus.queues.transport import Transport


class AcceptListener:
    """Who takes the queues of a bound port."""

    def accepted(self, queue: MessageQueue) -> None:
        """Somebody connected."""


class ConnectListener:
    """Who hears how a connect went: one of the two is called, once."""

    def connected(self, queue: MessageQueue) -> None:
        """The queue is there. In one process this comes before the other end's `accepted`."""

    def refused(self) -> None:
        """There is no such broker, or nobody accepted in time."""


class _Accepting(ChannelAcceptListener):
    """Makes queues of the channels that a port accepts."""

    def __init__(self, broker: Broker, listener: AcceptListener) -> None:
        self._broker = broker
        self._listener = listener

    def accepted(self, channel: Channel) -> None:
        self._listener.accepted(MessageQueue(channel, self._broker.pump, self._broker.limits))


class _Connecting(ChannelConnectListener):
    """Makes a queue of the channel that a connect gave."""

    def __init__(self, broker: Broker, listener: ConnectListener) -> None:
        self._broker = broker
        self._listener = listener

    def connected(self, channel: Channel) -> None:
        self._listener.connected(MessageQueue(channel, self._broker.pump, self._broker.limits))

    def refused(self) -> None:
        self._listener.refused()


class QueueBroker:
    """A name whose ports others connect to, for queues of messages.

    Everything but the constructor and `name` is called from a posted runnable or a listener.
    Without a transport, it meets the brokers of the same pump; with a `TcpTransport`, those that
    its registry knows.

    Raises:
        UsageError: `queue.name-taken` if the transport has a broker of that name.
    """

    def __init__(
        self,
        name: str,
        pump: EventPump,
        *,
        transport: Transport | None = None,
        connect_timeout_s: float = 0.0,
        limits: QueueLimits | None = None,
    ) -> None:
        self._broker = Broker(
            name, pump, transport=transport, connect_timeout_s=connect_timeout_s, limits=limits
        )

    @property
    def name(self) -> str:
        return self._broker.name

    def bind(self, port: int, listener: AcceptListener) -> bool:
        """Accept every connect on the port until `unbind`; false if it is bound already."""
        return self._broker.bind(port, _Accepting(self._broker, listener))

    def unbind(self, port: int) -> bool:
        """Accept no more on the port; its queues stay. False if it is not bound."""
        return self._broker.unbind(port)

    def connect(self, name: str, port: int, listener: ConnectListener) -> bool:
        """Connect to a port of the broker `name`; the listener hears how it went.

        False, and `refused`, if nobody knows the name. A known broker has `connect_timeout_s` to
        bind the port.
        """
        return self._broker.connect(name, port, _Connecting(self._broker, listener))
