"""Channel: a two-way stream of bytes with read and write actions, the same over every transport.

An action completes once: a read when its bytes have arrived, a write when the transport has
accepted all its bytes. Reads complete in the order they were requested, and so do writes.
`CHANNEL_STATES` lists the transitions; docs/protocols/queues.md draws them. `QueueLimits` has every
limit of the queue framework, `Binding` and `Attempt` what brokers give a transport.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from itertools import islice

from polybus.batch import Buffer
from polybus.errors import BusyError, UsageError
from polybus.queues.pump import EventPump, Task

LENGTH_MAX = (1 << 31) - 1
PIECES_MAX = 64
"""How many writes the transport gets in one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits of one broker's queues; docs/protocols/queues.md says what happens at each."""

    message_bytes_max: int = 64 << 20
    outbox_bytes_max: int = 64 << 20
    """Bytes that may wait in a queue before `send` is refused."""
    ring_bytes: int = 256 << 10
    """The buffer of an in-process channel, for each direction."""
    actions_max: int = 10_000
    """How many reads, and how many writes, may wait in a channel."""
    connections_max: int = 10_000
    """Channels of one transport; more connections are refused."""
    dial_timeout_s: float = 10.0
    """How long a TCP handshake may take."""
    linger_s: float = 5.0
    """How long a closed TCP channel waits until the other end has read everything."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise UsageError("queue.limit", f"{name} must be more than 0")
        if self.message_bytes_max > LENGTH_MAX:
            raise UsageError("queue.limit", f"message_bytes_max must be at most {LENGTH_MAX}")


class ChannelState(Enum):
    OPEN = "Open"
    DROPPING = "Dropping"
    """The other end no longer reads: writes complete at once and their bytes are dropped. Bytes
    that arrived from it can still be read."""
    ENDED = "Ended"
    """The other end disconnected and everything is read; writes are still dropped."""
    DISCONNECTED = "Disconnected"
    """This end disconnected: new actions are refused and waiting ones never complete."""


CHANNEL_STATES = {
    (ChannelState.OPEN, "a write meets a closed end"): ChannelState.DROPPING,
    (ChannelState.OPEN, "the end of the stream is read"): ChannelState.ENDED,
    (ChannelState.OPEN, "disconnect"): ChannelState.DISCONNECTED,
    (ChannelState.DROPPING, "the end of the stream is read"): ChannelState.ENDED,
    (ChannelState.DROPPING, "disconnect"): ChannelState.DISCONNECTED,
    (ChannelState.ENDED, "disconnect"): ChannelState.DISCONNECTED,
}


class ChannelListener:
    """Receives the results of a channel's actions."""

    borrows = False
    """True if `read` may get a view whose bytes change after it returns; this saves a copy."""

    def read(self, data: Buffer) -> None:
        """A read completed; `data` is bytes, or a view if the listener borrows."""

    def wrote(self, data: Buffer) -> None:
        """A write completed."""

    def disconnected(self) -> None:
        """Either end disconnected; called once, and no `read` follows."""


class Channel:
    """The actions of one end; a transport's subclass moves bytes (`_pull`, `_push`, `_shut`).

    A channel belongs to the task that bound or connected, and from `set_listener` on to the task
    that set the listener.
    """

    def __init__(self, pump: EventPump, task: Task, limits: QueueLimits) -> None:
        self._pump = pump
        self._task = task
        self._limits = limits
        self._listener = ChannelListener()
        self._state = ChannelState.OPEN
        self._reads: deque[tuple[int, int]] = deque()
        self._gathered = BytesIO()
        self._writes: deque[Buffer] = deque()
        self._written_bytes = 0
        self._flush_due = False
        self._notified = False

    @property
    def disconnected(self) -> bool:
        """Whether this end disconnected, or the other did and everything is read."""
        return self._state in (ChannelState.DISCONNECTED, ChannelState.ENDED)

    # Actions

    def set_listener(self, listener: ChannelListener) -> None:
        self._pump.require_inside()
        self._listener = listener
        self._task = self._pump.current

    def read(self, size: int, *, at_least: int | None = None) -> None:
        """Read `size` bytes; with `at_least`, complete as soon as that many have arrived.

        Raises:
            UsageError: `queue.closed` after a local disconnect, `queue.outside-pump`,
                `queue.read-size`.
            BusyError: `queue.actions-full`.
        """
        self._check(len(self._reads))
        at_least = size if at_least is None else at_least
        if not 0 < at_least <= size:
            raise UsageError(
                "queue.read-size", f"at_least is {at_least}; it must be 1 to size ({size})"
            )
        self._reads.append((size, at_least))
        if self._state is not ChannelState.ENDED:
            self._await_readable()

    def write(self, data: Buffer) -> None:
        """Write all of `data`, which must not change until `wrote`. Raises like `read`."""
        self._check(len(self._writes))
        self._writes.append(data)
        if not self._flush_due:
            self._flush_due = True
            self._pump.at_turn_end(self._task, self.flush)

    def disconnect(self) -> None:
        """End the channel and drop waiting actions. Idempotent."""
        self._pump.require_inside()
        if self._state is ChannelState.DISCONNECTED:
            return
        shut = self._state is ChannelState.ENDED
        self._state = ChannelState.DISCONNECTED
        self._reads.clear()
        self._writes.clear()
        if not self._notified:
            self._notified = True
            self._pump.soon(self._task, self._listener.disconnected)
        if not shut:
            self._shut()

    def _check(self, waiting: int) -> None:
        self._pump.require_inside()
        if self._state is ChannelState.DISCONNECTED:
            raise UsageError("queue.closed", "this end has disconnected")
        if waiting >= self._limits.actions_max:
            text = f"{waiting} actions are already waiting (actions_max)"
            raise BusyError("queue.actions-full", text, retry_after_s=0.1)

    # Events

    def flush(self) -> None:
        """Write as much as fits now; the transport calls again when there is room."""
        self._flush_due = False
        # Writes that listeners add meanwhile wait for a later flush, or this might never return.
        ending = len(self._writes)
        while ending > 0 and self._writes:
            if self._state is ChannelState.OPEN and self._written_bytes < len(self._writes[0]):
                accepted = self._push()
                if accepted is None:
                    self._state = ChannelState.DROPPING
                elif accepted:
                    self._written_bytes += accepted
                else:
                    self._await_writable()
                    return
            ending -= self._end_writes(ending)

    def _end_writes(self, count_max: int) -> int:
        """Complete the writes whose bytes are all written or dropped; return how many."""
        count = 0
        while self._writes and count < count_max:
            first = self._writes[0]
            if self._state is ChannelState.OPEN:
                if self._written_bytes < len(first):
                    break
                self._written_bytes -= len(first)
            self._writes.popleft()
            count += 1
            self._pump.call(self._task, self._listener.wrote, first)
        return count

    def _unwritten(self) -> list[Buffer]:
        """The next bytes to write, in order."""
        writes = list(islice(self._writes, PIECES_MAX))
        if self._written_bytes:
            # Only the first can be partly written: complete writes have left the queue.
            writes[0] = memoryview(writes[0])[self._written_bytes :]
        return writes

    def _read_event(self) -> None:
        """The transport has bytes or the end of the stream: continue the first read."""
        if not self._reads or self.disconnected:
            return
        size, at_least = self._reads[0]
        gathered_bytes = self._gathered.tell()
        data = self._pull(size - gathered_bytes)
        if data is None:
            self._end_of_stream()
            return
        if gathered_bytes or len(data) < at_least:
            self._gathered.write(data)
            if self._gathered.tell() < at_least:
                self._await_readable()
                return
            data = self._gathered.getvalue()
            self._gathered = BytesIO()
        elif not self._listener.borrows:
            data = bytes(data)
        self._reads.popleft()
        self._pump.call(self._task, self._listener.read, data)
        if self._reads and not self.disconnected:
            self._await_readable()

    def _end_of_stream(self) -> None:
        self._state = ChannelState.ENDED
        self._reads.clear()
        self._shut()
        # Waiting writes complete before `disconnected`, as if their bytes had been sent.
        self.flush()
        if not self._notified:
            self._notified = True
            self._pump.call(self._task, self._listener.disconnected)

    # What a transport implements

    def _pull(self, size: int) -> Buffer | None:
        """Up to `size` bytes, empty if none have arrived, None at the end of the stream.

        The bytes may change at the next call.
        """
        raise NotImplementedError

    def _push(self) -> int | None:
        """Accept bytes of `_unwritten()`; 0 if there is no room, None if the other end is gone."""
        raise NotImplementedError

    def _await_readable(self) -> None:
        """Call `_read_event` when there is something to read. Idempotent."""
        raise NotImplementedError

    def _await_writable(self) -> None:
        """Call `flush` when there is room."""
        raise NotImplementedError

    def _shut(self) -> None:
        """Tell the other end and release resources."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """A bound port of a broker."""

    task: Task
    limits: QueueLimits
    accepted: Callable[[Channel], object]


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """A connect in progress; exactly one of `connected` and `refused` is called."""

    task: Task
    limits: QueueLimits
    timeout_s: float
    connected: Callable[[Channel], object]
    refused: Callable[[], object]
