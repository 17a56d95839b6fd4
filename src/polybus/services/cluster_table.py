"""What the nodes of a cluster share beside messages: sessions, broadcasts, consumers, accounts.

An entry has a kind, a name and a value. All nodes get all entries in the order of the cluster, the
writer's too, and an entry counts when it has come back: that order decides between concurrent
writes of two nodes, in the same way on every node. So no node acts on its own write before that.

A write that takes too long counts as failed, but may still arrive: it is *open* until it arrives or
the cluster refuses it. One of the two happens. The entries of one node arrive in the order of its
writes. Kafka keeps the last entry of each key. So a key whose last entry is the state is not
written again while a write of it is open (`free`).

An entry of an unknown kind comes from a newer version, and is ignored; an unreadable one is logged
and ignored.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from polybus.batch import Batch
from polybus.errors import PolybusError, StorageError
from polybus.log.interface import SHARED, ClusterLog

logger = logging.getLogger("polybus.cluster")
UNREADABLE = "cluster.entry"
WRITE_TIMEOUT_S = 15.0
"""A write counts as failed after this time; it may still arrive."""
BATCH_BYTES = 1 << 20
"""Entries that need not be written together are written in batches of about this size."""


class ClusterEntry(NamedTuple):
    """An entry. An empty value means that it is deleted; `offset` is its position in the order."""

    kind: str
    name: str
    value: bytes
    offset: int = -1

    @property
    def key(self) -> bytes:
        return f"{self.kind}/{self.name}".encode()


Watcher = Callable[[ClusterEntry], None]


class ClusterTable:
    """The entries of all kinds; each kind has one watcher. Runs on the loop.

    `node` is the name of this node, unique also after a restart.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, node: str) -> None:
        self.node = node
        self._loop = loop
        self._log: ClusterLog | None = None
        self._watchers: dict[str, Watcher] = {}
        # Entries that arrived before their kind has a watcher.
        self._early: dict[str, list[ClusterEntry]] = {}
        self._numbers = itertools.count()
        # Open writes, by their batch, and the last one of each key.
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._open: dict[bytes, asyncio.Future[None]] = {}
        self.stop = 0
        """All entries below this offset have arrived and were given to watchers."""
        self._reached = asyncio.Condition()

    def connect(self, log: ClusterLog | None) -> None:
        self._log = log

    def watch(self, kind: str, watcher: Watcher) -> None:
        """Give a watcher all entries of a kind, existing ones first."""
        for entry in self._early.pop(kind, ()):
            self._give(watcher, entry)
        self._watchers[kind] = watcher

    def arrive(self, batches: Sequence[Batch]) -> None:
        """Take entries of any node, in the order of the cluster."""
        for batch in batches:
            found = zip(batch.keys or (), batch.values(), strict=False)
            for offset, (key, value) in enumerate(found, batch.first_offset):
                kind, _, name = (key or b"").decode(errors="replace").partition("/")
                entry = ClusterEntry(kind, name, bytes(value), offset)
                watcher = self._watchers.get(kind)
                if watcher is None:
                    self._early.setdefault(kind, []).append(entry)
                else:
                    self._give(watcher, entry)
            self.stop = batch.last_offset + 1
            done = self._waiting.pop(batch.sender, None)
            if done is not None and not done.done():
                done.set_result(None)
        if batches:
            self._loop.create_task(self._notify())

    def _give(self, watcher: Watcher, entry: ClusterEntry) -> None:
        try:
            watcher(entry)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            logger.error("%s: %s %.80s: %s", UNREADABLE, entry.kind, entry.name, error)

    async def _notify(self) -> None:
        async with self._reached:
            self._reached.notify_all()

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        """The cluster has refused a write."""
        waits = self._waiting.pop(batch.sender, None)
        if waits is not None and not waits.done():
            text = f"the brokers have not stored it for the other nodes: {error.text}"
            waits.set_exception(StorageError("state.failed", text))

    def begin(self, entries: Sequence[ClusterEntry]) -> asyncio.Future[None]:
        """Add entries, all or none; the future is done when they have come back."""
        assert self._log is not None
        values = [entry.value for entry in entries]
        keys = [entry.key for entry in entries]
        batch = Batch.of(SHARED, values, keys=keys)
        batch.protocol = "polybus"
        batch.sender = f"{self.node}.{next(self._numbers)}"
        done = self._waiting[batch.sender] = self._loop.create_future()
        self._open |= dict.fromkeys(keys, done)
        done.add_done_callback(lambda done: self._closed(keys, done))
        self._log.share(batch)
        return done

    async def arrived(self, begun: Sequence[asyncio.Future[None]]) -> StorageError | None:
        """Wait for begun writes; return an error if one has failed. It may still arrive."""
        if not begun:
            return None
        _, late = await asyncio.wait(begun, timeout=WRITE_TIMEOUT_S)
        for one in begun:
            error = None if one in late else one.exception()
            if error is not None:
                assert isinstance(error, StorageError)
                return error
        return _late() if late else None

    async def write(self, entries: Sequence[ClusterEntry]) -> None:
        """Add entries, all or none; they have come back when this returns.

        Raises:
            StorageError: `state.failed`; they may still arrive later.
        """
        error = await self.arrived([self.begin(entries)] if entries else [])
        if error is not None:
            raise error

    def _closed(self, keys: Sequence[bytes], done: asyncio.Future[None]) -> None:
        # The waiter may be gone.
        done.exception()
        for key in keys:
            if self._open.get(key) is done:
                del self._open[key]

    def is_open(self, key: bytes) -> bool:
        """Whether a write of this key has neither come back nor been refused."""
        return key in self._open and not self._open[key].done()

    async def free(self, keys: Iterable[bytes]) -> None:
        """Wait until no write of these keys is open. Raises StorageError `state.failed`.

        They stay free until the caller awaits something.
        """
        keys = list(keys)
        end_s = self._loop.time() + WRITE_TIMEOUT_S
        while found := {self._open[key] for key in keys if self.is_open(key)}:
            left_s = end_s - self._loop.time()
            if left_s <= 0:
                raise _late()
            await asyncio.wait(found, timeout=left_s)

    async def catch_up(self) -> None:
        """Wait for everything that any node has written so far. Raises StorageError."""
        assert self._log is not None
        stop = await asyncio.to_thread(self._log.shared_stop)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S), self._reached:
                await self._reached.wait_for(lambda: self.stop >= stop)
        except TimeoutError as error:
            text = "this node is behind the cluster; try another node, or later"
            raise StorageError("log.unreachable", text) from error

    async def forget(self, entries: Sequence[ClusterEntry]) -> None:
        """Remove deleted entries from the cluster. Raises StorageError."""
        assert self._log is not None
        await asyncio.to_thread(self._log.forget_shared, [entry.key for entry in entries])


def _late() -> StorageError:
    text = f"the cluster has confirmed nothing for {WRITE_TIMEOUT_S:.0f} s; check its brokers"
    return StorageError("state.failed", text)


def split(entries: Iterable[ClusterEntry]) -> list[list[ClusterEntry]]:
    """Entries in batches of about BATCH_BYTES, or one entry, in their order."""
    batches: list[list[ClusterEntry]] = []
    size = BATCH_BYTES
    for entry in entries:
        size += len(entry.key) + len(entry.value)
        if size > BATCH_BYTES:
            batches.append([])
            size = len(entry.key) + len(entry.value)
        batches[-1].append(entry)
    return batches
