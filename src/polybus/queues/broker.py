"""Brokers: names whose ports others connect to, for byte channels or for message queues.

Brokers of one pump connect in process, by channels over two buffers, unless they are given a
TcpTransport.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar

from polybus.batch import Buffer
from polybus.errors import UsageError
from polybus.queues.channel import Attempt, Binding, Channel, ChannelState, QueueLimits
from polybus.queues.message_queue import MessageQueue
from polybus.queues.pump import EventPump, Task
from polybus.queues.tcp import TcpTransport

PORT_MAX = 65535

End = TypeVar("End")


class Ring:
    """A first-in, first-out buffer of at most `size` bytes.

    Attributes:
        held_bytes: how many bytes can be read.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pieces: deque[Buffer] = deque()
        self.held_bytes = 0

    def push(self, buffers: Sequence[Buffer]) -> int:
        """Take in as much as fits, in order; return how many bytes that is."""
        held_before = self.held_bytes
        for data in buffers:
            # The writer may change its data later. Whole `bytes` never change and are not copied.
            piece = bytes(data[: self._size - self.held_bytes])
            if piece:
                self._pieces.append(piece)
                self.held_bytes += len(piece)
            if len(piece) < len(data):
                break
        return self.held_bytes - held_before

    def pull(self, size: int) -> bytes:
        """Remove and return up to `size` bytes."""
        missing = min(size, self.held_bytes)
        self.held_bytes -= missing
        taken = []
        while missing:
            piece = self._pieces.popleft()
            if len(piece) > missing:
                self._pieces.appendleft(memoryview(piece)[missing:])
                piece = piece[:missing]
            taken.append(piece)
            missing -= len(piece)
        return b"".join(taken)


class LocalChannel(Channel):
    """One end of a pair; it reads from its own ring and writes into its peer's."""

    def __init__(self, network: "LocalTransport", task: Task, limits: QueueLimits) -> None:
        super().__init__(network.pump, task, limits)
        self._network = network
        self.incoming = Ring(limits.ring_bytes)
        self.peer = self
        self.is_shut = False
        self._read_due = False

    def arrived(self) -> None:
        """The peer wrote or shut: wake the reader, if a read waits."""
        if self._reads and not self._read_due:
            self._read_due = True
            self._pump.soon(self._task, self._read_soon)

    def room(self) -> None:
        """The peer read or shut: wake the writer, if a write waits."""
        if self._writes and not self._flush_due:
            self._flush_due = True
            self._pump.soon(self._task, self.flush)

    def _read_soon(self) -> None:
        self._read_due = False
        self._read_event()

    def _pull(self, size: int) -> bytes | None:
        if not self.incoming.held_bytes:
            return None if self.peer.is_shut else b""
        data = self.incoming.pull(size)
        self.peer.room()
        return data

    def _push(self) -> int | None:
        if self.peer.is_shut:
            return None
        accepted = self.peer.incoming.push(self._unwritten())
        self.peer.arrived()
        return accepted

    def _await_readable(self) -> None:
        if self.incoming.held_bytes or self.peer.is_shut:
            self.arrived()

    def _await_writable(self) -> None:
        """The peer calls `room`."""

    def _shut(self) -> None:
        self.is_shut = True
        self._network.channels.discard(self)
        # Free the buffer now: the peer keeps a reference to this channel.
        self.incoming = Ring(1)
        if self._state is ChannelState.DISCONNECTED:
            self.peer.arrived()
            self.peer.room()


class LocalTransport:
    """The brokers of one pump, their bound ports, and the connects that wait for a port.

    TcpTransport has the same methods. Both call `connected` before `accepted` if both ends are in
    one process. Every call except `join` is made inside the pump.
    """

    def __init__(self, pump: EventPump) -> None:
        self.pump = pump
        self._names: set[str] = set()
        self._bindings: dict[tuple[str, int], Binding] = {}
        self._waiting: dict[tuple[str, int], dict[Attempt, None]] = {}
        self.channels: set[LocalChannel] = set()

    @classmethod
    def of(cls, pump: EventPump) -> "LocalTransport":
        """The transport that all in-process brokers of this pump share."""
        if pump.local is None:
            pump.local = cls(pump)
        network: LocalTransport = pump.local
        return network

    def join(self, name: str, pump: EventPump) -> None:
        """Add a broker. Raises UsageError `queue.name-taken`."""
        if name in self._names:
            raise UsageError("queue.name-taken", f"a broker named {name!r} already exists")
        self._names.add(name)

    def bind(self, name: str, port: int, binding: Binding) -> bool:
        """Accept connections on the broker's port; false if it is already bound."""
        if (name, port) in self._bindings:
            return False
        self._bindings[name, port] = binding
        for attempt in self._waiting.pop((name, port), ()):
            self.pump.soon(attempt.task, partial(self._match, (name, port), attempt))
        return True

    def unbind(self, name: str, port: int) -> bool:
        """Stop accepting; existing channels stay. False if the port is not bound."""
        return self._bindings.pop((name, port), None) is not None

    def connect(self, name: str, port: int, attempt: Attempt) -> bool:
        """Connect to a broker's port and report the result later; false if the name is unknown."""
        if name not in self._names:
            self.pump.soon(attempt.task, attempt.refused)
            return False
        self.pump.soon(attempt.task, partial(self._match, (name, port), attempt))
        return True

    def _match(self, address: tuple[str, int], attempt: Attempt) -> None:
        binding = self._bindings.get(address)
        if len(self.channels) + 2 > attempt.limits.connections_max:
            attempt.refused()
        elif binding is not None:
            self._pair(binding, attempt)
        elif attempt.timeout_s > 0:
            self._waiting.setdefault(address, {})[attempt] = None
            expire = partial(self._expire, address, attempt)
            self.pump.loop.call_later(attempt.timeout_s, self.pump.enter, attempt.task, expire)
        else:
            attempt.refused()

    def _expire(self, address: tuple[str, int], attempt: Attempt) -> None:
        waiting = self._waiting.get(address, {})
        if attempt in waiting:
            del waiting[attempt]
            attempt.refused()

    def _pair(self, binding: Binding, attempt: Attempt) -> None:
        ours = LocalChannel(self, attempt.task, attempt.limits)
        theirs = LocalChannel(self, binding.task, binding.limits)
        ours.peer, theirs.peer = theirs, ours
        self.channels |= {ours, theirs}
        self.pump.call(attempt.task, attempt.connected, ours)
        self.pump.call(binding.task, binding.accepted, theirs)


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
        transport: LocalTransport | TcpTransport | None = None,
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
