"""Transactions: staged messages of many topics, published together, exactly once.

Order of writes, and what a start does when a crash came after each:

1. The producer stages files and fsyncs them. Files without a transaction expire after a day.
2. A transaction that fits one part: its messages and its record in `$commits` are one commit of the
   log. A torn commit is cut off, so the transaction was not done.
   A larger one: its intent, alone, must be durable first. From then on it will be finished: a start
   publishes the parts that have no record yet, reading the staged files again.
   Then part after part, each with its record in one commit; the last record says `commit`.
   A value over `inline-bytes-max` is a blob, durable before the commit with its reference, as
   log/blobs.py says; a start that finishes a transaction stores those of the parts to come again.
3. The answer is given when all of it is durable. A producer without an answer asks again with the
   same key and gets the recorded result (idempotent).
4. The staged files are deleted. Files that a crash left are deleted with the producer's next batch.
5. state.db gets the producers' last transactions and the offset of `$commits` up to which they
   count. It holds only durable records; a start reads the records after that offset from the log,
   or all of them if state.db was damaged.

Between parts the loop does other work, and publishing waits while memory is short.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from polybus import names
from polybus.batch import Batch
from polybus.config import Limits
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.services.accounts.access import AccountAccess
from polybus.services.accounts.accounts import Accounts
from polybus.services.blobs.blobs import Blobs, StoredPayload
from polybus.services.context import Context
from polybus.services.repeating import RepeatedWork
from polybus.services.state import StateDb
from polybus.services.state_rows import summed
from polybus.services.threads import in_thread
from polybus.services.transactions import rights, staging
from polybus.services.transactions.commits import (
    TOPIC,
    CommitRecord,
    Offsets,
    Producer,
    Producers,
    TransactionKey,
    Unfinished,
    joined,
    unknown_producer,
)
from polybus.services.transactions.staged_uploads import StagedUploads, StagingRoom
from polybus.structs import decode

logger = logging.getLogger("polybus.commits")
T = TypeVar("T")

TICK_S = 60.0
STAGED_AGE_S = 86_400.0
LOST_QUERY = "unknown (state.db or $commits was damaged)"


class CommitRequest(msgspec.Struct, frozen=True):
    """A transaction as its producer requests it."""

    key: TransactionKey
    files: Sequence[str]
    take_over: bool = False
    gaps: bool = False


class Transactions:
    """All producers' transactions on one bus."""

    def __init__(self, context: Context, state: StateDb, accounts: Accounts, blobs: Blobs) -> None:
        self._accounts = accounts
        self._blobs = blobs
        self._context = context
        self._bus = context.bus
        self._data = context.data
        self._state = state
        self._limits = limits = context.config.limits
        self._producers = Producers(producers_max=limits.producers_max)
        self._tickets: dict[str, int] = {}
        self._last_ticket = 0
        # Epoch and offset: `$commits` up to here is in state.db.
        self._saved = (0, 0)
        # Why `$commits` could not be read at the start: `_producers` is then incomplete.
        self._unread: StorageError | None = None
        self._reading = asyncio.Lock()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        room = StagingRoom(
            self._data, bytes_max=limits.staging_bytes_max, own_bytes_max=self._own_bytes_max
        )
        self.uploads = StagedUploads(room)
        # One part at a time is in memory, of all producers together.
        self._turn = asyncio.Lock()
        # One thread for all reads: each thread keeps memory for its next read.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polybus-commits")
        self._housekeeping: asyncio.Task[None] | None = None

    # Lifecycle

    async def start(self) -> None:
        """Read what was committed, and finish transactions that have an intent.

        Raises:
            StorageError: state.db cannot be read.
        """
        for epoch, offset in await self._state.read(
            "SELECT epoch, next_offset FROM producers_read"
        ):
            self._saved = (epoch, offset)
        for (row,) in await self._state.read("SELECT json FROM producers"):
            producer = decode(row, Producer)
            self._producers[producer.name] = producer
        try:
            await self._read_records()
            self._refuse_lost()
        except StorageError as error:
            # Without its records a transaction could be done twice, and a sweep could delete files
            # that an unknown intent still needs.
            logger.error("%s: %s; nothing can be committed", TOPIC, error)
            self._bus.log.freeze(TOPIC, error.text)
            self._unread = error
            return
        self._unread = None
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
        # Without housekeeping `_producers` is not known to be complete, and must not be saved.
        if self._housekeeping is None:
            return
        self._housekeeping.cancel()
        await asyncio.wait([self._housekeeping])
        self._thread.shutdown(wait=False)
        try:
            await self._save()
        except PolybusError as error:
            # Nothing is lost: the next start reads the records from the log.
            logger.warning("%s", error)

    async def check_read(self) -> None:
        """Raises StorageError if `$commits` could not be read."""
        if self._unread is None:
            return
        async with self._reading:
            if self._unread is not None:
                if TOPIC in self._bus.log.frozen:
                    raise self._unread.copy()
                # An administrator has deleted it, and an empty one has replaced it.
                await self.start()

    async def _read_records(self) -> None:
        bounds = self._bus.log.bounds(TOPIC)
        epoch, offset = self._saved
        offset = max(offset, bounds.start) if epoch == bounds.epoch else bounds.start
        if 0 < epoch < bounds.epoch and self._context.config.durability != "memory":
            self._doubt_all()
        while offset < bounds.stop:
            for batch in await asyncio.to_thread(self._bus.log.read, TOPIC, offset):
                for at, value in enumerate(batch.values(), offset):
                    try:
                        self._producers.apply(decode(value, CommitRecord))
                    except (msgspec.DecodeError, UnicodeDecodeError) as error:
                        # Only the bus writes there. Starting without the record is better than not
                        # starting.
                        logger.error("%s, offset %d: not a valid record: %s", TOPIC, at, error)
                offset = batch.last_offset + 1

    def _doubt_all(self) -> None:
        """The topic was replaced: the transactions after the last save are unknown."""
        for one in self._producers.values():
            logger.error("producer %s has lost its last batch (%s was damaged)", one.name, TOPIC)
            one.query, one.unfinished = LOST_QUERY, None

    def _refuse_lost(self) -> None:
        """Refuse producers that state.db and the log have lost, until they take their name over."""
        for damage in self._state.damages:
            if damage.kind == "producer" and damage.name and damage.name not in self._producers:
                logger.error("producer %s has lost its last batch (state.damaged)", damage.name)
                self._producers[damage.name] = Producer(name=damage.name, query=LOST_QUERY)

    async def _keep_house(self) -> None:
        saving = RepeatedWork(logger, "the producers cannot be saved")
        while True:
            await saving.attempt(self._save())
            durable = self._bus.log.durable
            self._tickets = {name: one for name, one in self._tickets.items() if one > durable}
            keep = {path for one in self._producers.unfinished() for path in self._paths(one)}
            await asyncio.to_thread(
                staging.sweep, self._data, older_than_s=STAGED_AGE_S, now_s=time.time(), keep=keep
            )
            await asyncio.sleep(TICK_S)

    async def _save(self) -> None:
        bounds = self._bus.log.bounds(TOPIC)
        read_to = (bounds.epoch, bounds.stop)
        # Only durable records: a crash could still remove the others from the log.
        if read_to == self._saved or self._bus.log.durable < self._last_ticket:
            return
        rows = [summed(one.name, msgspec.json.encode(one)) for one in self._producers.values()]
        statements = [
            ("DELETE FROM producers", ()),
            ("INSERT INTO producers VALUES (?, ?, ?)", rows),
            ("INSERT OR REPLACE INTO producers_read VALUES (?, ?, ?, ?)", summed(0, *read_to)),
        ]
        await self._state.write(statements)
        self._saved = read_to

    async def forget_account(self, account: str) -> None:
        """Forget the producers of a deleted account, and their staged files, because a later
        account may have the same name. A crash may restore them until state.db is saved.
        """
        self._producers.forget_account(account)
        # Write all of them again.
        self._saved = (0, 0)
        await asyncio.to_thread(staging.drop_account, self._data, account)

    # Queries

    def producer(self, name: str) -> Producer:
        """Raises UsageError `commit.unknown`."""
        known = self._producers.get(name)
        if known is None or known.batch < 0:
            raise unknown_producer(name)
        return known

    def is_wanted(self, path: Path) -> bool:
        """Whether an unfinished transaction needs the staged file."""
        known = self._producers.get(staging.producer_of(path))
        unfinished = known.unfinished if known is not None else None
        is_begun = unfinished is not None and path.name in unfinished.intent.files
        return is_begun or self.uploads.is_committing(path)

    # Committing

    async def commit(self, wanted: CommitRequest, access: AccountAccess) -> tuple[Offsets, bool]:
        """Publish the transaction unless it was published before; it is durable on return.

        `access` has the permissions of its sender; the producer in its key belongs to that account.
        Returns the messages' offsets, and whether they were published before.

        Raises:
            UsageError: refused, with nothing published.
            StorageError: it may or may not be published: repeat the request with the same key.
        """
        await self.check_read()
        key = wanted.key
        lock = self._locks.setdefault(key.producer, asyncio.Lock())
        async with lock:
            begun = await self._finish_earlier(wanted)
            offsets = self._producers.decide(
                key, take_over=wanted.take_over, gaps=wanted.gaps, own_max=self._own_max(key)
            )
            is_known = offsets is not None and begun is None
            if offsets is None:
                offsets = await self._publish(wanted, access)
            elif begun is not None:
                offsets = begun
            else:
                await self._context.durability.wait(self._tickets.get(key.producer, 0))
            await asyncio.to_thread(staging.drop, self._data, key.producer, batch_max=key.batch)
            return offsets, is_known

    def _own_bytes_max(self, account: str) -> int | None:
        """How many bytes an account may stage. Thread-safe."""
        limits = self._accounts.configs.limits.get(account)
        return None if limits is None else limits.staging_bytes_max

    def _own_max(self, key: TransactionKey) -> int | None:
        account, slash, _ = key.producer.partition("/")
        limits = self._accounts.configs.limits.get(account) if slash else None
        return None if limits is None else limits.producers_max

    async def _finish_earlier(self, wanted: CommitRequest) -> Offsets | None:
        """Finish the producer's unfinished transaction; return its offsets if it is the requested
        one.
        """
        known = self._producers.get(wanted.key.producer)
        if known is None or known.unfinished is None:
            return None
        begun = known.unfinished.intent.key
        try:
            offsets = await self._finish(known.unfinished)
        except UsageError:
            # Its files are gone, and an earlier request has reported that to the producer.
            if not wanted.take_over:
                raise
            known.unfinished = None
            return None
        return offsets if begun == wanted.key else None

    async def _publish(self, wanted: CommitRequest, access: AccountAccess) -> Offsets:
        key = wanted.key
        paths = staging.paths_of(self._data, key.producer, wanted.files)
        with self.uploads.committing(paths):
            async with self._turn:
                topics, parts, batches = await self._in_thread(staging.inspect, paths, self._limits)
                rights.check_topics(self._bus, access, topics)
                rights.check_quota(access, self._context.clock_us())
                record = CommitRecord(
                    kind="commit", producer=key.producer, query=key.query, batch=key.batch
                )
                unfinished: Unfinished | None = None
                if batches is not None:
                    await self._room()
                    rights.give_full_names(batches, access)
                    ticket = await self._spill_and_append(batches, record, access)
                    batches = None
                else:
                    record.kind, record.files = "intent", list(wanted.files)
                    record.account = access.account
                    record.system = any(map(names.is_reserved, topics))
                    record.parts = parts
                    record.part_bytes = self._limits.transaction_part_bytes
                    ticket = self._append([], record)
                    known = self._producers.get(key.producer)
                    unfinished = known.unfinished if known is not None else None
            await self._context.durability.wait(ticket)
            # Not from `_producers`: it may have dropped a producer of a single transaction.
            return record.offsets if unfinished is None else await self._finish(unfinished)

    async def _finish(self, unfinished: Unfinished) -> Offsets:
        """Publish the parts that have no record; return all offsets. Raises as `commit` does."""
        intent = unfinished.intent
        access = self._accounts.of(intent.account)
        # Sizes were checked before the intent was written, and limits may have changed since.
        limits = Limits(
            message_bytes_max=1 << 31,
            transaction_bytes_max=1 << 62,
            transaction_part_bytes=intent.part_bytes,
            properties_max=1 << 31,
        )
        ticket = 0
        offsets: Offsets = {}
        reading = staging.parts(self._paths(unfinished), limits)
        for part in range(1, intent.parts + 1):
            async with self._turn:
                batches, _ = await self._in_thread(next, reading, (None, True))
                if batches is None:
                    text = f"a staged file of producer {intent.producer!r} has changed"
                    raise UsageError("commit.file", text)
                if part <= unfinished.parts_done:
                    continue
                # A deleted account publishes nothing more.
                batches = [] if access is None else batches
                rights.give_full_names(batches, access or self._accounts.nobody)
                for batch in batches:
                    rights.check_system(batch.topic, may=intent.system)
                await self._room()
                is_last = part == intent.parts
                record = CommitRecord(
                    kind="commit" if is_last else "part",
                    producer=intent.producer,
                    query=intent.query,
                    batch=intent.batch,
                    part=part,
                    parts=intent.parts,
                )
                # A topic may have been deleted since the transaction began.
                batches = [batch for batch in batches if self._bus.has_topic(batch.topic)]
                ticket = await self._spill_and_append(batches, record, access, unfinished.offsets)
                offsets = record.offsets
                # Free this part before the next one is read.
                del batches
        await self._context.durability.wait(ticket)
        await asyncio.to_thread(staging.drop, self._data, intent.producer, batch_max=intent.batch)
        return offsets

    async def _spill_and_append(
        self,
        batches: list[Batch],
        record: CommitRecord,
        access: AccountAccess | None,
        before: Offsets | None = None,
    ) -> int:
        """Store large values as blobs, and publish. If it raises, nothing was published."""
        kept: list[tuple[StoredPayload, Batch]] = []
        try:
            for index, batch in enumerate(batches):
                if self._blobs.is_large(batch):
                    # The quota was checked before, for the whole transaction.
                    batches[index], found = await self._blobs.spill(batch, self._accounts.admin)
                    kept += [(one, batches[index]) for one in found]
            ticket = self._append(batches, record, before)
        finally:
            for one, batch in kept:
                self._blobs.published(one, [batch], access)
        if access is not None:
            rights.charge(access, batches)
        return ticket

    def _append(
        self, batches: list[Batch], record: CommitRecord, before: Offsets | None = None
    ) -> int:
        """Publish the batches and their record in one commit of the log."""
        offsets = self._offsets(batches)
        if record.kind == "commit":
            record.offsets = joined(before or {}, offsets)
        else:
            record.offsets = offsets
        for batch in batches:
            batch.sender = record.producer
        note = Batch.of(TOPIC, [msgspec.json.encode(record)], keys=[record.producer.encode()])
        ticket = self._bus.commit([*batches, note], urgent=True, is_part=record.parts > 1)
        self._producers.apply(record)
        self._tickets[record.producer] = self._last_ticket = ticket
        return ticket

    def _offsets(self, batches: Sequence[Batch]) -> Offsets:
        """The offsets that the batches will get: no other append comes in between."""
        counts: Counter[str] = Counter()
        for batch in batches:
            counts[batch.topic] += len(batch)
        bounds = {topic: self._bus.log.bounds(topic) for topic in counts}
        return {
            topic: [(one.epoch, one.stop, one.stop + counts[topic])]
            for topic, one in bounds.items()
        }

    # Checks

    def _paths(self, unfinished: Unfinished) -> list[Path]:
        return staging.paths_of(self._data, unfinished.intent.producer, unfinished.intent.files)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await in_thread(self._thread, work, *arguments)

    async def _room(self) -> None:
        """Wait until publishers may continue and the previous part is out of memory."""
        await self._context.durability.wait(self._last_ticket)
        await self._context.memory.room()
