"""A session in place of one that is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from polybus.client.backoff import Backoff
from polybus.client.http.sessions import Sessions
from polybus.errors import PolybusError

log = logging.getLogger("polybus.client")
_TRANSIENT = (
    *("client.unreachable", "client.disconnected", "client.timeout"),
    *("client.answer-invalid", "session.too-many", "state.failed"),
)


async def another_session(sessions: Sessions, topics: Iterable[str]) -> str:
    """Open a session at the end of the topics, however long the bus takes to be there.

    Raises:
        PolybusError: the bus refused it.
    """
    backoff = Backoff()
    while True:
        try:
            return await sessions.create(topics)
        except PolybusError as error:
            if error.code not in _TRANSIENT:
                raise
            log.info("no session: %s, trying again", error)
            await asyncio.sleep(backoff.next_s())
