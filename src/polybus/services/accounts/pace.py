"""Limits how fast an account may change topics, tokens and accounts: one change at a time.

Such a change waits for the disk on the loop's thread, which delays all peers. After each one the
next change of the same account waits PAUSE_SHARE times as long as it took, so that no account can
stall the bus by creating and deleting topics. All sign-ups count as one account.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

PAUSE_SHARE = 4.0
PAUSE_S_MAX = 1.0


class ChangePace:
    """The changes of all accounts."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._turns: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def turn(self, account: str) -> AsyncIterator[None]:
        """Make a change in this block."""
        turn = self._turns.setdefault(account, asyncio.Lock())
        self._users[account] += 1
        try:
            await turn.acquire()
        except asyncio.CancelledError:
            self._leave(account)
            raise
        began_s = self._loop.time()
        try:
            yield
        finally:
            # Only the next change waits, not the answer of this one.
            pause_s = min(PAUSE_S_MAX, PAUSE_SHARE * (self._loop.time() - began_s))
            self._loop.call_later(pause_s, self._release, account, turn)

    def _release(self, account: str, turn: asyncio.Lock) -> None:
        turn.release()
        self._leave(account)

    def _leave(self, account: str) -> None:
        self._users[account] -= 1
        if not self._users[account]:
            del self._users[account], self._turns[account]
