"""Interrupted uploads: who may continue them, how many are kept, and for how long.

A sender that names the SHA-256 of its payload may continue after an interruption, also after a
restart of either side. The received bytes stay among the blobs of the topic's owner, in a folder
whose name is a digest of the sender, and one of the payload and its topic: uploads of different
senders do not collide, and each sender has its own limits, also after a restart. The SHA-256 is
compared at the end, so bytes lost in a power cut are detected, and the upload begins again.
"""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polybus.errors import BusyError, UsageError
from polybus.log.blobs import UNFINISHED, BlobWriter
from polybus.log.disk import Disk
from polybus.services.blobs.uploads import IncomingBlob, Uploader, UploadRoom
from polybus.services.context import Context
from polybus.services.threads import in_thread

SENDER_DIGITS = 16


@dataclass(slots=True)
class InterruptedUpload:
    """The received part of an upload. `last_us` is when it was interrupted."""

    size: int
    last_us: int
    is_arriving: bool = False


@dataclass(frozen=True, slots=True)
class UploadId:
    """Identifies an upload: its account, and the full name of its topic."""

    sender: Uploader
    topic: str
    sha256: str

    @property
    def folder(self) -> str:
        named = "\n".join((self.sender.account, self.topic, self.sha256))
        digest = hashlib.sha256(named.encode()).hexdigest()
        sender = sender_digest(self.sender.account)
        return f"{UNFINISHED}{sender}{digest[len(sender) :]}"


def sender_digest(account: str) -> str:
    """The prefix of the folder names of a sender's uploads."""
    return hashlib.sha256(account.encode()).hexdigest()[:SENDER_DIGITS]


def _sender_of(path: Path) -> str:
    return path.name.removeprefix(UNFINISHED)[:SENDER_DIGITS]


class ContinuedBlob(IncomingBlob):
    """A payload that arrives, perhaps after an interruption, and may be interrupted again."""

    def __init__(
        self,
        writer: BlobWriter,
        room: UploadRoom,
        sender: Uploader,
        sha256: str,
        ended: Callable[[int | None], None],
    ) -> None:
        """Raises BusyError `blob.busy`. `ended` gets the number of bytes that are kept, or None."""
        super().__init__(writer, room, sender)
        self._sha256 = sha256
        self._ended = ended

    async def begin(self, start: int) -> None:
        """Continue at this byte; at 0, begin again. Raises UsageError `blob.position`."""
        if start:
            self.size = await in_thread(self._room.threads, self.writer.resume)
            self._count(self.size)
        else:
            await in_thread(self._room.threads, self.writer.discard)
        if self.size != start:
            text = f"the bus has {self.size} bytes of it: continue there, or begin again at 0"
            raise UsageError("blob.position", text)

    def check(self, blob_id: str) -> None:
        if blob_id != self._sha256:
            text = f"what has arrived has the SHA-256 {blob_id}, not the one announced"
            raise UsageError("blob.mismatch", text)

    def pause(self) -> None:
        """The sender is gone: keep the received part."""
        self._end()
        self.uncount()
        self._ended(self.size)

    def placed(self) -> None:
        self._ended(None)

    def discard(self) -> None:
        # Until the files are removed, no other upload may write in their place.
        loop = asyncio.get_running_loop()
        self._end()
        self.uncount()
        with contextlib.suppress(RuntimeError):  # The bus is stopping.
            removing = self._room.threads.submit(self.writer.discard)
            removing.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended, None))


class UnfinishedUploads:
    """All resumable uploads of a bus, by the owner of their topic and by folder."""

    def __init__(self, context: Context, disk: Disk, crowded: Callable[[], None]) -> None:
        """`crowded` is called when `expired` should be."""
        self._limits = context.config.limits
        self._clock_us = context.clock_us
        self._disk = disk
        self._crowded = crowded
        self._known: dict[str, dict[Path, InterruptedUpload]] = {}
        self._bytes: Counter[str] = Counter()
        """The bytes of each sender's uploads that are not in progress."""

    def add(self, account: str, found: Iterable[tuple[Path, int, float]]) -> None:
        """The uploads that a start has found."""
        for path, size, last_s in found:
            self._known.setdefault(account, {})[path] = InterruptedUpload(size, int(last_s * 1e6))
            self._bytes[_sender_of(path)] += size

    def size_of(self, account: str, path: Path) -> int:
        known = self._known.get(account, {}).get(path)
        return 0 if known is None else known.size

    def bytes_of(self, account: str) -> int:
        """The bytes of an account's interrupted uploads, to all topics."""
        return self._bytes[sender_digest(account)]

    def expired(self, accounts: Iterable[str]) -> Iterator[Path]:
        """Forget expired or excess uploads, and those of deleted accounts; return their folders."""
        oldest_us = self._clock_us() - int(self._limits.unfinished_upload_s * 1e6)
        kept_max = self._limits.unfinished_uploads_max
        for account in self._known.keys() - set(accounts):
            for path, one in self._known.pop(
                account
            ).items():  # The whole folder of the account was removed.
                self._bytes[_sender_of(path)] -= 0 if one.is_arriving else one.size
        for known in self._known.values():
            waiting = [(one.last_us, path) for path, one in known.items() if not one.is_arriving]
            kept: Counter[str] = Counter()
            for last_us, path in sorted(waiting, reverse=True):
                sender = _sender_of(path)
                kept[sender] += 1
                if kept[sender] > kept_max or last_us < oldest_us:
                    self._bytes[sender] -= known.pop(path).size
                    yield path

    def upload(
        self, folder: Path, account: str, upload_id: UploadId, room: UploadRoom
    ) -> ContinuedBlob:
        """An upload begins or continues. Raises BusyError `blob.busy`, `blob.arriving`."""
        path = folder / upload_id.folder
        uploads = self._known.setdefault(account, {})
        known = uploads.get(path) or InterruptedUpload(0, 0)
        if known.is_arriving:
            text = "another connection is sending this payload; try again when that has ended"
            raise BusyError("blob.arriving", text)

        def ended(size: int | None) -> None:
            known.is_arriving = False
            if size is None:
                uploads.pop(path, None)
                return
            known.size, known.last_us = size, self._clock_us()
            if uploads.get(path) is known:
                self._bytes[sender] += size
            if len(uploads) > self._limits.unfinished_uploads_max:
                self._crowded()

        writer = BlobWriter(folder, self._disk, upload_id.folder)
        found = ContinuedBlob(writer, room, upload_id.sender, upload_id.sha256, ended)
        known.is_arriving = True
        sender = _sender_of(path)
        self._bytes[sender] -= known.size
        uploads[path] = known
        return found
