"""Transactions: staged messages of many topics are published together, once, and safely.

1. Whatever the producer left unfinished is finished. 2. A transaction that is known is answered
from memory. 3. The staged files are looked at, all of them, before anything happens. 4. One that
fits a part is published with its record in one commit of the log. A larger one first gets an
intent, which must be safe, and then goes part by part; a crash in between is made good at the next
start. 5. The answer waits until all is safe, then the staged files go.

Between parts the loop does other work, and publishing waits while memory is short.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from polybus import names
from polybus.batch import Batch
from polybus.bus.bus import NOTHING, unknown_topic
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.services.system_topics import settings_of
from polybus.services.transactions import staging
from polybus.services.transactions.commit_state import CommitState, Position, row_of
from polybus.services.transactions.commits import (
    TOPIC,
    Done,
    Key,
    Offsets,
    Producer,
    Producers,
    Record,
    Unfinished,
    joined,
)
from polybus.services.transactions.staging import Plan, StagedLimits
from polybus.services.transactions.uploads import Uploads

if TYPE_CHECKING:
    from polybus.edges.server import Server

logger = logging.getLogger("polybus.commits")
T = TypeVar("T")

ROOM_POLL_S = 0.005
RECEIPT_POLL_S = 0.5
TICK_S = 60.0
STAGED_AGE_S = 86_400.0


class Wanted(msgspec.Struct, frozen=True):
    """A transaction as its producer asks for it."""

    key: Key
    files: Sequence[str]
    take_over: bool = False
    gaps: bool = False


class Transactions:
    """All producers' transactions on one bus."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._bus = server.bus
        self._data = Path(server.config.data)
        limits = server.config.limits
        self._limits = StagedLimits(
            message_bytes_max=limits.message_bytes_max,
            transaction_bytes_max=limits.transaction_bytes_max,
            part_bytes=limits.transaction_part_bytes,
            headers_max=limits.properties_max,
        )
        self._producers = Producers(producers_max=limits.producers_max)
        self._state = CommitState(self._data / "state.db")
        self._tickets: dict[str, int] = {}
        self._last_ticket = 0
        self._saved = Position(0, 0)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.uploads = Uploads(self._data, bytes_max=limits.staging_bytes_max)
        # One part at a time is in memory, whoever it is from.
        self._turn = asyncio.Lock()
        # One thread reads them all: each thread would keep memory of its own for the next time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polybus-commits")
        self._housekeeping: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        """Learn what was committed, and finish what was begun. Raises StorageError."""
        self._bus.make_system_topic(TOPIC, settings_of(self._server.config))
        producers, self._saved = await asyncio.to_thread(self._state.load)
        for producer in producers:
            self._producers.restore(producer)
        await self._read_records()
        for unfinished in self._producers.unfinished():
            key = unfinished.intent.key
            try:
                await self._finish(unfinished)
                logger.warning("finished batch %d of producer %s", key.batch, key.producer)
            except PolybusError as error:
                logger.error("producer %s, batch %d: %s", key.producer, key.batch, error)
        self._housekeeping = asyncio.create_task(self._keep_house())

    async def close(self) -> None:
        self.uploads.close()
        if self._housekeeping is None:
            return
        self._housekeeping.cancel()
        await asyncio.wait([self._housekeeping])
        self._thread.shutdown(wait=False)
        try:
            await self._save()
        except StorageError as error:
            # Nothing is lost: the next start reads it from the log.
            logger.warning("%s", error)

    async def _read_records(self) -> None:
        bounds = self._bus.log.bounds(TOPIC)
        epoch, offset = self._saved
        offset = max(offset, bounds.start) if epoch == bounds.epoch else bounds.start
        while offset < bounds.stop:
            for batch in await asyncio.to_thread(self._bus.log.read, TOPIC, offset):
                for value in batch.values():
                    self._learn(value, offset)
                offset = batch.last_offset + 1

    def _learn(self, value: bytes, offset: int) -> None:
        try:
            self._producers.apply(msgspec.json.decode(value, type=Record))
        except msgspec.DecodeError as error:
            # Written by nobody we know; a bus that does not start would be worse.
            logger.error("%s, batch at offset %d: no record: %s", TOPIC, offset, error)

    async def _keep_house(self) -> None:
        while True:
            try:
                await self._save()
            except StorageError as error:
                logger.warning("%s", error)
            durable = self._bus.log.durable
            self._tickets = {name: one for name, one in self._tickets.items() if one > durable}
            keep = {path for one in self._producers.unfinished() for path in self._paths(one)}
            await asyncio.to_thread(
                staging.sweep, self._data, older_than_s=STAGED_AGE_S, now_s=time.time(), keep=keep
            )
            await asyncio.sleep(TICK_S)

    async def _save(self) -> None:
        bounds = self._bus.log.bounds(TOPIC)
        position = Position(bounds.epoch, bounds.stop)
        # Never what a crash could still take from the log.
        if position == self._saved or self._bus.log.durable < self._last_ticket:
            return
        rows = [row_of(one) for one in self._producers.all()]
        await asyncio.to_thread(self._state.save, rows, position)
        self._saved = position

    # Asking

    def producer(self, name: str) -> Producer:
        """Raises UsageError `commit.unknown`."""
        known = self._producers.get(name)
        if known is None or known.batch < 0:
            raise UsageError("commit.unknown", f"producer {name[:40]!r} has committed nothing")
        return known

    def is_wanted(self, path: Path) -> bool:
        """Whether a transaction that is under way needs the staged file."""
        known = self._producers.get(path.parent.name)
        unfinished = known.unfinished if known is not None else None
        is_begun = unfinished is not None and path.name in unfinished.intent.files
        return is_begun or self.uploads.files.is_committing(path)

    # Committing

    async def commit(self, wanted: Wanted, *, is_admin: bool) -> tuple[Offsets, bool]:
        """Do the transaction, unless it is done; all is safe when this returns.

        Returns where the messages are, and whether they had been there before.

        Raises:
            UsageError: refused, with nothing published.
            StorageError: it may be published or not: ask again, with the same key.
        """
        key = wanted.key
        lock = self._locks.setdefault(key.producer, asyncio.Lock())
        async with lock:
            begun = await self._finish_earlier(wanted)
            done = self._producers.decide(key, take_over=wanted.take_over, gaps=wanted.gaps)
            is_known = done is not None and begun is None
            if done is None:
                done = Done(await self._publish(wanted, is_admin=is_admin))
            elif begun is not None:
                done = Done(begun)
            else:
                await self._safe(self._tickets.get(key.producer, 0))
            await asyncio.to_thread(staging.drop, self._data, key.producer, batch_max=key.batch)
            return done.offsets, is_known

    async def _finish_earlier(self, wanted: Wanted) -> Offsets | None:
        """Finish what the producer began before; where it is, if it is this very transaction."""
        known = self._producers.get(wanted.key.producer)
        if known is None or known.unfinished is None:
            return None
        begun = known.unfinished.intent.key
        try:
            offsets = await self._finish(known.unfinished)
        except UsageError:
            # Its files are gone, and the producer has been told so before.
            if not wanted.take_over:
                raise
            known.unfinished = None
            return None
        return offsets if begun == wanted.key else None

    async def _publish(self, wanted: Wanted, *, is_admin: bool) -> Offsets:
        paths = self._files(wanted.key.producer, wanted.files)
        with self.uploads.files.committing(paths):
            return await self._publish_files(wanted, paths, is_admin=is_admin)

    async def _publish_files(
        self, wanted: Wanted, paths: Sequence[Path], *, is_admin: bool
    ) -> Offsets:
        key = wanted.key
        async with self._turn:
            plan = await self._in_thread(staging.plan, paths, self._limits)
            self._check(plan, is_admin=is_admin)
            record = Record(kind="commit", producer=key.producer, query=key.query, batch=key.batch)
            unfinished: Unfinished | None = None
            if plan.batches is not None:
                await self._room()
                ticket = self._append(plan.batches, record)
                plan.batches = None
            else:
                record.kind, record.files = "intent", list(wanted.files)
                record.system = any(map(names.is_reserved, plan.topics))
                record.parts, record.part_bytes = plan.parts, self._limits.part_bytes
                ticket = self._append([], record)
                known = self._producers.get(key.producer)
                unfinished = known.unfinished if known is not None else None
        await self._safe(ticket)
        # What was published is told from here: a producer of a single transaction may be forgotten.
        return record.offsets if unfinished is None else await self._finish(unfinished)

    async def _finish(self, unfinished: Unfinished) -> Offsets:
        """Publish the parts that are still to come; say where all are. Raises as `commit`."""
        intent = unfinished.intent
        # The sizes were looked at before the intent was made, and a limit may have changed since.
        limits = StagedLimits(
            message_bytes_max=1 << 31,
            transaction_bytes_max=1 << 62,
            part_bytes=intent.part_bytes,
            headers_max=1 << 31,
        )
        ticket = 0
        offsets: Offsets = {}
        reading = staging.parts(self._paths(unfinished), limits)
        for part in range(1, intent.parts + 1):
            async with self._turn:
                batches = await self._in_thread(next, reading, None)
                if batches is None:
                    text = f"a staged file of producer {intent.producer!r} has changed"
                    raise UsageError("commit.file", text)
                if part <= unfinished.parts_done:
                    continue
                for batch in batches:
                    self._check_system(batch.topic, may=intent.system)
                await self._room()
                is_last = part == intent.parts
                record = Record(
                    kind="commit" if is_last else "part",
                    producer=intent.producer,
                    query=intent.query,
                    batch=intent.batch,
                    part=part,
                    parts=intent.parts,
                )
                ticket = self._append(self._still_there(batches), record, unfinished.offsets)
                offsets = record.offsets
                # Not beside the next part, too.
                del batches
        await self._safe(ticket)
        await asyncio.to_thread(staging.drop, self._data, intent.producer, batch_max=intent.batch)
        return offsets

    def _append(self, batches: list[Batch], record: Record, before: Offsets | None = None) -> int:
        """Publish the batches and the record that says so, all or nothing."""
        offsets = self._offsets(batches)
        if record.kind == "commit":
            record.offsets = joined(before or {}, offsets)
        else:
            record.offsets = offsets
        for batch in batches:
            batch.sender = record.producer
        note = Batch.of(TOPIC, [msgspec.json.encode(record)], keys=[record.producer.encode()])
        ticket = self._bus.commit([*batches, note], is_part=record.parts > 1)
        self._producers.apply(record)
        self._tickets[record.producer] = self._last_ticket = ticket
        return ticket

    def _offsets(self, batches: Sequence[Batch]) -> Offsets:
        """Where the batches will be: nobody else appends before they are."""
        counts: dict[str, int] = {}
        for batch in batches:
            counts[batch.topic] = counts.get(batch.topic, 0) + len(batch)
        bounds = {topic: self._bus.log.bounds(topic) for topic in counts}
        return {
            topic: [(bounds[topic].epoch, bounds[topic].stop, bounds[topic].stop + count)]
            for topic, count in counts.items()
        }

    def _still_there(self, batches: Sequence[Batch]) -> list[Batch]:
        """Without the messages of topics that were deleted since the transaction began."""
        return [batch for batch in batches if self._bus.has_topic(batch.topic)]

    # Looking

    def _files(self, producer: str, files: Sequence[str]) -> list[Path]:
        for name in files:
            staging.check_file(name)
        if len(set(files)) < len(files):
            raise UsageError("commit.file", "a staged file is named twice")
        return [staging.staging_folder(self._data) / producer / name for name in files]

    def _paths(self, unfinished: Unfinished) -> list[Path]:
        return self._files(unfinished.intent.producer, unfinished.intent.files)

    def _check(self, plan: Plan, *, is_admin: bool) -> None:
        for topic in sorted(plan.topics):
            self._check_system(topic, may=is_admin)
            if not self._bus.has_topic(topic):
                raise unknown_topic(topic)

    def _check_system(self, topic: str, *, may: bool) -> None:
        if names.is_reserved(topic) and (topic == TOPIC or not may):
            text = f"'{topic}' is a system topic: writing to it needs the bus's own token"
            raise UsageError("topic.reserved", text)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # Waiting

    async def _room(self) -> None:
        """Wait until publishers may go on, and the part before this one is out of memory.

        Raises StorageError.
        """
        await self._safe(self._last_ticket)
        while self._server.over_memory():  # noqa: ASYNC110
            await asyncio.sleep(ROOM_POLL_S)

    async def _safe(self, ticket: int) -> None:
        """Wait until everything up to the ticket is durable. Raises StorageError."""
        log = self._bus.log
        if ticket <= log.durable:
            return
        if log.on_durable is None:
            # The bus is only starting: nobody would give the receipt.
            await asyncio.to_thread(log.sync)
            return
        receipt = _Receipt(asyncio.get_running_loop().create_future())
        self._bus.expect_receipt(ticket, NOTHING, receipt)
        while not receipt.given.done():
            await asyncio.wait([receipt.given], timeout=RECEIPT_POLL_S)
            error = self._server.storage_error
            if error is not None and not receipt.given.done():
                raise StorageError(error.code, f"the commit may not be safe: {error.text}")


class _Receipt:
    def __init__(self, given: asyncio.Future[None]) -> None:
        self.given = given

    def receipt(self, batch: Batch) -> None:
        if not self.given.done():
            self.given.set_result(None)
