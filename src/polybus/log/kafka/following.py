"""Following topics: every node fetches what the cluster has confirmed, in its order.

One fetch per broker is under way, for all topics that it leads. Fetches are `read_committed`:
messages of open or aborted transactions are not visible. The batches that a fetch brings of a topic
are passed on together, with their epoch and offsets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aiokafka.protocol.fetch import FetchRequest

from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log.kafka.fetch_session import FETCH_BYTES_MAX, WAIT_MS, FetchSession, Followed
from polybus.log.kafka.link import (
    ANSWER_TIMEOUT_S,
    EARLIEST,
    FOLLOW,
    LINK_ERRORS,
    READ,
    READ_COMMITTED,
    RETRY_S,
    KafkaLink,
)
from polybus.log.kafka.record_batch import Fetched, decode_batches

logger = logging.getLogger("polybus.server")

OFFSET_OUT_OF_RANGE, CORRUPT = 1, 2
READ_BYTES = 1 << 20


Arrived = Callable[[Followed, list[Batch]], None]
"""Called with the new messages of a topic, perhaps none; its `position` and `start` are current."""


class Following:
    """Fetches topics. All runs on the link's loop."""

    def __init__(self, link: KafkaLink, followed: Mapping[str, Followed], arrived: Arrived) -> None:
        """`followed` has the topics by their Kafka name; the caller may change it at any time."""
        self._link = link
        self._followed = followed
        self._arrived = arrived
        self._sessions: dict[int, FetchSession] = {}
        self._has_room = asyncio.Event()
        self._has_room.set()

    def open(self) -> None:
        self._link.on_refreshed.append(self._begin)
        self._begin()

    def hold(self, *, is_full: bool) -> None:
        """Stop fetching until the bus has taken what arrived."""
        if is_full:
            self._has_room.clear()
        else:
            self._has_room.set()

    def _begin(self) -> None:
        """Assign topics to their leaders after each update of the metadata."""
        led: dict[int | None, dict[str, Followed]] = {}
        for name, one in self._followed.items():
            led.setdefault(self._link.leader_of(name), {})[name] = one
        for broker in self._link.broker_ids:
            if broker not in self._sessions:
                self._sessions[broker] = FetchSession()
                self._link.start(self._follow(broker, self._sessions[broker]))
        for broker, session in self._sessions.items():
            session.follow(led.get(broker, {}))

    async def _follow(self, broker: int, session: FetchSession) -> None:
        while True:
            await self._has_room.wait()
            is_good = False
            with contextlib.suppress(StorageError):
                is_good = bool(session) and await self._fetch(broker, session)
            if not is_good:
                await asyncio.sleep(RETRY_S)

    async def _fetch(self, broker: int, session: FetchSession) -> bool:
        try:
            answer = await self._link.send(broker, session.request(), FOLLOW)
        except LINK_ERRORS:
            session.begin_again()
            self._link.stale()
            return False
        news = session.answered(answer)
        is_good = news is not None
        for one, (_, error, _, _, start, aborted, data) in news or ():
            if self._followed.get(one.name) is not one:
                continue
            if error == 0:
                one.start = max(one.start, start)
                is_good &= self._take(one, data or b"", aborted or [])
            elif error == OFFSET_OUT_OF_RANGE:
                is_good &= await self._find_start(one)
            else:
                self._link.stale()
                is_good = False
        return is_good

    async def _find_start(self, one: Followed) -> bool:
        """If retention was faster than this node, continue with the first message that is left.

        Otherwise the broker that answered no longer leads, or leads again and lags: retry later.
        """
        start = (await self._link.offsets([one.name], EARLIEST)).get(one.name, 0)
        if start <= one.position:
            self._link.stale()
            return False
        logger.warning("topic %r: messages %d to %d are gone", one.topic, one.position, start)
        one.start = start
        self._advance(one, start, [])
        return True

    def _take(self, one: Followed, data: bytes, aborted: list[Any]) -> bool:
        """Pass on what was fetched; False if it is damaged: the topic stops there."""
        is_good = True
        found: list[Batch] = []
        stop = one.position
        try:
            for batches, next_offset in committed(one.topic, data, aborted):
                if next_offset > stop:
                    found += from_offset(batches, stop, one.epoch)
                    stop = next_offset
        except StorageError as error:
            is_good = False
            if one.damaged_at != stop:
                one.damaged_at = stop
                logger.error("%s", error)
        if stop > one.position:
            self._advance(one, stop, found)
        return is_good

    def _advance(self, one: Followed, stop: int, batches: list[Batch]) -> None:
        """Pass on messages that end before an offset."""
        one.position = stop
        for session in self._sessions.values():
            session.moved(one)
        self._arrived(one, batches)


class AbortedRanges:
    """The aborted transactions of a fetch, while its RecordBatches are read in order."""

    def __init__(self, aborted: list[Any]) -> None:
        self._waiting = sorted(aborted, key=lambda one: one[1])
        self._open_ids: set[int] = set()

    def hides(self, fetched: Fetched) -> bool:
        """Whether a RecordBatch belongs to one. Call it in the order of the offsets."""
        while self._waiting and self._waiting[0][1] < fetched.next_offset:
            self._open_ids.add(self._waiting.pop(0)[0])
        if fetched.is_marker:
            self._open_ids.discard(fetched.producer_id)
        return fetched.is_transactional and fetched.producer_id in self._open_ids


def committed(topic: str, data: bytes, aborted: list[Any]) -> Iterator[tuple[list[Batch], int]]:
    """The committed messages of a fetch, and the offset after each RecordBatch.

    Raises StorageError `log.damaged`.
    """
    ranges = AbortedRanges(aborted)
    for fetched in decode_batches(topic, data):
        yield ([] if ranges.hides(fetched) else fetched.batches), fetched.next_offset


def from_offset(batches: list[Batch], offset: int, epoch: int) -> list[Batch]:
    """Batches without messages before an offset: a fetch begins with a whole RecordBatch."""
    found = []
    for batch in batches:
        batch.epoch = epoch
        if batch.last_offset < offset:
            continue
        if batch.first_offset < offset:
            batch = batch.slice(offset - batch.first_offset, len(batch))
        found.append(batch)
    return found


async def fetch_at(
    link: KafkaLink,
    one: Followed,
    offset: int,
    stop: int,
    bytes_max: int,
    within_s: float = ANSWER_TIMEOUT_S,
) -> list[Batch]:
    """The messages from an offset on, from the leader; at least one if any is before `stop`.

    `stop` is an end that some leader has confirmed. A new leader may not know yet that all replicas
    have the messages before it, and answers with fewer: that is not a gap, so the fetch is
    repeated.

    Raises StorageError `log.unreachable`, `log.damaged`; LookupError if the offset was removed.
    """
    position = offset
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        data, aborted = await fetch_bytes(link, one, position, bytes_max, deadline)
        found: list[Batch] = []
        for batches, next_offset in committed(one.topic, data, aborted):
            found += from_offset(batches, offset, one.epoch)
            position = max(position, next_offset)
        if found or position >= stop:
            return found
    raise _silent(one)


async def fetch_bytes(
    link: KafkaLink, one: Followed, position: int, bytes_max: int, deadline: float
) -> tuple[bytes, list[Any]]:
    """RecordBatches as the leader stores them, and the aborted transactions among them.

    `deadline` is a monotonic time. Raises as `fetch_at`.
    """
    while time.monotonic() < deadline:
        leader = link.leader_of(one.name)
        wanted = [(one.name, [(0, position, max(bytes_max, 1))])]
        request = FetchRequest(WAIT_MS, 1, FETCH_BYTES_MAX, READ_COMMITTED, wanted)
        try:
            if leader is None:
                raise OSError("no leader")
            answer = await link.send(leader, request, READ)
        except LINK_ERRORS:
            link.stale()
            await asyncio.sleep(RETRY_S)
            continue
        ((_, ((_, error, _, _, _, aborted, *_, data),)),) = answer.topics
        if error == OFFSET_OUT_OF_RANGE:
            start = (await link.offsets([one.name], EARLIEST)).get(one.name, 0)
            if position < start:
                raise LookupError(position)
        if error == CORRUPT:
            text = f"topic {one.topic!r}, offset {position}: its leader reports that its file is"
            raise StorageError("log.damaged", f"{text} damaged")
        if not error:
            one.answered_by = -1 if leader is None else leader
            return data or b"", aborted or []
        link.stale()
        await asyncio.sleep(RETRY_S)
    raise _silent(one)


def _silent(one: Followed) -> StorageError:
    return StorageError("log.unreachable", f"topic {one.topic!r}: Kafka's leader does not answer")


async def read_to(
    link: KafkaLink, one: Followed, stop: int, hand_on: Callable[[list[Batch]], None]
) -> None:
    """Pass on everything up to an offset, before it is followed. Raises as `fetch_at` does."""
    while one.position < stop:
        found = await fetch_at(link, one, one.position, stop, READ_BYTES)
        one.position = found[-1].last_offset + 1 if found else stop
        hand_on(found)
