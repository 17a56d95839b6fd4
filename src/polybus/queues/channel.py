"""Channel: a two-way stream of bytes with read and write actions, over any transport.

An action is given once and ends once: a read when its bytes are there, a write when all its bytes
are on their way, however many pieces that takes. Actions of a kind end in the order they were
given. What a channel is, as a table:
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from io import BytesIO
from itertools import islice

from polybus.errors import BusyError, UsageError
from polybus.queues.limits import QueueLimits
from polybus.queues.pump import EventPump
from polybus.queues.ring import Buffer
from polybus.queues.task import Task

PIECES_MAX = 64
"""How many writes go to the transport in one go."""


class Life(Enum):
    OPEN = "Open"
    DROPPING = "Dropping"
    """The other end cannot be written to any more: writes end at once and their bytes are dropped.
    What has arrived from it is still read."""
    ENDED = "Ended"
    """The other end disconnected and everything is read; writes go on being dropped."""
    DISCONNECTED = "Disconnected"
    """This end disconnected: no action is taken any more, those that waited never end."""


LIFE = {
    (Life.OPEN, "a write meets a closed end"): Life.DROPPING,
    (Life.OPEN, "the end of the stream is read"): Life.ENDED,
    (Life.OPEN, "disconnect"): Life.DISCONNECTED,
    (Life.DROPPING, "the end of the stream is read"): Life.ENDED,
    (Life.DROPPING, "disconnect"): Life.DISCONNECTED,
    (Life.ENDED, "disconnect"): Life.DISCONNECTED,
}


class ChannelListener:
    """Who hears what becomes of a channel's actions."""

    borrows = False
    """Whether a view of bytes that change once `read` returns will do: it spares a copy."""

    def read(self, data: Buffer) -> None:
        """A read action ended; `data` is bytes, or a view for a listener that borrows."""

    def wrote(self, data: Buffer) -> None:
        """A write action ended."""

    def disconnected(self) -> None:
        """The channel is over, by either end's doing; called once, and no `read` comes after it."""


class Channel:
    """The actions of one end; the transports below it move bytes (`_pull`, `_push`, `_shut`).

    A channel belongs to the task that bound or connected, until a listener is set: then to that
    one's.
    """

    def __init__(self, pump: EventPump, task: Task, limits: QueueLimits) -> None:
        self._pump = pump
        self._task = task
        self._limits = limits
        self._listener = ChannelListener()
        self._life = Life.OPEN
        self._reads: deque[tuple[int, int]] = deque()
        self._gathered = BytesIO()
        self._writes: deque[Buffer] = deque()
        self._written_bytes = 0
        self._flush_due = False
        self._told = False

    @property
    def disconnected(self) -> bool:
        """Whether this end disconnected, or the other did and everything is read."""
        return self._life in (Life.DISCONNECTED, Life.ENDED)

    # Actions

    def set_listener(self, listener: ChannelListener) -> None:
        self._pump.require_inside()
        self._listener = listener
        self._task = self._pump.current

    def read(self, size: int, *, at_least: int | None = None) -> None:
        """Read `size` bytes, or as many of them as are there once that is `at_least`.

        Raises:
            UsageError: `queue.closed` after a local disconnect, `queue.outside-pump`.
            BusyError: `queue.actions-full`.
        """
        self._check(len(self._reads))
        at_least = size if at_least is None else at_least
        if not 0 < at_least <= size:
            raise UsageError("queue.read-size", "a read is of 1 byte or more")
        self._reads.append((size, at_least))
        if self._life is not Life.ENDED:
            self._await_readable()

    def write(self, data: Buffer) -> None:
        """Write all of `data`, which must not change until `wrote`. Raises as `read` does."""
        self._check(len(self._writes))
        self._writes.append(data)
        if not self._flush_due:
            self._flush_due = True
            self._pump.at_turn_end(self._task, self.flush)

    def disconnect(self) -> None:
        """End the channel: actions that wait are dropped. Again, it does nothing."""
        self._pump.require_inside()
        if self._life is Life.DISCONNECTED:
            return
        shut = self._life is Life.ENDED
        self._life = Life.DISCONNECTED
        self._reads.clear()
        self._writes.clear()
        if not self._told:
            self._told = True
            self._pump.soon(self._task, self._listener.disconnected)
        if not shut:
            self._shut()

    def _check(self, waiting: int) -> None:
        self._pump.require_inside()
        if self._life is Life.DISCONNECTED:
            raise UsageError("queue.closed", "this end has disconnected")
        if waiting >= self._limits.actions_max:
            text = f"{waiting} actions wait already (actions_max)"
            raise BusyError("queue.actions-full", text, retry_after_s=0.1)

    # Events

    def flush(self) -> None:
        """Write as much as can be written now; the transport calls again when there is room."""
        self._flush_due = False
        # What listeners write meanwhile waits for its own turn, or this might never end.
        ending = len(self._writes)
        while ending > 0 and self._writes:
            if self._life is Life.OPEN and self._written_bytes < len(self._writes[0]):
                accepted = self._push()
                if accepted is None:
                    self._life = Life.DROPPING
                elif accepted:
                    self._written_bytes += accepted
                else:
                    self._await_writable()
                    return
            ending -= self._end_writes(ending)

    def _end_writes(self, count_max: int) -> int:
        """End the actions whose bytes are all written, or dropped; return how many."""
        count = 0
        while self._writes and count < count_max:
            first = self._writes[0]
            if self._life is Life.OPEN:
                if self._written_bytes < len(first):
                    break
                self._written_bytes -= len(first)
            self._writes.popleft()
            count += 1
            self._pump.call(self._task, self._listener.wrote, first)
        return count

    def _unwritten(self) -> list[Buffer]:
        """What to write next, in order."""
        writes = list(islice(self._writes, PIECES_MAX))
        if self._written_bytes:
            # Only the first can be written in part: what is written whole has ended.
            writes[0] = memoryview(writes[0])[self._written_bytes :]
        return writes

    def _read_event(self) -> None:
        """The transport has bytes, or the end of the stream: continue the first read action."""
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
        self._life = Life.ENDED
        self._reads.clear()
        self._shut()
        # Who waits for its writes hears of them first, as if they had gone out.
        self.flush()
        if not self._told:
            self._told = True
            self._pump.call(self._task, self._listener.disconnected)

    # What a transport does

    def _pull(self, size: int) -> Buffer | None:
        """Up to `size` bytes, none if there are none now, None at the end of the stream.

        They may change at the next call.
        """
        raise NotImplementedError

    def _push(self) -> int | None:
        """Accept bytes of `_unwritten()`, 0 without room; None if nobody reads any more."""
        raise NotImplementedError

    def _await_readable(self) -> None:
        """Call `_read_event` when there is something to read; asked again, it changes nothing."""
        raise NotImplementedError

    def _await_writable(self) -> None:
        """Call `flush` when there is room."""
        raise NotImplementedError

    def _shut(self) -> None:
        """Tell the other end, and let go."""
        raise NotImplementedError
