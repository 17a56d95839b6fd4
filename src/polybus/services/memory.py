"""The memory gate: when the bus stops reading from publishers (`memory-bytes-max`).

Messages take memory while they wait for slow subscribers or for the committer. Beyond the limit no
publisher is read from. Catch-ups wait from half of the limit on, so that live messages have room
even with many slow catch-ups.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from polybus.batch import Buffer
from polybus.bus.subscriptions import Holdable
from polybus.log.interface import Log

POLL_S = 0.002
CATCH_UPS_AT_ONCE_MAX = 4
CATCH_UP_POLL_S = 0.02


class BufferCounter:
    """Counts the memory of all outboxes; a shared buffer counts once.

    A view counts as the whole buffer that it keeps in memory.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._holders: dict[int, int] = {}

    def hold(self, data: Buffer) -> None:
        owner = data.obj if isinstance(data, memoryview) else data
        holders = self._holders.get(id(owner), 0)
        if not holders:
            self.bytes += memoryview(owner).nbytes
        self._holders[id(owner)] = holders + 1

    def release(self, data: Buffer) -> None:
        owner = data.obj if isinstance(data, memoryview) else data
        holders = self._holders[id(owner)] - 1
        if holders:
            self._holders[id(owner)] = holders
        else:
            del self._holders[id(owner)]
            self.bytes -= memoryview(owner).nbytes


class MemoryGate:
    """Holds publishers and catch-ups back while messages in memory exceed their limit."""

    def __init__(self, log: Log, loop: asyncio.AbstractEventLoop, *, bytes_max: int) -> None:
        self.ledger = BufferCounter()
        self.catch_ups_starve = False
        self._turns = asyncio.Semaphore(CATCH_UPS_AT_ONCE_MAX)
        self._log = log
        self._loop = loop
        self._bytes_max = bytes_max
        self._held: list[Holdable] = []

    def is_full(self) -> bool:
        return self.ledger.bytes + self._log.pending_bytes > self._bytes_max

    def is_crowded(self) -> bool:
        """Whether slow peers alone hold all of the limit, without the committer's batches."""
        return self.ledger.bytes > self._bytes_max

    async def uncrowded(self) -> None:
        """Wait until more may be sent to peers that can wait."""
        while self.is_crowded():  # noqa: ASYNC110 - peers take bytes without an event
            await asyncio.sleep(POLL_S)

    def hold(self, publisher: Holdable) -> None:
        """Hold a publisher until there is room again."""
        if publisher.hold(self):
            if not self._held:
                self._loop.call_later(POLL_S, self._release_if_room)
            self._held.append(publisher)

    def _release_if_room(self) -> None:
        if self.is_full():
            self._loop.call_later(POLL_S, self._release_if_room)
            return
        held, self._held = self._held, []
        for publisher in held:
            publisher.release(self)

    async def room(self) -> None:
        """Wait until publishers may continue."""
        while self.is_full():  # noqa: ASYNC110 - the log's thread frees memory without an event
            await asyncio.sleep(POLL_S)

    @contextlib.asynccontextmanager
    async def catch_up_turn(self) -> AsyncIterator[None]:
        """Limit concurrent catch-ups, and let none read while there is no room for its data."""
        async with self._turns:
            while 2 * self.ledger.bytes > self._bytes_max:
                self.catch_ups_starve = True
                await asyncio.sleep(CATCH_UP_POLL_S)
            self.catch_ups_starve = False
            yield
