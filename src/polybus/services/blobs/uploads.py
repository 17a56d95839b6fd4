"""Payloads while they arrive: written by threads, and no faster than the disk takes them.

A peer that sends a large payload waits for each piece to be written before it is read from again.
The pieces of all peers together are limited too: beyond QUEUED_BYTES_MAX they wait, and accounts
take turns.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from polybus import names
from polybus.batch import Buffer
from polybus.errors import BusyError
from polybus.log.blobs import BlobWriter
from polybus.services.blobs.turns import AccountTurns
from polybus.services.threads import in_thread

THREADS = 2
QUEUED_BYTES_MAX = 8 << 20


class UploadRoom:
    """The writer threads, the bytes that wait for them, and the number of payloads that arrive.

    Attributes:
        check: whether an account may store more. Raises UsageError `account.bytes`.
        bytes: received bytes of payloads that are not blobs yet, by the owner of their topic.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, uploads_max: int, check: Callable[[str], None]
    ) -> None:
        self._uploads_max = uploads_max
        self._by_account: Counter[str] = Counter()
        self.check = check
        self.bytes: Counter[str] = Counter()
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="polybus-uploads")
        self.turns = AccountTurns(loop, bytes_max=QUEUED_BYTES_MAX)

    @property
    def arriving(self) -> int:
        """How many payloads are arriving."""
        return self._by_account.total()

    def begin(self, account: str, own_max: int | None) -> None:
        """A payload begins to arrive. Raises BusyError `blob.busy`."""
        own = self._by_account[account]
        if own_max is not None and own >= own_max:
            text = f"your account is sending {own} large payloads (account-uploads-max)"
            raise BusyError("blob.busy", f"{text}; try again later")
        if self.arriving >= self._uploads_max:
            text = f"the bus is receiving {self.arriving} large payloads (uploads-max)"
            raise BusyError("blob.busy", f"{text}; try again later")
        self._by_account[account] += 1

    def end(self, account: str) -> None:
        self._by_account[account] -= 1
        if not self._by_account[account]:
            del self._by_account[account]

    def close(self) -> None:
        self.threads.shutdown(wait=False)


@dataclass(frozen=True, slots=True)
class Uploader:
    """The sender of a payload, and its limit of concurrent ones; `owner` is that of the topic."""

    account: str = names.ACCOUNT
    owner: str = names.ACCOUNT
    uploads_max: int | None = None
    is_bound: bool = True
    """Whether the owner's storage limit applies to it."""


class IncomingBlob:
    """One arriving payload, until `finish` or `discard`."""

    def __init__(self, writer: BlobWriter, room: UploadRoom, sender: Uploader) -> None:
        """Raises BusyError `blob.busy`."""
        room.begin(sender.account, sender.uploads_max)
        self.sender = sender
        self._is_arriving = True
        self._counted = 0
        self.writer = writer
        self._room = room
        self.size = 0

    async def write(self, data: Buffer) -> None:
        """Append a piece; returns when it is written.

        The caller limits the size. Raises UsageError `account.bytes`; StorageError.
        """
        self.size += len(data)
        self._count(len(data))
        if self.sender.is_bound:
            self._room.check(self.sender.owner)
        await self._room.turns.enter(self.sender.account, len(data))
        try:
            await in_thread(self._room.threads, self.writer.write, data)
        finally:
            self._room.turns.leave(len(data))

    def check(self, blob_id: str) -> None:
        """Raises UsageError `blob.mismatch` if the payload is not the announced one."""

    def placed(self) -> None:
        """It is a blob now."""

    def _count(self, size: int) -> None:
        self._counted += size
        self._room.bytes[self.sender.owner] += size

    def uncount(self) -> None:
        """Its bytes are counted elsewhere from now on, or removed."""
        self._count(-self._counted)

    async def finish(self) -> str:
        """Make the bytes durable; return the id. Raises StorageError."""
        self._end()
        return await in_thread(self._room.threads, self.writer.finish)

    def discard(self) -> None:
        """Discard it: the peer is gone, or the message was refused."""
        self._end()
        self.uncount()
        try:
            self._room.threads.submit(self.writer.discard)
        except RuntimeError:
            pass  # The bus is stopping: the next start removes it.

    def _end(self) -> None:
        if self._is_arriving:
            self._is_arriving = False
            self._room.end(self.sender.account)
