"""MessageQueue: whole messages, in order, both ways, over a channel.

Messages sent in one turn of the pump leave in one write: small ones are joined with their lengths,
a large one is written uncopied after its length. `SENDING` lists the transitions of the sender, and
wire/queue.py those of the receiver; docs/protocols/queues.md draws both.
"""

from collections import deque
from enum import Enum
from threading import get_ident

from polybus import scan
from polybus.batch import Buffer
from polybus.errors import BusyError, UsageError
from polybus.queues.channel import Channel, ChannelListener, QueueLimits
from polybus.queues.pump import EventPump, Task
from polybus.scan.binary_py import LENGTH_BYTES
from polybus.wire.queue import QueueReader, encode_length


class Sending(Enum):
    LENGTH = "Length"
    """The next bytes to write are a message's length."""
    MESSAGE = "Message"
    """The length is written, the message follows."""
    CLOSED = "Closed"
    """This end closed: nothing more is sent, waiting messages included."""


SENDING = {
    (Sending.LENGTH, "a run of small messages is written"): Sending.LENGTH,
    (Sending.LENGTH, "a large message's length is written"): Sending.MESSAGE,
    (Sending.LENGTH, "close"): Sending.CLOSED,
    (Sending.MESSAGE, "the message is written"): Sending.LENGTH,
    (Sending.MESSAGE, "close"): Sending.CLOSED,
}
"""After a remote close the transitions stay the same, but written bytes are dropped."""

RUN_BYTES_MAX = 256 << 10
"""How many bytes of small messages one write joins."""
SMALL_BYTES_MAX = 32 << 10
"""Messages up to this size are copied into a run; larger ones are written uncopied."""
READ_BYTES_MAX = 256 << 10
MESSAGE_COST_BYTES = 64
"""Memory of a waiting message beside its bytes, so that empty messages count too."""


class MessageListener:
    """Receives the events of a queue."""

    def received(self, message: bytes) -> None:
        """A message arrived."""

    def sent(self, message: bytes) -> None:
        """The transport has accepted a message, or dropped it because the other end is gone."""

    def closed(self) -> None:
        """Either end closed the queue; called once, and no `received` follows."""


class MessageQueue(ChannelListener):
    """One end of a two-way message pipe. Call it from posted runnables and listeners only.

    The channel is not read until a listener is set, so no message is lost before.
    """

    borrows = True

    def __init__(self, channel: Channel, pump: EventPump, limits: QueueLimits) -> None:
        self._channel = channel
        self._pump = pump
        self._limits = limits
        self._task: Task = pump.current
        self._listener: MessageListener | None = None
        self._reader = QueueReader(limits.message_bytes_max)
        self._sending = Sending.LENGTH
        # Waiting messages are `_outbox[_first:]`; messages being written are in `_runs`.
        self._outbox: list[bytes] = []
        self._first = 0
        self._outbox_bytes = 0
        self._runs: deque[list[bytes]] = deque()
        self._flush_due = False
        self._closed = False
        channel.set_listener(self)

    @property
    def closed(self) -> bool:
        """Whether this end closed, or the other did and every arrived message is delivered."""
        return self._closed

    def set_listener(self, listener: MessageListener) -> None:
        """Set or replace the listener.

        Raises:
            UsageError: `queue.closed` after a local close, `queue.outside-pump`.
        """
        self._pump.require_inside()
        if self._sending is Sending.CLOSED:
            raise UsageError("queue.closed", "this end of the queue is closed")
        first = self._listener is None
        self._listener = listener
        self._task = self._pump.current
        if first:
            self._channel.read(READ_BYTES_MAX, at_least=1)

    def send(self, message: Buffer) -> None:
        """Send a message, in order; the listener's `sent` follows.

        After a remote close the message is dropped, and `sent` is still called.

        Raises:
            UsageError: `queue.closed` after a local close, `queue.message-too-large`,
                `queue.message-type`, `queue.outside-pump`.
            BusyError: `queue.outbox-full`; retry after the next `sent`.
        """
        # Inlined instead of helpers: every message makes this call.
        if get_ident() != self._pump.inside:
            self._pump.require_inside()
        if type(message) is not bytes:
            message = _as_bytes(message)
        size = len(message)
        if (
            size > self._limits.message_bytes_max
            or self._outbox_bytes > self._limits.outbox_bytes_max
            or self._sending is Sending.CLOSED
        ):
            raise self._refusal(size)
        self._outbox.append(message)
        self._outbox_bytes += size + MESSAGE_COST_BYTES
        if not self._flush_due:
            self._flush_due = True
            self._pump.at_turn_end(self._task, self._flush)

    def close(self) -> None:
        """Close the queue and drop messages that are not `sent` yet. Idempotent.

        Raises:
            UsageError: `queue.outside-pump`.
        """
        self._pump.require_inside()
        self._sending = Sending.CLOSED
        self._closed = True
        self._outbox.clear()
        self._runs.clear()
        self._channel.disconnect()

    def _refusal(self, size: int) -> UsageError | BusyError:
        limits = self._limits
        if self._sending is Sending.CLOSED:
            return UsageError("queue.closed", "this end of the queue is closed")
        if size > limits.message_bytes_max:
            text = f"the message is {size} bytes, over {limits.message_bytes_max}"
            return UsageError("queue.message-too-large", f"{text} (message_bytes_max)")
        text = f"more than {limits.outbox_bytes_max} bytes wait to be sent (outbox_bytes_max)"
        return BusyError("queue.outbox-full", text, retry_after_s=0.1)

    # Sending

    def _flush(self) -> None:
        """Write the next messages, unless the channel is still writing the last ones."""
        self._flush_due = False
        if self._runs or self._sending is Sending.CLOSED or self._first == len(self._outbox):
            return
        first = self._first
        end, run = scan.join_queue(self._outbox, first, RUN_BYTES_MAX, SMALL_BYTES_MAX)
        if end > first:
            self._channel.write(run)
        else:
            end = first + 1
            self._channel.write(encode_length(self._outbox[first]))
            self._channel.write(self._outbox[first])
        self._runs.append(self._outbox[first:end])
        self._first = end
        if 2 * end >= len(self._outbox):
            # Shrinking the list only when half is used keeps this linear.
            del self._outbox[:end]
            self._first = 0
        self._channel.flush()

    def wrote(self, data: Buffer) -> None:
        # A run of one empty message is as long as a length, too.
        is_length = len(data) == LENGTH_BYTES and len(self._runs[0][0]) > 0
        if self._sending is Sending.LENGTH and is_length:
            self._sending = Sending.MESSAGE
            return
        run = self._runs.popleft()
        lengths_bytes = 0 if self._sending is Sending.MESSAGE else LENGTH_BYTES * len(run)
        self._sending = Sending.LENGTH
        self._outbox_bytes -= len(data) - lengths_bytes + MESSAGE_COST_BYTES * len(run)
        if self._outbox and not self._flush_due:
            self._flush_due = True
            self._pump.at_turn_end(self._task, self._flush)
        self._report_sent(run)

    def _report_sent(self, run: list[bytes]) -> None:
        self._pump.current = self._task
        for message in run:
            if self._listener is None or self._sending is Sending.CLOSED:
                return
            try:
                self._listener.sent(message)
            except Exception as error:
                self._task.report(error)

    # Receiving

    def read(self, data: Buffer) -> None:
        messages = self._reader.receive(data)
        self._pump.current = self._task
        for message in messages:
            if self._listener is None or self._closed:
                return
            try:
                self._listener.received(message)
            except Exception as error:
                self._task.report(error)
        if self._closed:
            return
        if self._reader.error is not None:
            self._task.report(self._reader.error)
            self.close()
            return
        size = max(READ_BYTES_MAX, self._reader.missing_bytes)
        self._channel.read(size, at_least=1)

    def disconnected(self) -> None:
        self._closed = True
        if self._listener is not None:
            self._pump.call(self._task, self._listener.closed)


def _as_bytes(message: object) -> bytes:
    if isinstance(message, bytes | bytearray | memoryview):
        return bytes(message)
    raise UsageError("queue.message-type", f"a message must be bytes, not {type(message).__name__}")
