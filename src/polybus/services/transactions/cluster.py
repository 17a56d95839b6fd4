"""Transactions in a cluster: done exactly once, even if nodes die at any time.

A transaction is one of Kafka (polybus.log.kafka.transacting): its messages and its record in
`$commits` become visible together. There are no intents: Kafka takes a transaction of any size,
part after part. The order:

1. `begin` fences: every earlier transaction of the producer, on any node, has ended.
2. This node waits until it has all of `$commits`, so it knows whether this one was done before.
3. The messages of all parts, then the record with their offsets, then the commit.
4. The answer, and the removal of the staged files.

A node that dies before the commit leaves nothing; after it, it leaves the record. A producer
without an answer repeats the request at any node with the same key. The staged files are on the
node that received them: if it is gone, they must be staged again, and their transaction is still
done once.

`$commits` is compacted by producer, so it has the last transaction of each forever, and state.db
is not used.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

import msgspec

from polybus.batch import Batch
from polybus.bus.subscriptions import Publisher, Subscriber
from polybus.errors import StorageError, UsageError
from polybus.log.interface import ClusterLog, LogTransaction
from polybus.services.accounts.access import AccountAccess
from polybus.services.accounts.accounts import Accounts
from polybus.services.blobs.blobs import Blobs
from polybus.services.context import Context
from polybus.services.state import StateDb
from polybus.services.transactions import rights, staging
from polybus.services.transactions.commits import TOPIC, CommitRecord, Offsets, joined
from polybus.services.transactions.transactions import (
    STAGED_AGE_S,
    TICK_S,
    CommitRequest,
    Transactions,
)
from polybus.structs import decode

logger = logging.getLogger("polybus.commits")


class ClusterTransactions(Transactions, Subscriber):
    """The transactions of all nodes; on this one it subscribes to `$commits`."""

    protocol = "polybus"

    def __init__(
        self,
        context: Context,
        state: StateDb,
        accounts: Accounts,
        blobs: Blobs,
        cluster: ClusterLog,
    ) -> None:
        super().__init__(context, state, accounts, blobs)
        self._cluster = cluster

    # Lifecycle

    async def start(self) -> None:
        """Read what was committed. Raises StorageError."""
        log = self._bus.log
        await asyncio.to_thread(log.catch_up, TOPIC)
        offset = log.bounds(TOPIC).start
        while offset < log.bounds(TOPIC).stop:
            batches = await asyncio.to_thread(log.read, TOPIC, offset)
            if not batches:
                break
            for batch in batches:
                self.deliver(batch)
            offset = batches[-1].last_offset + 1
        self._bus.subscribe(TOPIC, self)
        self._housekeeping = asyncio.create_task(self._keep_house())

    async def _save(self) -> None:
        """Saves nothing: the log has it."""

    async def _keep_house(self) -> None:
        while True:
            await asyncio.to_thread(
                staging.sweep, self._data, older_than_s=STAGED_AGE_S, now_s=time.time(), keep=set()
            )
            await asyncio.sleep(TICK_S)

    # The bus calls these

    def deliver(self, batch: Batch, publisher: Publisher | None = None) -> None:
        for value in batch.values():
            try:
                record = decode(value, CommitRecord)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.error("%s, from offset %d: %s", TOPIC, batch.first_offset, error)
                continue
            known = self._producers.get(record.producer)
            if known is None or known.query != record.query or known.batch <= record.batch:
                self._producers.apply(record)

    def topic_deleted(self, topic: str) -> None:
        """Ignored: a system topic cannot be deleted unless it is damaged."""

    # Committing

    async def commit(self, wanted: CommitRequest, access: AccountAccess) -> tuple[Offsets, bool]:
        key = wanted.key
        lock = self._locks.setdefault(key.producer, asyncio.Lock())
        async with lock:
            offsets, is_known = None, True
            # Only an answer counts: a refusal may be due to a transaction that another node has
            # committed and this node has not read yet.
            with contextlib.suppress(UsageError):
                offsets = self._decide(wanted)
            if offsets is None:
                offsets, is_known = await self._begin(wanted, access)
            await asyncio.to_thread(staging.drop, self._data, key.producer, batch_max=key.batch)
            return offsets, is_known

    def _decide(self, wanted: CommitRequest) -> Offsets | None:
        key = wanted.key
        return self._producers.decide(
            key, take_over=wanted.take_over, gaps=wanted.gaps, own_max=self._own_max(key)
        )

    async def _begin(self, wanted: CommitRequest, access: AccountAccess) -> tuple[Offsets, bool]:
        """Do the transaction, unless another node has done it."""
        paths = staging.paths_of(self._data, wanted.key.producer, wanted.files)
        with self.uploads.committing(paths):
            transaction = await asyncio.to_thread(self._cluster.begin, wanted.key.producer)
            await asyncio.to_thread(self._cluster.settle, TOPIC)
            offsets = self._decide(wanted)
            if offsets is not None:
                return offsets, True
            try:
                async with self._turn:
                    record = await self._write(wanted, access, transaction)
            except BaseException as error:
                # Leave no open transaction after a cancellation or a bug.
                if not (isinstance(error, StorageError) and error.code == "commit.fenced"):
                    await asyncio.shield(asyncio.to_thread(transaction.abort))
                raise
            await asyncio.shield(asyncio.to_thread(transaction.commit))
        self._producers.apply(record)
        return record.offsets, False

    async def _write(
        self, wanted: CommitRequest, access: AccountAccess, transaction: LogTransaction
    ) -> CommitRecord:
        key = wanted.key
        paths = staging.paths_of(self._data, key.producer, wanted.files)
        topics, _, _ = await self._in_thread(staging.inspect, paths, self._limits)
        rights.check_topics(self._bus, access, topics)
        rights.check_quota(access, self._context.clock_us())
        offsets: Offsets = {}
        reading = staging.parts(paths, self._limits)
        is_last = False
        while not is_last:
            batches, is_last = await self._in_thread(next, reading)
            rights.give_full_names(batches, access)
            offsets = joined(offsets, await self._add(batches, key.producer, transaction))
            rights.charge(access, batches)
        record = CommitRecord(
            kind="commit",
            producer=key.producer,
            query=key.query,
            batch=key.batch,
            offsets=offsets,
        )
        note = Batch.of(TOPIC, [msgspec.json.encode(record)], keys=[key.producer.encode()])
        await self._add([note], key.producer, transaction)
        return record

    async def _add(
        self, batches: Sequence[Batch], producer: str, transaction: LogTransaction
    ) -> Offsets:
        now_us = self._context.clock_us()
        for batch in batches:
            batch.sender, batch.timestamp_us = producer, now_us
        await asyncio.to_thread(transaction.append, batches)
        offsets: Offsets = {}
        for one in batches:
            if len(one):
                place = (one.epoch, one.first_offset, one.last_offset + 1)
                offsets = joined(offsets, {one.topic: [place]})
        return offsets
