"""The blobs of a running bus: which messages need each, who may read it, when it is removed.

A blob belongs to the account of the topics whose messages refer to it. Everyone who may subscribe
to one of these topics may read it. The files and the order of writes are in log/blobs.py.

The sweep decides when marks and blobs go. It needs positive proof. A mark is removed if the topic
with its epoch is deleted, or the topic's first offset is after the mark's. While a topic is
damaged, marks of epochs that no topic has are kept: they may belong to it. A blob without marks is
removed if this bus has stored it, and so knows all its messages, or if no message refers to it:
marks are files, and may be lost. To find out, the sweep reads the headers of all messages, once per
run of the bus and only when a blob may be removable, and restores missing marks. While a topic of
the account cannot be read, the blob stays.

Everything here runs on the loop's thread, and files change on one other thread, in order: the
removal of a blob does not conflict with the arrival of the same content.
"""

import asyncio
import contextlib
import logging
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from polybus import names, references
from polybus.batch import Batch
from polybus.errors import PolybusError, UsageError
from polybus.log import blobs as files
from polybus.log.blob_references import find_references
from polybus.log.blobs import (
    BLOCK_BYTES,
    BlobMark,
    BlobReader,
    BlobWriter,
    FoundBlob,
    unknown_blob,
)
from polybus.log.disk import Disk
from polybus.log.memory import MemoryLog
from polybus.log.topics import storage_error
from polybus.references import Reference
from polybus.services.accounts.access import ADMIN, AccountAccess
from polybus.services.accounts.accounts import Accounts
from polybus.services.blobs.marks import PendingMarks, exists, find_message, is_gone
from polybus.services.blobs.turns import AccountTurns
from polybus.services.blobs.unfinished import UnfinishedUploads, UploadId
from polybus.services.blobs.uploads import IncomingBlob, Uploader, UploadRoom
from polybus.services.context import Context
from polybus.services.repeating import RepeatedWork
from polybus.services.threads import in_thread
from polybus.services.topics import refuse_in_cluster

logger = logging.getLogger("polybus.blobs")

T = TypeVar("T")
BLOB_COST_BYTES = 16 << 10
"""Disk space of a blob in addition to its content: its folder, sums and marks."""
READ_BYTES = 1 << 20
READ_THREADS = 2
READS_BYTES_MAX = 4 << 20
"""How many bytes are read at a time, for all accounts."""
SWEEP_STEP = 500
"""Blobs that a sweep checks before other tasks run."""


@dataclass(slots=True)
class Blob:
    """A stored payload. `holds` counts messages that are about to refer to it."""

    account: str
    path: Path
    size: int
    marks: dict[str, BlobMark] = field(default_factory=dict)
    """The last mark of each topic."""
    strange: list[BlobMark] = field(default_factory=list)
    """Marks of epochs that no topic has."""
    holds: int = 0
    is_new: bool = False
    """Whether this bus has stored it, and so knows all messages that refer to it."""


NOWHERE = {"": Blob("", Path(), 0, {"": BlobMark(0, 0)})}
"""Stands for an unknown id, so that its check takes as long as that of a forbidden one."""


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """A durable payload, for messages that are published next."""

    reference: Reference
    blobs: dict[str, Blob]
    """By topic."""
    pending: dict[str, BlobMark]
    index: int = 0
    """The index of its message in the batch."""

    def batch(self, topic: str, headers: dict[str, bytes] | None = None) -> Batch:
        """The message that refers to it."""
        marked = {**(headers or {}), **self.header}
        return Batch.of(topic, [references.encode(self.reference)], headers=[marked])

    @property
    def header(self) -> dict[str, bytes]:
        return {references.HEADER: self.reference.id.encode()}


class Blobs:
    """All blobs of a bus."""

    def __init__(self, context: Context, accounts: Accounts, disk: Disk | None = None) -> None:
        self._context = context
        self._bus = context.bus
        self._accounts = accounts
        self._disk = disk or Disk()
        self._limits = context.config.limits
        self._is_memory = isinstance(context.log, MemoryLog)
        self._blobs: dict[str, dict[str, Blob]] = {}
        """By id and account."""
        self._pending = PendingMarks(self._later)
        self._count = 0
        self._bytes: dict[str, int] = {}
        self._files = ThreadPoolExecutor(1, thread_name_prefix="polybus-blobs")
        self._storage = accounts.configs.storage
        self.room = UploadRoom(
            context.loop, uploads_max=self._limits.uploads_max, check=self._storage.check
        )
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="polybus-downloads")
        self._reads = AccountTurns(context.loop, bytes_max=READS_BYTES_MAX)
        self.unfinished = UnfinishedUploads(context, self._disk, self.sweep_soon)
        self._sweep: asyncio.TimerHandle | None = None
        self._sweeps = RepeatedWork(logger, "blobs without messages stay")
        self._sweeping: asyncio.Task[bool] | None = None
        self._sweeps_again = False
        self._unread: set[str] | None = None
        """The topics whose messages may lack their marks; None means all that existed before."""
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._storage.other_bytes = self.bytes_of
        self._bus.watch(self)

    # Start and stop

    async def start(self) -> None:
        """Find the blobs, and the messages of pending marks. Raises StorageError."""
        found = await self._run(self._look)
        topics = {}
        for topic in self._context.log.topics():
            with contextlib.suppress(PolybusError):
                topics[self._context.log.bounds(topic).epoch] = topic
        for account, one in found:
            blob = Blob(account, one.path, one.size)
            # The messages of an earlier log in memory are lost.
            of_memory = [mark.suffix == files.MEMORY for mark in one.marks]
            blob.is_new = self._is_memory and any(of_memory) and all(of_memory)
            await self._settle_found(blob, one, topics)
            self._add(blob)
        self.sweep_soon()
        self._sweep_later()

    def _look(self) -> list[tuple[str, FoundBlob]]:
        data = self._context.data
        found = []
        for account in files.accounts_with_blobs(data):
            folder = files.blobs_folder(data, account)
            files.remove_incoming(folder, self._disk)
            self.unfinished.add(account, files.find_unfinished(folder))
            found += [(account, blob) for blob in files.find_blobs(folder)]
        return found

    async def _settle_found(self, blob: Blob, found: FoundBlob, topics: dict[int, str]) -> None:
        void = []
        for mark in sorted(found.marks, key=lambda one: (one.offset, one.suffix)):
            topic = topics.get(mark.epoch)
            if mark.suffix == files.MEMORY:
                void.append(mark)
            elif topic is None or self._is_memory:
                blob.strange.append(mark)
            elif mark.suffix == files.PENDING:
                await self._settle_pending(blob, topic, mark)
            else:
                older = blob.marks.get(topic)
                void += [older] if older is not None else []
                blob.marks[topic] = mark
        await self._run(files.drop_marks, blob.path, void)

    async def _settle_pending(self, blob: Blob, topic: str, pending: BlobMark) -> None:
        """A crash came before the mark had its offset: search for the message."""
        log = self._context.log
        try:
            offset = await asyncio.to_thread(find_message, log, topic, pending, blob.path.name)
        except PolybusError as error:
            logger.warning("blob %s is kept: %s", blob.path.name, error)
            # The only proof of its message: it stays until a later one, or the topic, replaces it.
            blob.marks.setdefault(topic, pending)
            return
        if offset is None:
            await self._run(files.drop_marks, blob.path, [pending])
            return
        mark = BlobMark(pending.epoch, offset)
        older = blob.marks.get(topic)
        if older is None or older.offset <= offset:
            blob.marks[topic] = mark
        await self._run(files.settle_mark, blob.path, pending, mark, [])

    async def close(self) -> None:
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        if self._sweeping is not None:
            self._sweeping.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self.room.close()
        self._readers.shutdown(wait=False)
        await asyncio.to_thread(self._files.shutdown)

    async def _run(self, work: Callable[..., T], *given: Any) -> T:
        return await in_thread(self._files, work, *given)

    def _later(self, work: Callable[..., object], *given: Any) -> None:
        """Change files, in the order of the calls. A failure is logged: the next start repeats it.

        It is queued now, not when a task runs: a blob that is placed after its removal was decided
        must be placed after the removal.
        """
        try:
            done = self._context.loop.run_in_executor(self._files, work, *given)
        except RuntimeError:
            # The bus is stopping.
            return

        async def run() -> None:
            try:
                await done
            except (OSError, PolybusError) as error:
                logger.warning("a file of a blob cannot be changed: %s", error)

        task = self._context.loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Storing

    def upload(self, access: AccountAccess, topic: str, sha256: str = "") -> IncomingBlob:
        """A payload that begins to arrive for a topic; the name is empty if it is unknown yet.

        With its SHA-256 it is a ContinuedBlob. Raises UsageError if the quota is exhausted, or
        `blob.too-many`; BusyError `blob.busy`, `blob.arriving`.
        """
        if self._count >= self._limits.blobs_max:
            text = f"the bus is at its limit of {self._count} blobs (limits.blobs-max)"
            raise UsageError("blob.too-many", text)
        quota = access.quota
        if quota is not None:
            refusal = quota.refusal(self._context.clock_us())
            if refusal is not None:
                raise refusal.copy()
        account = access.owner_of(topic or access.own(""))
        # Administrators, and transactions that must finish, may exceed it.
        is_bound = access is not self._accounts.admin
        if is_bound:
            # Interrupted uploads count for their sender.
            for one in {account, access.account} if sha256 else {account}:
                self._storage.check(one)
        folder = files.blobs_folder(self._context.data, account)
        own = self._accounts.configs.limits.get(access.account)
        uploads_max = None if own is None else own.uploads_max
        sender = Uploader(access.account, account, uploads_max, is_bound)
        if sha256:
            upload_id = UploadId(sender, topic, sha256)
            return self.unfinished.upload(folder, account, upload_id, self.room)
        return IncomingBlob(BlobWriter(folder, self._disk), self.room, sender)

    def unfinished_bytes(self, access: AccountAccess, topic: str, sha256: str) -> int:
        """How many bytes of an upload, interrupted or in progress, the bus has."""
        account = access.owner_of(topic)
        name = UploadId(Uploader(access.account), topic, sha256).folder
        path = files.blobs_folder(self._context.data, account) / name
        return self.unfinished.size_of(account, path)

    async def keep(
        self, upload: IncomingBlob, topics: Sequence[str], content_type: str = references.OCTETS
    ) -> StoredPayload:
        """Make a complete payload durable, for a message to each of these topics.

        The caller publishes and then calls `published`, without awaiting in between. Raises
        UsageError `topic.unknown`, `account.bytes`; StorageError.
        """
        kept = None
        try:
            refuse_in_cluster(self._bus, "blobs")
            blob_id = await upload.finish()
            upload.check(blob_id)
            for owner in {self._accounts.admin.owner_of(topic) for topic in topics}:
                if upload.sender.is_bound and owner != upload.sender.owner:
                    self._storage.check(owner, upload.size)
            kept = StoredPayload(references.make(blob_id, upload.size, content_type), {}, {})
            # The blob counts from now on.
            upload.uncount()
            for topic in topics:
                await self._hold(upload, kept, topic)
        except BaseException:
            if kept is not None:
                self.published(kept, ())
            upload.discard()
            raise
        upload.placed()
        return kept

    async def _hold(self, upload: IncomingBlob, kept: StoredPayload, topic: str) -> None:
        bounds = self._context.log.bounds(topic)
        suffix = files.MEMORY if self._is_memory else files.PENDING
        mark = BlobMark(bounds.epoch, bounds.stop, suffix)
        account, blob_id = self._accounts.admin.owner_of(topic), kept.reference.id
        folder = files.blobs_folder(self._context.data, account)
        blob = self._blobs.get(blob_id, {}).get(account)
        if blob is None:
            blob = Blob(account, folder / blob_id, upload.size, is_new=True)
            self._add(blob)
        # From here on no sweep removes it.
        blob.holds += 1
        self._pending.hold(blob.path, mark)
        kept.blobs[topic], kept.pending[topic] = blob, mark
        try:
            first = next(iter(kept.blobs.values()))
            if first is blob and len(kept.blobs) == 1:
                await self._run(upload.writer.place, blob.path, mark)
            else:
                await self._run(files.share, first.path, folder, mark, self._disk)
        except OSError as error:
            raise storage_error(error, f"cannot write {folder}") from error

    def published(
        self, kept: StoredPayload, batches: Sequence[Batch], access: AccountAccess | None = None
    ) -> None:
        """These batches were published or refused: settle their marks when they are durable."""
        stored = {batch.topic: batch for batch in batches if batch.first_offset >= 0}
        for topic, blob in kept.blobs.items():
            blob.holds -= 1
            pending = kept.pending[topic]
            batch = stored.get(topic)
            if batch is None:
                self._pending.settle(blob.path, pending)
                continue
            offset = batch.first_offset + kept.index
            mark = BlobMark(batch.epoch, offset, files.MEMORY * self._is_memory)
            older = [blob.marks[topic]] if topic in blob.marks else []
            blob.marks[topic] = mark
            self._bus.when_durable(self._settler(blob.path, pending, mark, older))
        kept.blobs.clear()
        if stored and access is not None and access.quota is not None:
            access.quota.charge(0, kept.reference.size)
        if not stored:
            self.sweep_soon()

    def _settler(
        self, path: Path, pending: BlobMark, mark: BlobMark, older: list[BlobMark]
    ) -> Callable[[object], None]:
        return lambda _: self._pending.settle(path, pending, mark, older)

    def is_large(self, batch: Batch) -> bool:
        """Whether a message of the batch must be stored as a blob."""
        size = self._limits.inline_bytes_max
        if batch.value_bytes <= size:
            return False
        spans = batch.spans
        return any(spans[at + 1] - spans[at] > size for at in range(0, len(spans), 2))

    async def spill(self, batch: Batch, access: AccountAccess) -> tuple[Batch, list[StoredPayload]]:
        """The batch with references in place of its large values, and the payloads of these.

        The caller publishes it and then calls `published`, without awaiting in between. Raises as
        `upload` and `keep` do.
        """
        values, headers = list(batch.values()), list(batch.headers or [None] * len(batch))
        found: list[StoredPayload] = []
        try:
            for index, value in enumerate(values):
                if len(value) <= self._limits.inline_bytes_max:
                    continue
                upload = self.upload(access, batch.topic)
                try:
                    await upload.write(value)
                except BaseException:
                    upload.discard()
                    raise
                kept = replace(await self.keep(upload, [batch.topic]), index=index)
                found.append(kept)
                [values[index]] = kept.batch(batch.topic).values()
                headers[index] = {**(headers[index] or {}), **kept.header}
        except BaseException:
            for kept in found:
                self.published(kept, ())
            raise
        spilled = Batch.of(batch.topic, values, headers=headers, keys=batch.keys)
        spilled.protocol = batch.protocol
        if batch.receipt_ids is not None:
            ids = [bytes(batch.buffer[slice(*span)]) for span in _pairs(batch.receipt_ids)]
            spilled = with_receipt_ids(spilled, ids)
        return spilled, found

    # Reading

    def find(
        self, access: AccountAccess, blob_id: str, is_hidden: Callable[[str], bool] | None = None
    ) -> Blob:
        """A blob that the caller may read because of a topic whose values are not hidden.

        Raises UsageError `blob.unknown`.
        """
        for blob in (self._blobs.get(blob_id) or NOWHERE).values():
            for topic in blob.marks:
                if access.may_read(topic) and not (is_hidden is not None and is_hidden(topic)):
                    return blob
        raise unknown_blob()

    def of_message(self, topic: str, blob_id: str) -> Blob:
        """The blob of a message of a topic. Raises UsageError `blob.unknown`.

        The message is the proof, whether or not its mark exists.
        """
        try:
            return self._blobs[blob_id][self._accounts.admin.owner_of(topic)]
        except KeyError:
            raise unknown_blob() from None

    async def reader(self, blob: Blob) -> BlobReader:
        """Raises UsageError `blob.unknown`, StorageError `blob.damaged`."""
        return await in_thread(self._readers, BlobReader, blob.path)

    async def read(
        self, reader: BlobReader, start: int, bytes_max: int, account: str = ADMIN
    ) -> bytes:
        """Some bytes, when it is the turn of the account. Raises as `BlobReader.block` does."""
        await self._reads.enter(account, bytes_max)
        try:
            return await in_thread(self._readers, reader.read, start, bytes_max)
        finally:
            self._reads.leave(bytes_max)

    async def pieces(
        self, reader: BlobReader, start: int = 0, stop: int | None = None, account: str = ADMIN
    ) -> AsyncIterator[bytes]:
        """Verified bytes of a blob. Raises as `BlobReader.block` does."""
        stop = reader.size if stop is None else stop
        while start < stop:
            size = min(stop - start, READ_BYTES - start % BLOCK_BYTES)
            yield await self.read(reader, start, size, account)
            start += size

    def bytes_of(self, account: str) -> int:
        """The bytes of an account's blobs, including unfinished and interrupted uploads."""
        stored = self._bytes.get(account, 0) + self.room.bytes[account]
        return stored + self.unfinished.bytes_of(account)

    @property
    def figures(self) -> tuple[int, int]:
        """How many blobs there are, and their size."""
        return self._count, sum(self._bytes.values())

    # Removing

    def topic_created(self, topic: str) -> None:
        """The bus calls this."""

    def topic_deleted(self, topic: str) -> None:
        self.sweep_soon()

    def sweep_soon(self) -> None:
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = self._context.loop.create_task(
                self._sweeps.attempt(self._sweep_slowly())
            )
        else:
            self._sweeps_again = True

    async def swept(self) -> None:
        """Wait until the running sweep, and its changes on the disk, have ended."""
        if self._sweeping is not None:
            await self._sweeping
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _sweep_later(self) -> None:
        def run() -> None:
            self.sweep_soon()
            self._sweep_later()

        interval_s = self._context.config.journal.handover_interval_s
        self._sweep = self._context.loop.call_later(interval_s, run)

    async def _sweep_slowly(self) -> None:
        """Remove marks of removed messages, and blobs without marks; let other tasks run."""
        while True:
            self._sweeps_again = False
            for path in self.unfinished.expired(self._accounts.store.accounts):
                self._later(self._disk.remove_folder, path)
            found = [one for accounts in self._blobs.values() for one in accounts.values()]
            bounds: dict[str, tuple[int, int] | None] = {}
            doubtful = False
            for number, blob in enumerate(found, 1):
                if not blob.holds:
                    doubtful |= not self._sweep_one(blob, bounds)
                if number % SWEEP_STEP == 0:
                    bounds.clear()
                    await asyncio.sleep(0)
            if doubtful and self._unread is None and not self._is_memory:
                await self._restore_marks()
            elif not self._sweeps_again:
                return

    def _sweep_one(self, blob: Blob, bounds: dict[str, tuple[int, int] | None]) -> bool:
        """Remove a blob's void marks, or the blob; False if messages may refer to it without a
        mark.
        """
        log = self._context.log
        gone = [topic for topic, mark in blob.marks.items() if is_gone(log, bounds, topic, mark)]
        strange = [] if log.frozen or self._is_memory else blob.strange
        is_needed = len(gone) < len(blob.marks) or len(strange) < len(blob.strange)
        # The message of a pending mark may be after its offset, and still exist.
        is_proven = is_needed and all(blob.marks[one].suffix != files.PENDING for one in gone)
        if not is_proven and not blob.is_new and not self._is_read(blob.account):
            # The marks go after those that replace them.
            return False
        void = [blob.marks.pop(topic) for topic in gone] + strange
        if strange:
            blob.strange = []
        if not is_needed:
            self._forget(blob)
            self._later(files.remove_blob, blob.path, self._disk)
        elif void:
            self._later(files.drop_marks, blob.path, void)
        return True

    def _is_read(self, account: str) -> bool:
        """Whether all messages of an account from before this bus have their marks."""
        owner_of, log = self._accounts.admin.owner_of, self._context.log
        if self._unread is None:
            return False
        self._unread = {topic for topic in self._unread if exists(log, topic)}
        return all(owner_of(topic) != account for topic in self._unread)

    async def _restore_marks(self) -> None:
        """Search for messages whose marks are lost."""
        log, owner_of = self._context.log, self._accounts.admin.owner_of
        topics = {topic for topic in log.topics() if not names.is_reserved(topic)}
        found = await asyncio.to_thread(
            find_references, self._context.data, sorted(topics), lambda: self._is_closed
        )
        for number, ((topic, blob_id), (_, offset)) in enumerate(found.offsets.items()):
            if number % SWEEP_STEP == 0:
                await asyncio.sleep(0)
            blob = self._blobs.get(blob_id, {}).get(owner_of(topic))
            if blob is None or topic not in found.epochs:
                continue
            mark, known = BlobMark(found.epochs[topic], offset), blob.marks.get(topic)
            if known is None or (known.epoch, known.offset) < (mark.epoch, offset):
                logger.warning("blob %s: the mark of topic %s is restored", blob_id, topic)
                blob.marks[topic] = mark
                self._later(files.add_mark, blob.path, mark, self._disk)
        self._unread = topics - found.epochs.keys()

    def _add(self, blob: Blob) -> None:
        self._blobs.setdefault(blob.path.name, {})[blob.account] = blob
        self._count += 1
        taken = self._bytes.get(blob.account, 0)
        self._bytes[blob.account] = taken + blob.size + BLOB_COST_BYTES

    def _forget(self, blob: Blob) -> None:
        by_account = self._blobs[blob.path.name]
        del by_account[blob.account]
        if not by_account:
            del self._blobs[blob.path.name]
        self._count -= 1
        self._bytes[blob.account] -= blob.size + BLOB_COST_BYTES


def with_receipt_ids(batch: Batch, ids: Sequence[bytes]) -> Batch:
    """A batch whose messages request these receipts; an empty id requests none."""
    if not any(ids):
        batch.receipt_ids = array("i", [0, 0] * len(ids))
        return batch
    buffer, spans = bytearray(batch.buffer), array("i")
    for one in ids:
        spans.extend((len(buffer), len(buffer) + len(one)))
        buffer += one
    batch.buffer, batch.receipt_ids = bytes(buffer), spans
    return batch


def _pairs(spans: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(spans[::2], spans[1::2], strict=True)
