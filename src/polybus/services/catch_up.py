"""Catch-up: a subscription that begins in the past reads the log until it is live.

The log is read on a thread, one piece at a time, and no faster than the peer takes it. When memory
holds everything from its offset on, the bus attaches the subscriber in the same step, so
that no message is missed or repeated.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Protocol

import pyarrow.compute as pc

from polybus import references
from polybus.batch import Batch
from polybus.bus.subscriptions import Subscriber
from polybus.bus.topic import Topic
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.interface import Log
from polybus.services.context import Context
from polybus.wire.positions import Earliest, Latest, Position, Since, Start

PIECE_BYTES = 256 << 10


class CatchUpTarget(Subscriber, Protocol):
    """The subscriber that catches up.

    With `streams_references` it gets the bytes of large payloads, each through `stream`.
    """

    streams_references: bool

    async def stream(self, batch: Batch) -> None:
        """Take the payload of a batch that is one reference."""
        ...

    def tell_position(self, topic: str, epoch: int, offset: int) -> None:
        """Called with the position at which catching up begins."""
        ...

    def flush(self) -> None:
        """Write what was delivered, so that bytes which the peer does not take are counted."""
        ...

    async def drained(self) -> None:
        """Wait until the peer takes more."""
        ...

    def catch_up_ended(self, topic: str, error: PolybusError | None) -> None:
        """The subscription is live, or ended with the error."""
        ...


class _Taker:
    """Delivers what was read, up to a payload that must be streamed before the rest."""

    def __init__(self, target: CatchUpTarget, topic: Topic, skip_sender: str | None) -> None:
        self._target = target
        self._topic = topic
        self._skip_sender = skip_sender
        self._large: Batch | None = None

    def deliver(self, batch: Batch) -> int | None:
        """Deliver a batch; return the offset up to which it was taken, if not all was."""
        large = reached = None
        if self._target.streams_references and (at := first_reference(batch)) is not None:
            large, batch = batch.slice(at, at + 1), batch.slice(0, at)
            reached = large.first_offset + 1
        for part in self._of_others(batch):
            self._target.deliver(part)
            self._topic.past_delivered(part, self._target.protocol)
        if large is not None:
            self._large = next(iter(self._of_others(large)), None)
        return reached

    def _of_others(self, batch: Batch) -> Iterable[Batch]:
        if not len(batch):
            return ()
        return (batch,) if self._skip_sender is None else without_sender(batch, self._skip_sender)

    async def stream(self) -> None:
        large, self._large = self._large, None
        if large is not None:
            await self._target.stream(large)
            self._topic.past_delivered(large, self._target.protocol)


async def catch_up(
    context: Context,
    target: CatchUpTarget,
    topic: str,
    start: Start,
    *,
    tell: bool,
    skip_sender: str | None = None,
) -> None:
    """Bring a subscription from the past to the live end.

    `skip_sender` leaves out messages of that peer, as live delivery does.
    """

    error: PolybusError | None = None
    try:
        take = _Taker(target, context.bus.topic(topic), skip_sender)
        epoch, offset = await asyncio.to_thread(resolve_now, context.log, topic, start)
        if tell:
            target.tell_position(topic, epoch, offset)
        while True:
            # The payload of another topic may be on its way to the peer.
            await target.drained()
            async with context.memory.catch_up_turn():
                if context.log.bounds(topic).epoch != epoch:
                    raise UsageError("topic.deleted", f"the topic {topic!r} was deleted")
                reached = context.bus.attach_if_recent(topic, target, offset, take.deliver)
                if reached is None:
                    break
                if reached == offset:
                    reached = await _deliver_piece(context.log, topic, epoch, offset, take.deliver)
                offset = reached
                target.flush()
            await take.stream()
    except PolybusError as failure:
        error = failure.without_traceback()
    except OSError as failure:
        text = f"topic {topic!r} cannot be read: {failure.strerror}"
        error = StorageError("log.failed", text)
    target.catch_up_ended(topic, error)


async def _deliver_piece(
    log: Log, topic: str, epoch: int, offset: int, deliver: Callable[[Batch], int | None]
) -> int:
    """Read from the offset on and deliver; return the offset after what was taken.

    What was read is freed when this returns: hundreds of subscribers may wait for their turn.
    """
    for batch in await asyncio.to_thread(log.read, topic, offset, bytes_max=PIECE_BYTES):
        if batch.epoch == epoch:
            reached = deliver(batch)
            if reached is not None:
                return reached
            offset = batch.last_offset + 1
    return offset


def first_reference(batch: Batch) -> int | None:
    """The index of the first message that is a reference."""
    if batch.headers is None:
        return None
    found = (index for index, headers in enumerate(batch.headers) if references.marked(headers))
    return next(found, None)


def without_sender(batch: Batch, sender: str) -> Iterator[Batch]:
    """The parts of a batch that other peers published."""
    if batch.stored is None:
        if batch.sender != sender:
            yield batch
        return
    senders = batch.stored.column("sender")
    if senders.null_count == 0 and pc.index(senders, sender).as_py() < 0:
        yield batch
        return
    is_own = pc.equal(senders, sender).to_pylist()
    start = 0
    for own, run in groupby(is_own):
        stop = start + len(list(run))
        if not own:
            yield batch.slice(start, stop)
        start = stop


def resolve_now(log: Log, topic: str, start: Start) -> tuple[int, int]:
    """`resolve` on a node that may lag behind the one that a position came from. May block."""
    if log.arrives_late:
        log.catch_up(topic)
    return resolve(log, topic, start)


def resolve(log: Log, topic: str, start: Start) -> tuple[int, int]:
    """The current epoch and offset of a start. May block.

    A position that the topic no longer has (another epoch, or expired) means its first message.
    A position beyond its end means its end. `tell_position` reports the resulting position.
    """
    bounds = log.bounds(topic)
    match start:
        case Earliest():
            return bounds.epoch, bounds.start
        case Latest():
            return bounds.epoch, bounds.stop
        case Since(timestamp_us):
            return bounds.epoch, max(bounds.start, log.offset_at(topic, timestamp_us))
        case Position(epoch, offset):
            if epoch != bounds.epoch:
                return bounds.epoch, bounds.start
            return bounds.epoch, min(max(offset, bounds.start), bounds.stop)
