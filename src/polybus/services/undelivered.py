"""Finds matching undelivered messages, in pages of limited size, to publish them again.

The events name offsets; the log may no longer have them, and may have newer ones. So the first pass
records the bounds of each topic, and the second, whose pages are published, stays within them.
Otherwise it would also find messages that it has published itself, if they are not delivered
either.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from polybus import names
from polybus.bus.bus import Bus
from polybus.errors import BusyError, StorageError, UsageError
from polybus.log.interface import Bounds
from polybus.services.events import UndeliveredRange
from polybus.services.queries.jobs import RangesJob
from polybus.services.queries.pool import QueryPool
from polybus.services.queries.ranges import RangePage, count_messages
from polybus.services.tallies import EVENTS_TOPIC
from polybus.structs import decode

PAGE_RANGES = 10_000


class UndeliveredMatches:
    """All matches of the filters, as ranges without overlaps. Call `count` first."""

    def __init__(self, bus: Bus, queries: QueryPool, filters: tuple[str, str, str]) -> None:
        """`filters`: a topic, a part of the reason, a part of the topic or of the subscriber's
        name.
        """
        self._bus = bus
        self._queries = queries
        self._filters = filters
        self._held: dict[str, Bounds] = {}

    async def count(self) -> Counter[str]:
        """The number of matching messages that the log still has, by topic.

        Raises as `QueryPool.run` does.
        """
        counts: Counter[str] = Counter()
        async for page in self._pages(is_first=True):
            counts += count_messages(page)
        return counts

    async def pages(self) -> AsyncIterator[list[UndeliveredRange]]:
        """The counted ranges; waits while all query processes are busy.

        Raises as `QueryPool.run` does.
        """
        async for page in self._pages(is_first=False):
            if page:
                yield page

    async def _pages(self, *, is_first: bool) -> AsyncIterator[list[UndeliveredRange]]:
        events = [one for one in self._bus.topic_names(system=True) if one.endswith(EVENTS_TOPIC)]
        after: UndeliveredRange | None = None
        while True:
            job = RangesJob(events, *self._filters, after=after, limit=PAGE_RANGES)
            try:
                page = decode(await self._queries.data(job), RangePage)
            except BusyError as busy:
                if is_first:
                    raise
                await asyncio.sleep(busy.retry_after_s)
                continue
            if is_first:
                self._look_at({one.topic for one in page.ranges})
            yield [kept for one in page.ranges if (kept := self._kept(one)) is not None]
            if page.is_last:
                return
            after = page.ranges[-1]

    def _look_at(self, topics: set[str]) -> None:
        for topic in topics - self._held.keys():
            # System topics cannot be published to. Others are damaged, or were deleted.
            if not names.is_reserved(topic):
                try:
                    self._held[topic] = self._bus.log.bounds(topic)
                except (StorageError, UsageError):
                    continue

    def _kept(self, one: UndeliveredRange) -> UndeliveredRange | None:
        """The part of a range that the log has, if any."""
        held = self._held.get(one.topic)
        if held is None or held.epoch != one.epoch:
            return None
        first, stop = max(one.first, held.start), min(one.stop, held.stop)
        return one._replace(first=first, stop=stop) if first < stop else None
