"""Replay: a subscription that begins in the past reads the log until it has caught up.

The log is read on a thread, a piece at a time, and no faster than the peer takes it. When memory
holds all from the replay's offset on, the bus attaches the subscriber in the same step, so nothing
is missed and nothing comes twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from polybus.batch import Batch
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.interface import Log
from polybus.wire.positions import At, Earliest, Latest, Since, Start, parse_start

if TYPE_CHECKING:
    from polybus.edges.protocols.translator import Translator

PIECE_BYTES = 256 << 10
AT_ONCE_MAX = 4
ROOM_POLL_S = 0.02


class ReplayTurns:
    """Whose turn it is to read: few replays at once, and none while there is no room for more.

    Live messages have memory of their own: however many replays nobody reads, they go on.
    """

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._turns = asyncio.Semaphore(AT_ONCE_MAX)
        self.starving = False

    async def __aenter__(self) -> None:
        await self._turns.acquire()
        try:
            while not self._has_room():
                self.starving = True
                await asyncio.sleep(ROOM_POLL_S)
        except asyncio.CancelledError:
            self._turns.release()
            raise
        self.starving = False

    async def __aexit__(self, *_: object) -> None:
        self._turns.release()


class Replay:
    """One subscription on its way from the past to the live end."""

    def __init__(
        self,
        translator: Translator,
        topic: str,
        start: str,
        *,
        tell: bool,
        skip_sender: str | None = None,
    ) -> None:
        """`skip_sender` leaves out what that peer published, as live delivery would have."""
        self._translator = translator
        self._topic = topic
        self._start = parse_start(start)
        self._tell = tell
        self._skip_sender = skip_sender
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        translator, topic = self._translator, self._topic
        try:
            await self._follow()
        except PolybusError as error:
            translator.replay_failed(topic, error)
        except OSError as error:
            text = f"topic {topic!r} cannot be read: {error.strerror}"
            translator.replay_failed(topic, StorageError("log.failed", text))
        translator.replay_ended(topic)

    async def _follow(self) -> None:
        translator, topic = self._translator, self._topic
        log = translator.bus.log
        epoch, offset = await asyncio.to_thread(resolve, log, topic, self._start)
        if self._tell:
            translator.tell_position(topic, epoch, offset)
        while True:
            async with translator.server.replay_turns:
                if log.bounds(topic).epoch != epoch:
                    raise UsageError("topic.deleted", f"the topic {topic!r} was deleted")
                reached = translator.bus.attach_if_recent(topic, translator, offset, self._deliver)
                if reached is None:
                    return
                if reached == offset:
                    reached = await self._deliver_piece(epoch, offset)
                offset = reached
                # Before the next one's turn, so that what this peer does not take is counted.
                translator.peer.flush()
            await translator.peer.drained()

    async def _deliver_piece(self, epoch: int, offset: int) -> int:
        """Read on from the offset and deliver it; return the offset after it.

        What was read lives no longer than this call: hundreds of replays may wait for their turn.
        """
        read = self._translator.bus.log.read
        batches = await asyncio.to_thread(read, self._topic, offset, bytes_max=PIECE_BYTES)
        for batch in batches:
            if batch.epoch == epoch:
                self._deliver(batch)
                offset = batch.last_offset + 1
        return offset

    def _deliver(self, batch: Batch) -> None:
        if self._skip_sender is None:
            self._translator.deliver(batch)
        else:
            for part in without_sender(batch, self._skip_sender):
                self._translator.deliver(part)


def without_sender(batch: Batch, sender: str) -> Iterator[Batch]:
    """The parts of a batch that somebody else published."""
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
    """The epoch and offset a start means now. May block.

    A position the topic no longer has (another epoch, before its first message) means its first
    message, and one it does not have yet means its end: the subscriber is told where it stands.
    """
    bounds = log.bounds(topic)
    match start:
        case Earliest():
            return bounds.epoch, bounds.start
        case Latest():
            return bounds.epoch, bounds.stop
        case Since(timestamp_us):
            return bounds.epoch, max(bounds.start, log.offset_at(topic, timestamp_us))
        case At(epoch, offset):
            if epoch != bounds.epoch:
                return bounds.epoch, bounds.start
            return bounds.epoch, min(max(offset, bounds.start), bounds.stop)
