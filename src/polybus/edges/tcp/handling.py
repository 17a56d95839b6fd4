# cython: annotation_typing=False
"""Scans and publishes what the pump has read.

Plain messages of neighbouring reads are published together, with one call of the bus; everything
else goes to its connection. An exception that a connection does not handle is a bug of ours; it
closes that connection, and no other.

Compiled as it is (handling.pxd), or run as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython
if not cython.compiled:
    from polybus.batch import Batch
    from polybus.edges.tcp.transport import SocketTransport
from polybus.errors import PolybusError, StorageError, UsageError

if TYPE_CHECKING:
    from polybus.batch import Buffer
    from polybus.bus.access import Access
    from polybus.bus.bus import Bus
    from polybus.bus.subscriptions import Subscriber
    from polybus.bus.topic import Topic
    from polybus.edges.tcp.outbox import Outbox, Outboxes
    from polybus.services.accounts.access import AccountAccess
    from polybus.wire.codec import PlainCodec

logger = logging.getLogger("polybus.tcp")

SMALL_READ_BYTES = 4 << 10
"""Messages of reads below this size are counted: their peers write single messages."""
SMALL_READS_MIN = 3
"""A peer of this many small reads in a row writes single messages: one may end a larger write."""


PlainRead = tuple["SocketTransport", "PlainCodec[Any]", "list[Batch]", int, int]
"""Batches of one read, its codec, and where they are in the data that the read is a part of."""


class JointPublisher:
    """The publishers of messages that were published together. Implements bus.Publisher."""

    __slots__ = ("_of_batch", "_publishers")

    def __init__(self, run: list[PlainRead]) -> None:
        self._publishers = [transport.connection.translator for transport, _, _, _, _ in run]
        # By identity: the bus gives back the batches it was given.
        self._of_batch = {
            id(batch): transport.connection.translator
            for transport, _, batches, _, _ in run
            for batch in batches
        }

    @property
    def access(self) -> Access:
        """All have the same: see `_publish`."""
        access: Access = self._publishers[0].access
        return access

    def receipt(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._of_batch[id(batch)].receipt((batch,))

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        self._of_batch[id(batch)].refuse(batch, error)

    def hold(self, gate: Hashable) -> bool:
        held = [publisher.hold(gate) for publisher in self._publishers]
        return any(held)

    def release(self, gate: Hashable) -> None:
        for publisher in self._publishers:
            publisher.release(gate)


@cython.cclass
class ReadHandler:
    """Handles the reads of a pump; see the module docstring."""

    __slots__ = (
        "_bus",
        "_lane_account",
        "_lane_boxes",
        "_lane_of",
        "_outboxes",
        "single_came",
        "small_messages",
    )

    def __init__(self, bus: Bus, outboxes: Outboxes) -> None:
        self._bus = bus
        self._outboxes = outboxes
        # The messages of small reads since the pump has set this to 0, and whether a peer that
        # writes single messages has sent one since it has set this to False.
        self.small_messages = 0
        self.single_came = False
        # The subscribers of the last batches, whose names these had, and their outboxes.
        self._lane_of: object = None
        self._lane_account = ""
        self._lane_boxes: list[Outbox] | None = None

    def forget(self) -> None:
        """Keep no reference to a subscriber, which may be closing."""
        self._lane_of = self._lane_boxes = None

    def handle(
        self, pieces: list[tuple[SocketTransport, int, int]], data: Buffer, first: int
    ) -> None:
        """Handle reads that are `data`, which was at `first` in the buffer."""
        run: list[PlainRead] = []
        run_stop = 0
        run_access: object = None
        for transport, start, stop in pieces:
            start -= first
            stop -= first
            if self._is_taken(transport, data, start, stop):
                continue
            codec = transport.plain
            end = start
            batches: list[Batch] = []
            if codec is not None:
                end, batches = self._scan(transport, codec, data, start, stop)
                if batches:
                    if run and (start != run_stop or transport.access is not run_access):
                        self._publish(run, data)
                        run = []
                    run.append((transport, codec, batches, start, end))
                    run_stop = end
                    run_access = transport.access
            connection = transport.connection
            if end < stop or connection.unfinished_bytes:
                if run:
                    self._publish(run, data)
                    run = []
                try:
                    if batches:
                        connection.message_completed()
                    connection.receive(data[end:stop] if stop - end < len(data) else data)
                except Exception:
                    drop(transport)
        if run:
            self._publish(run, data)

    def _is_taken(self, transport: SocketTransport, data: Buffer, start: int, stop: int) -> bool:
        """Whether this read needs nothing of its connection."""
        taker = transport.taker
        try:
            return taker is not None and taker.take(data, start, stop)
        except Exception:
            drop(transport)
            return True

    def _scan(
        self,
        transport: SocketTransport,
        codec: PlainCodec[Any],
        data: Buffer,
        start: int,
        stop: int,
    ) -> tuple[int, list[Batch]]:
        """Where the plain messages of a read end, and their batches."""
        try:
            end, batches = codec.scan_plain(data, start, stop)
        except Exception:
            drop(transport)
            return stop, []
        if transport.is_gathering or stop - start < SMALL_READ_BYTES:
            transport.messages = sum([len(batch) for batch in batches])
            self.small_messages += transport.messages
        if stop - start >= SMALL_READ_BYTES:
            if not transport.is_gathering:
                transport.small_reads = 0
        elif batches and transport.small_reads < SMALL_READS_MIN:
            transport.small_reads += 1
        elif batches:
            self.single_came = True
        return end, batches

    def _publish(self, run: list[PlainRead], data: Buffer) -> None:
        """Publish the messages of neighbouring reads, whose peers may do the same.

        If all their subscribers take them as they arrived, those are written to first, and the
        log, which has said that it takes them, and the figures come after. Otherwise each read is
        published by itself: only its own subscribers may hold its publisher back.
        """
        everything: list[Batch] = []
        access = run[0][0].access
        renames: bool = access.renames
        as_shown = True
        for transport, _, batches, _, _ in run:
            for batch in batches:
                batch.sender = transport.connection.name
                if renames:
                    full = access.full(batch.topic)
                    # Others must not see the account's own spelling of a name.
                    as_shown = as_shown and access.shown(full) == batch.topic
                    batch.rename(full)
            everything += batches
        topics = self._bus.topics_alike(everything, access) if as_shown else None
        lane = None if topics is None else self._lane(topics[0].subscribers, access)
        if topics is None or lane is None:
            for one in run:
                self._publish_one(one, data, as_shown)
            return
        try:
            publisher: Any = run[0][0].connection.translator
            if len(run) > 1:
                publisher = JointPublisher(run)
            if lane:
                self._write(lane, run, everything, data, publisher)
            self._append(everything, topics, publisher)
        except Exception:
            for transport, _, _, _, _ in run:
                drop(transport)

    def _write(
        self,
        lane: list[Outbox],
        run: list[PlainRead],
        batches: list[Batch],
        data: Buffer,
        publisher: Any,
    ) -> None:
        """Write the batches of a run to these outboxes."""
        _, codec, _, start, _ = run[0]
        whole = codec.whole_of(batches, data, start, run[-1][4])
        if whole is None:
            # One batch: its subscribers must not see its receipt requests.
            whole = publisher.encoded(batches[0], batches[0].protocol, publisher.encode)
        for outbox in lane:
            outbox.send(whole, batches, publisher)
        self._outboxes.flush()

    def _append(self, batches: list[Batch], topics: list[Topic], publisher: Any) -> None:
        try:
            self._bus.publish_delivered(batches, topics, publisher)
        except (StorageError, UsageError) as error:
            # The topic was found to be damaged just now.
            for batch in batches:
                publisher.refuse(batch, error)

    def _publish_one(self, read: PlainRead, data: Buffer, as_shown: bool) -> None:
        transport, codec, batches, start, end = read
        try:
            whole = codec.whole_of(batches, data, start, end) if as_shown else None
            transport.connection.translator.publish(batches, whole, is_full=True)
        except Exception:
            drop(transport)

    def _lane(
        self, subscribers: tuple[Subscriber, ...], access: AccountAccess
    ) -> list[Outbox] | None:
        """The outboxes of subscribers, if all of them take the bytes as they are."""
        if subscribers is not self._lane_of or access.account != self._lane_account:
            found: list[Any] = [_plain_outbox(one, access.account) for one in subscribers]
            self._lane_of = subscribers
            self._lane_account = access.account
            self._lane_boxes = None if None in found else found
        return self._lane_boxes


def _plain_outbox(subscriber: Any, account: str) -> Outbox | None:
    """The outbox that takes bytes with an account's names for topics unchanged."""
    outbox: Outbox | None = getattr(subscriber, "plain_outbox", None)
    return outbox if outbox is not None and subscriber.access.account == account else None


def drop(transport: SocketTransport) -> None:
    """Close a connection that raised, and log the error."""
    logger.exception("an error in a connection")
    transport.abort()
