"""A fair queue for the disk: accounts take turns, so a flood of one does not delay others.

The bytes that are written or read at a time are limited. Beyond that pieces wait, and accounts take
turns (round-robin), no matter how many pieces each has waiting.
"""

import asyncio
from collections import deque


class AccountTurns:
    """A semaphore for bytes, which accounts get in turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, bytes_max: int) -> None:
        self._loop = loop
        self._bytes_max = bytes_max
        self._taken_bytes = 0
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        """By account, the next in turn first."""

    async def enter(self, account: str, size: int) -> None:
        """Wait until there is room for a piece. `leave` must follow."""
        if not self._waiting and self._fits(size):
            self._taken_bytes += size
            return
        turn = self._loop.create_future()
        self._waiting.setdefault(account, deque()).append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(size)
            raise

    def leave(self, size: int) -> None:
        self._taken_bytes -= size
        while self._waiting:
            account, pieces = next(iter(self._waiting.items()))
            size, turn = pieces[0]
            if not turn.done() and not self._fits(size):
                return
            pieces.popleft()
            # Last, until it is its turn again.
            del self._waiting[account]
            if pieces:
                self._waiting[account] = pieces
            if not turn.done():
                self._taken_bytes += size
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self._taken_bytes or self._taken_bytes + size <= self._bytes_max
