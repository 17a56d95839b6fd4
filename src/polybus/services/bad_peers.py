"""Errors of peers: counters, and rate-limited log lines."""

import logging
from collections import Counter
from collections.abc import Callable

from polybus import names
from polybus.services.events import EventRecorder

logger = logging.getLogger("polybus.peers")
# A subscriber was disconnected, or lost messages, because it read too slowly.
SLOW = ("outbox.full", "outbox.dropped")
# An error may name every topic of a request.
TEXT_CHARACTERS_MAX = 500


class BadPeers:
    """Counts errors by code, always; limits log lines to `error-lines-per-s`."""

    def __init__(
        self,
        *,
        lines_per_s: int,
        clock_s: Callable[[], float],
        events: EventRecorder | None = None,
    ) -> None:
        self._events = events
        self.counts: Counter[str] = Counter()
        self._lines_per_s = lines_per_s
        self._clock_s = clock_s
        self._second = 0
        self._lines = 0
        self._suppressed = 0

    def count(self, code: str, events: int) -> None:
        """Count errors that need no log line."""
        self.counts[code] += events

    def record(
        self, peer: str, protocol: str, code: str, text: str, account: str = names.ACCOUNT
    ) -> None:
        """Count an error of a peer of this account, and log it."""
        self.counts[code] += 1
        if code in SLOW and self._events is not None:
            fields = {"peer": peer, "protocol": protocol, "code": code}
            self._events.tell("subscriber-slow", account=account, **fields)
        second = int(self._clock_s())
        if second != self._second:
            if self._suppressed:
                logger.warning("%d more lines about peers' errors suppressed", self._suppressed)
            self._second, self._lines, self._suppressed = second, 0, 0
        if self._lines >= self._lines_per_s - 1:
            self._suppressed += 1
            return
        self._lines += 1
        logger.warning("%s (%s): %s: %s", peer, protocol, code, text[:TEXT_CHARACTERS_MAX])
