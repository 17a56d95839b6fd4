"""Broker: a name whose ports others connect to, for channels of bytes."""

from __future__ import annotations

from polybus.errors import UsageError
from polybus.queues.channel import Channel
from polybus.queues.limits import QueueLimits
from polybus.queues.local import LocalTransport
from polybus.queues.pump import EventPump
from polybus.queues.transport import Attempt, Binding, Transport

PORT_MAX = 65535


class ChannelAcceptListener:
    """Who takes the channels of a bound port."""

    def accepted(self, channel: Channel) -> None:
        """Somebody connected."""


class ChannelConnectListener:
    """Who hears how a connect went: one of the two is called, once."""

    def connected(self, channel: Channel) -> None:
        """The channel is there."""

    def refused(self) -> None:
        """There is no such broker, or nobody accepted in time."""


class Broker:
    """Binds ports and connects to those of other brokers, in process or over a transport.

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
        self.pump = pump
        self.limits = limits or QueueLimits()
        self._name = name
        self._connect_timeout_s = connect_timeout_s
        self._transport = transport or LocalTransport.of(pump)
        self._transport.join(name, pump)

    @property
    def name(self) -> str:
        return self._name

    def bind(self, port: int, listener: ChannelAcceptListener) -> bool:
        """Accept every connect on the port until `unbind`; false if it is bound already.

        Raises:
            UsageError: `queue.outside-pump`, `queue.port-invalid`, and what the transport adds.
        """
        self._check(port)
        binding = Binding(self.pump.current, self.limits, listener.accepted)
        return self._transport.bind(self._name, port, binding)

    def unbind(self, port: int) -> bool:
        """Accept no more on the port; its channels stay. False if it is not bound."""
        self._check(port)
        return self._transport.unbind(self._name, port)

    def connect(self, name: str, port: int, listener: ChannelConnectListener) -> bool:
        """Connect to a port of the broker `name`; the listener hears how it went.

        False, and `refused`, if nobody knows the name. A known broker has `connect_timeout_s` to
        bind the port.
        """
        self._check(port)
        attempt = Attempt(
            self.pump.current,
            self.limits,
            self._connect_timeout_s,
            listener.connected,
            listener.refused,
        )
        return self._transport.connect(name, port, attempt)

    def _check(self, port: int) -> None:
        self.pump.require_inside()
        if not 0 <= port <= PORT_MAX:
            raise UsageError("queue.port-invalid", f"port {port} is not one of 0 to {PORT_MAX}")
