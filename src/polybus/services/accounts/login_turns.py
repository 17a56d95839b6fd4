"""Queues logins that were not verified before: one at a time from each source has its turn.

The queues are limited, for each source and in total. If one is full, a new login replaces another,
chosen at random, which is refused (`auth.busy`). So a flood of guesses cannot lock out a
correct password: not at other sources, and not at its own if the login is retried. A login keeps
its turn while only its own source's queue is full: otherwise guesses would not wait for the delay
of the previous one.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

from polybus.errors import UsageError

WAITING_PER_SOURCE_MAX = 10
"""Logins from one source: one that has its turn, and those that wait."""
SOURCES_MAX = 1000
"""Sources whose logins are checked or delayed at a time."""


class LoginTurn:
    """One login, from its arrival to its answer."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._began: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()

    async def sleep(self, seconds: float) -> None:
        """Sleep. Raises UsageError `auth.busy` if another login has taken its place."""
        await asyncio.wait([self._over], timeout=seconds)
        self._check()

    async def wait(self) -> None:
        """Wait for the turn. Raises as `sleep` does."""
        await asyncio.wait([self._began, self._over], return_when=asyncio.FIRST_COMPLETED)
        self._check()

    def _check(self) -> None:
        if self._over.done():
            raise UsageError("auth.busy", "too many logins at a time; try again later")

    def begin(self) -> None:
        if not self._began.done():
            self._began.set_result(None)

    def give_up(self) -> None:
        if not self._over.done():
            self._over.set_result(None)


class LoginTurns:
    """The logins of all sources; the first of each source has its turn."""

    def __init__(self) -> None:
        self._sources: dict[str, list[LoginTurn]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._sources.values()))

    @contextlib.asynccontextmanager
    async def turn(self, source: str) -> AsyncIterator[LoginTurn]:
        """Wait until no earlier login from the source is left. Raises UsageError `auth.busy`."""
        logins = self._logins_of(source)
        login = LoginTurn()
        logins.append(login)
        logins[0].begin()
        try:
            await login.wait()
            yield login
        finally:
            if login in logins:
                logins.remove(login)
            if logins:
                logins[0].begin()
            elif self._sources.get(source) is logins:
                del self._sources[source]

    def _logins_of(self, source: str) -> list[LoginTurn]:
        """The logins from a source, with room for one more."""
        logins = self._sources.get(source)
        if logins is None:
            if len(self._sources) >= SOURCES_MAX:
                for login in self._sources.pop(secrets.choice(list(self._sources))):
                    login.give_up()
            logins = self._sources[source] = []
        elif len(logins) >= WAITING_PER_SOURCE_MAX:
            logins.pop(1 + secrets.randbelow(len(logins) - 1)).give_up()
        return logins
