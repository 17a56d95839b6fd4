"""ClusterReader: the OffsetReader of a bus in Kafka.

It only reads. Messages of open or aborted transactions are not visible.

Topics and epochs come from the registry of the nodes. Kafka answers by a topic's name, whichever
topic has that name now: so after each fetch it asks the broker that answered for the id of the
topic, and discards the rows if that is not the planned one.

Connections are shared by all readers of a process: a task of Spark takes some milliseconds, and a
connection with TLS more than that.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from polybus.batch import Batch
from polybus.config import KafkaLogin, KafkaTls
from polybus.config_file import brokers_of
from polybus.errors import StorageError, UsageError
from polybus.log.cluster_location import ClusterLocation
from polybus.log.history.topic_history import NextAndRows
from polybus.log.interface import Bounds
from polybus.log.journal.message import GroupedRows, MessageWriter, read_rows
from polybus.log.kafka.fetch_session import Followed
from polybus.log.kafka.following import fetch_at, read_to
from polybus.log.kafka.kafka_names import REGISTRY, kafka_name
from polybus.log.kafka.link import (
    ANSWER_TIMEOUT_S,
    EARLIEST,
    LATEST,
    LINK_ERRORS,
    READ,
    RETRY_S,
    KafkaLink,
)
from polybus.log.kafka.metadata import TopicsRequest, states_of
from polybus.log.kafka.registry import TopicRecord, counts, read_records
from polybus.log.kafka.security import client_settings
from polybus.log.reading.offset_reader import (
    BATCH_BYTES_MAX,
    BOUNDS_AGE_S,
    OffsetReader,
    offsets_unknown,
    recreated,
)
from polybus.log.reading.pieces import ReadPlan
from polybus.names import is_reserved

PAGE_BYTES = 4 << 20
"""How much one fetch requests, in compressed bytes."""
LEADER_S = 60.0
"""How long a read waits for a leader: an election takes 10 s, and longer on busy brokers."""
ATTEMPT_S = 0.5
"""How often to check in the registry whether a topic without a leader still exists."""
LINKS_MAX = 8
"""Clusters, or logins to them, that a process is connected to at a time."""

T = TypeVar("T")
LinkKey = tuple[int, str, KafkaTls | None, KafkaLogin | None]
_links: dict[LinkKey, KafkaLink] = {}
_lock = threading.Lock()


def shared_link(place: ClusterLocation) -> KafkaLink:
    """The process's connections to a cluster. Raises as `open_reader` does."""
    # A forked process does not have the thread of its parent's link.
    key = (os.getpid(), place.log, place.tls, place.login)
    with _lock:
        found = _links.pop(key, None)
        if found is None:
            security = client_settings(place.tls, place.login)
            found = KafkaLink(brokers_of(place.log), client_id="polybus-reader", **security)
            found.open()
        _links[key] = found
        if len(_links) > LINKS_MAX:
            oldest = next(iter(_links))
            _closed(oldest, _links.pop(oldest))
    return found


def close_links() -> None:
    """End the connections of this process; the next reader opens new ones."""
    with _lock:
        while _links:
            _closed(*_links.popitem())


def _closed(key: LinkKey, link: KafkaLink) -> None:
    if key[0] == os.getpid():
        link.stop()


atexit.register(close_links)


class ClusterReader(OffsetReader):
    """The topics of a bus in Kafka."""

    def __init__(self, place: ClusterLocation) -> None:
        """Raises as `polybus.log.opening.open_reader` does."""
        self.place: ClusterLocation = place
        self._link = shared_link(place)
        self._registry = Followed(REGISTRY, place.prefix + REGISTRY, 0, 0)
        self._registry_id = b""
        self._records: dict[str, TopicRecord] = {}
        self._bounds: dict[str, tuple[float, Bounds]] = {}

    def topics(self, *, system: bool = False) -> list[str]:
        self._run(self._refresh())
        names = (one.topic for one in self._records.values() if not one.deleted)
        return sorted(name for name in names if system or not is_reserved(name))

    def all_bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        """The bounds may be a moment old."""
        wanted = list(dict.fromkeys(topics))
        since_s = time.monotonic() - BOUNDS_AGE_S
        old = [one for one in wanted if self._bounds.get(one, (-1.0,))[0] < since_s]
        if old:
            found = self._run(self._find_bounds(old))
            now_s = time.monotonic()
            for topic in old:
                self._bounds.pop(topic, None)
            self._bounds |= {topic: (now_s, bounds) for topic, bounds in found.items()}
        return {topic: self._bounds[topic][1] for topic in wanted if topic in self._bounds}

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        bounds = self.bounds(topic)
        name = self._name(topic)
        # Kafka's times are milliseconds.
        when = max(0, -(-timestamp_us // 1000))
        offset = self._run(self._link.offsets([name], when)).get(name, -1)
        return bounds.stop if offset < 0 else min(offset, bounds.stop)

    def _rows(
        self, plan: ReadPlan, columns: Sequence[str], *, rows_max: int, bytes_max: int
    ) -> Iterator[NextAndRows]:
        offset = plan.start
        while offset < plan.stop:
            batches = self._page(plan, offset)
            offset = batches[-1].last_offset + 1 if batches else plan.stop
            for some in _by_bytes(batches):
                yield some[-1].last_offset + 1, rows_of_all(some).select(columns)

    def _page(self, plan: ReadPlan, offset: int) -> list[Batch]:
        """Messages from an offset on, at least one if the plan has any.

        Raises UsageError `topic.unknown`, `topic.recreated`, `log.offset-unknown`; StorageError.
        """
        followed = self._planned(plan)
        try:
            found = self._run(self._fetch(followed, offset, plan.stop))
        except LookupError:
            self._look_again()
            now = self.bounds(plan.topic)
            raise offsets_unknown(plan.topic, offset, plan.stop, now) from None
        if found is None:
            raise recreated(plan.topic)
        found = [one for one in found if one.first_offset < plan.stop]
        return [one.slice(0, min(len(one), plan.stop - one.first_offset)) for one in found]

    def _planned(self, plan: ReadPlan) -> Followed:
        """The topic of a plan. Raises UsageError `topic.unknown`, `topic.recreated`."""
        record = self._records.get(plan.topic)
        if record is None or record.deleted or record.epoch != plan.epoch:
            self._run(self._refresh())
            record = self._records.get(plan.topic)
        if record is None or record.deleted:
            raise self._unknown(plan.topic)
        if record.epoch != plan.epoch:
            raise recreated(plan.topic)
        return Followed(plan.topic, self._name(plan.topic), plan.epoch, 0)

    def _look_again(self) -> None:
        self._bounds.clear()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        # It was closed if the process has been connected to many clusters since.
        self._link = shared_link(self.place)
        return self._link.run(work, LEADER_S + ANSWER_TIMEOUT_S)

    def _name(self, topic: str) -> str:
        return kafka_name(topic, self.place.prefix)

    # On the link's loop

    async def _refresh(self) -> None:
        """Read what nodes have written to the registry since the last look.

        Raises UsageError `data.not-found` if no node has used the cluster with this prefix.
        """
        name = self._registry.name
        if name not in self._link.partitions:
            await self._link.refreshed()
        state = self._link.partitions.get(name)
        if state is None:
            text = f"no node of polybus has used {self.place}; check the address and the prefix"
            raise UsageError("data.not-found", text)
        if state.topic_id != self._registry_id:
            self._registry_id = state.topic_id
            self._records, self._registry.position = {}, 0
        stop = (await self._link.offsets([name], LATEST)).get(name, 0)
        await read_to(self._link, self._registry, stop, self._apply)

    def _apply(self, batches: list[Batch]) -> None:
        for batch in batches:
            for record in read_records(batch):
                if counts(record, self._records.get(record.topic)):
                    self._records[record.topic] = record

    async def _find_bounds(self, topics: list[str]) -> dict[str, Bounds]:
        await self._refresh()
        known = {}
        for topic in topics:
            record = self._records.get(topic)
            if record is not None and not record.deleted:
                known[topic] = self._name(topic), record
        if any(self._id_of(name) != record.id for name, record in known.values()):
            # This process's metadata of Kafka's topics, or the nodes' records of them, are
            # outdated.
            await self._link.refreshed()
            await self._refresh()
        names = [name for name, _ in known.values()]
        starts = await self._link.offsets(names, EARLIEST)
        stops = await self._link.offsets(names, LATEST)
        found = {}
        for topic, (name, record) in known.items():
            record = self._records.get(topic, record)
            # Another program recreated the topic under another id; the nodes will record that soon.
            is_ours = self._id_of(name) == record.id and not record.deleted
            if is_ours and name in starts and name in stops:
                stop = stops[name]
                found[topic] = Bounds(record.epoch, min(starts[name], stop), stop)
        return found

    def _id_of(self, name: str) -> str:
        state = self._link.partitions.get(name)
        return "" if state is None else state.topic_id.hex()

    async def _fetch(self, one: Followed, offset: int, stop: int) -> list[Batch] | None:
        """The messages of a topic; None if Kafka's topic of that name has another id.

        Raises as `fetch_at`.
        """
        last: Exception | None = None
        deadline = time.monotonic() + LEADER_S
        while time.monotonic() < deadline:
            record = self._records.get(one.topic)
            if record is None or record.deleted or record.epoch != one.epoch:
                return None
            try:
                found = await fetch_at(self._link, one, offset, stop, PAGE_BYTES, ATTEMPT_S)
                # Not the answer of another broker, which may learn of a new topic later.
                answer = await self._link.send(one.answered_by, TopicsRequest([one.name]), READ)
                state = states_of(answer).get(one.name)
                return found if state is not None and state.topic_id.hex() == record.id else None
            except StorageError as error:
                if error.code != "log.unreachable":
                    raise
                last = error
            except LINK_ERRORS as error:
                last = error
            # Its leader, or the topic, no longer exists.
            self._link.stale()
            await asyncio.sleep(RETRY_S)
            await self._refresh()
        text = f"topic {one.topic!r}: Kafka's leader does not answer"
        raise StorageError("log.unreachable", text) from last


def rows_of_all(batches: Sequence[Batch]) -> pa.RecordBatch:
    """The rows of batches of one topic, in the order of their offsets; these may have gaps.

    This overwrites the epochs of the batches: rows are grouped by topic and epoch, and the offsets
    of a group are consecutive, so each run of offsets gets its own epoch.
    """
    run, following = 0, -1
    for batch in batches:
        run += batch.first_offset != following
        batch.epoch, following = run, batch.last_offset + 1
    pieces, _ = MessageWriter().write(GroupedRows(batches), b" " * 64)
    return read_rows(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def _by_bytes(batches: list[Batch]) -> Iterator[list[Batch]]:
    """The batches in lists of bounded size: well compressed batches are large as rows."""
    some: list[Batch] = []
    size = 0
    for batch in batches:
        if some and size + batch.value_bytes > BATCH_BYTES_MAX:
            yield some
            some, size = [], 0
        some.append(batch)
        size += batch.value_bytes
    if some:
        yield some
