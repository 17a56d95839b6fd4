"""Turns of logins that are not known to be right: one at a time from each source.

Room is limited, for each source and in all. Whoever comes when there is none takes the place of
another, chosen at random, which is refused (`auth.busy`). So nobody who floods the bus with guesses
keeps a right password out: not at other sources, and not at its own if it is tried again. A login
that has its turn keeps it while only its own source is full: otherwise guesses would not wait for
the delay of the one before.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

from polybus.errors import UsageError

WAITING_PER_SOURCE_MAX = 10
"""Logins from one source: one that has its turn, and those that wait for it."""
SOURCES_MAX = 1000
"""Sources whose logins are checked or delayed at a time."""


class LoginTurn:
    """One login, from when it comes until it is answered."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._began: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()

    async def sleep(self, seconds: float) -> None:
        """Raises UsageError `auth.busy`: another login has taken its place."""
        await asyncio.wait([self._over], timeout=seconds)
        self._check()

    async def wait(self) -> None:
        """Wait for the turn. Raises as `sleep`."""
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
        """Wait until no earlier login from the source is there. Raises UsageError `auth.busy`."""
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
