"""Brokers: names whose ports others connect to, for byte channels or for message queues."""

from typing import Generic, TypeVar

from polybus.errors import UsageError
from polybus.queues.channel import Attempt, Binding, BrokerTransport, Channel, QueueLimits
from polybus.queues.local import LocalTransport
from polybus.queues.message_queue import MessageQueue
from polybus.queues.pump import EventPump

PORT_MAX = 65535

End = TypeVar("End")


class _AcceptListener(Generic[End]):
    """Receives the queues or channels of a bound port."""

    def accepted(self, end: End, /) -> None:
        """A peer connected."""


class _ConnectListener(Generic[End]):
    """Receives the result of a connect: one of the two is called, once."""

    def connected(self, end: End, /) -> None:
        """It is open. In one process this comes before the other end's `accepted`."""

    def refused(self) -> None:
        """The broker does not exist, or it did not accept in time."""


AcceptListener = _AcceptListener[MessageQueue]
ConnectListener = _ConnectListener[MessageQueue]
ChannelAcceptListener = _AcceptListener[Channel]
ChannelConnectListener = _ConnectListener[Channel]


class _Ports(Generic[End]):
    """The ports of a named broker. Call everything but `name` from a runnable or a listener.

    Without a transport it reaches the brokers of the same pump; with a `TcpTransport`, the brokers
    in its registry.

    Raises:
        UsageError: `queue.name-taken`, the transport has a broker of that name.
    """

    def __init__(
        self,
        name: str,
        pump: EventPump,
        *,
        transport: BrokerTransport | None = None,
        connect_timeout_s: float = 0.0,
        limits: QueueLimits | None = None,
    ) -> None:
        self._name = name
        self._pump = pump
        self._limits = limits or QueueLimits()
        self._connect_timeout_s = connect_timeout_s
        self._transport = transport or LocalTransport.of(pump)
        self._transport.join(name, pump)

    @property
    def name(self) -> str:
        return self._name

    def bind(self, port: int, listener: _AcceptListener[End]) -> bool:
        """Accept every connection on the port until `unbind`; false if it is already bound.

        Raises:
            UsageError: `queue.outside-pump`, `queue.port-invalid`, and those of the transport.
        """
        self._check(port)
        binding = Binding(
            self._pump.current,
            self._limits,
            lambda channel: listener.accepted(self._end(channel)),
        )
        return self._transport.bind(self._name, port, binding)

    def unbind(self, port: int) -> bool:
        """Stop accepting on the port; open connections stay. False if it is not bound."""
        self._check(port)
        return self._transport.unbind(self._name, port)

    def connect(self, name: str, port: int, listener: _ConnectListener[End]) -> bool:
        """Connect to a port of the broker `name`; the listener receives the result.

        An unknown name is refused and returns false. A known broker has `connect_timeout_s` to bind
        the port.
        """
        self._check(port)
        attempt = Attempt(
            self._pump.current,
            self._limits,
            self._connect_timeout_s,
            lambda channel: listener.connected(self._end(channel)),
            listener.refused,
        )
        return self._transport.connect(name, port, attempt)

    def _check(self, port: int) -> None:
        self._pump.require_inside()
        if not 0 <= port <= PORT_MAX:
            raise UsageError("queue.port-invalid", f"port {port} is not between 0 and {PORT_MAX}")

    def _end(self, channel: Channel) -> End:
        """What the broker's listeners receive for a channel."""
        raise NotImplementedError


class Broker(_Ports[Channel]):
    """A broker of byte channels."""

    def _end(self, channel: Channel) -> Channel:
        return channel


class QueueBroker(_Ports[MessageQueue]):
    """A broker of message queues."""

    def _end(self, channel: Channel) -> MessageQueue:
        return MessageQueue(channel, self._pump, self._limits)
