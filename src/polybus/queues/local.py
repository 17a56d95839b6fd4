"""The in-process transport: brokers of one pump, channels over two ring buffers."""

from asyncio import TimerHandle
from collections import deque
from collections.abc import Sequence
from functools import partial

from polybus.batch import Buffer
from polybus.errors import UsageError
from polybus.queues.channel import Attempt, Binding, Channel, ChannelState, QueueLimits
from polybus.queues.pump import EventPump, Task


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

    def __init__(
        self, pump: EventPump, task: Task, limits: QueueLimits, network: "LocalTransport"
    ) -> None:
        super().__init__(pump, task, limits)
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
    """The brokers of one pump, their bound ports, and the connects that wait for a port."""

    def __init__(self, pump: EventPump) -> None:
        self._pump = pump
        self._names: set[str] = set()
        self._bindings: dict[tuple[str, int], Binding] = {}
        self._waiting: dict[tuple[str, int], dict[Attempt, TimerHandle]] = {}
        self.channels: set[LocalChannel] = set()

    @classmethod
    def of(cls, pump: EventPump) -> "LocalTransport":
        """The transport that all in-process brokers of this pump share."""
        if pump.local is None:
            pump.local = cls(pump)
        network: LocalTransport = pump.local
        return network

    def join(self, name: str, pump: EventPump) -> None:
        if name in self._names:
            raise UsageError("queue.name-taken", f"a broker named {name!r} exists already")
        self._names.add(name)

    def bind(self, name: str, port: int, binding: Binding) -> bool:
        if (name, port) in self._bindings:
            return False
        self._bindings[name, port] = binding
        for attempt, timer in self._waiting.pop((name, port), {}).items():
            timer.cancel()
            self._pump.soon(attempt.task, partial(self._match, (name, port), attempt))
        return True

    def unbind(self, name: str, port: int) -> bool:
        return self._bindings.pop((name, port), None) is not None

    def connect(self, name: str, port: int, attempt: Attempt) -> bool:
        if name not in self._names:
            self._pump.soon(attempt.task, attempt.refused)
            return False
        self._pump.soon(attempt.task, partial(self._match, (name, port), attempt))
        return True

    def _match(self, address: tuple[str, int], attempt: Attempt) -> None:
        binding = self._bindings.get(address)
        if len(self.channels) + 2 > attempt.limits.connections_max:
            attempt.refused()
        elif binding is not None:
            self._pair(binding, attempt)
        elif attempt.timeout_s > 0:
            expire = partial(
                self._pump.enter, attempt.task, partial(self._expire, address, attempt)
            )
            timer = self._pump.loop.call_later(attempt.timeout_s, expire)
            self._waiting.setdefault(address, {})[attempt] = timer
        else:
            attempt.refused()

    def _expire(self, address: tuple[str, int], attempt: Attempt) -> None:
        waiting = self._waiting.get(address, {})
        if waiting.pop(attempt, None) is not None:
            if not waiting:
                del self._waiting[address]
            attempt.refused()

    def _pair(self, binding: Binding, attempt: Attempt) -> None:
        ours = LocalChannel(self._pump, attempt.task, attempt.limits, self)
        theirs = LocalChannel(self._pump, binding.task, binding.limits, self)
        ours.peer, theirs.peer = theirs, ours
        self.channels |= {ours, theirs}
        self._pump.call(attempt.task, attempt.connected, ours)
        self._pump.call(binding.task, binding.accepted, theirs)
