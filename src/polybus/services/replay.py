"""Replay: a subscription that begins in the past reads the log until it has caught up.

The log is read on a thread, one piece at a time, and no faster than the peer takes it. When memory
holds everything from the replay's offset on, the bus attaches the subscriber in the same step, so
that no message is missed or repeated.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Protocol

import pyarrow.compute as pc

from polybus.batch import Batch
from polybus.bus.subscriptions import Subscriber
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.interface import Log
from polybus.services.context import Context
from polybus.wire.positions import Earliest, Latest, Position, Since, Start

PIECE_BYTES = 256 << 10


class ReplayTarget(Subscriber, Protocol):
    """The subscriber that a replay is for."""

    def tell_position(self, topic: str, epoch: int, offset: int) -> None:
        """The replay begins at this position."""
        ...

    def flush(self) -> None:
        """Write what was delivered now, so that what the peer does not take is counted."""
        ...

    async def drained(self) -> None:
        """Wait until the peer takes more."""
        ...

    def replay_ended(self, topic: str, error: PolybusError | None) -> None:
        """The subscription is live, or over because of the error."""
        ...


async def replay(
    context: Context,
    target: ReplayTarget,
    topic: str,
    start: Start,
    *,
    tell: bool,
    skip_sender: str | None = None,
) -> None:
    """Bring a subscription from the past to the live end.

    `skip_sender` leaves out what that peer published, as live delivery would have.
    """

    def deliver(batch: Batch) -> None:
        for part in (batch,) if skip_sender is None else without_sender(batch, skip_sender):
            target.deliver(part)

    error: PolybusError | None = None
    try:
        epoch, offset = await asyncio.to_thread(resolve, context.log, topic, start)
        if tell:
            target.tell_position(topic, epoch, offset)
        while True:
            async with context.memory.replay_turn():
                if context.log.bounds(topic).epoch != epoch:
                    raise UsageError("topic.deleted", f"the topic {topic!r} was deleted")
                reached = context.bus.attach_if_recent(topic, target, offset, deliver)
                if reached is None:
                    break
                if reached == offset:
                    reached = await _deliver_piece(context.log, topic, epoch, offset, deliver)
                offset = reached
                target.flush()
            await target.drained()
    except PolybusError as failure:
        error = failure.bare()
    except OSError as failure:
        text = f"topic {topic!r} cannot be read: {failure.strerror}"
        error = StorageError("log.failed", text)
    target.replay_ended(topic, error)


async def _deliver_piece(
    log: Log, topic: str, epoch: int, offset: int, deliver: Callable[[Batch], None]
) -> int:
    """Read from the offset on and deliver it; return the offset after it.

    What was read lives no longer than this call: hundreds of replays may wait for their turn.
    """
    for batch in await asyncio.to_thread(log.read, topic, offset, bytes_max=PIECE_BYTES):
        if batch.epoch == epoch:
            deliver(batch)
            offset = batch.last_offset + 1
    return offset


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


def resolve(log: Log, topic: str, start: Start) -> tuple[int, int]:
    """The epoch and offset that a start means now. May block.

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
