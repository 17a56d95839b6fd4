"""Pending receipts: which of them a refusal ends, and what publishers of all protocols share.

Errors of Boson frames and goMS name no receipt, so the refused message must be inferred. It may be
one that was sent without a receipt, as long as that is unproven: the bus reads in order, so a
receipt of a later message proves that an earlier one was accepted.
"""

import abc
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from polybus.batch import Headers
from polybus.client.message import Position
from polybus.client.options import ClientOptions
from polybus.client.transports.base import TOO_LARGE, Refusal
from polybus.errors import BusyError, PeerError, PolybusError, StorageError, UsageError

RECEIPT_UNKNOWN = "client.receipt-unknown"


class ConnectionBrokenError(PolybusError):
    """`client.receipt-unknown` because the connection broke: only then does a retry help."""


class Outgoing(abc.ABC):
    """The outgoing side of a client."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._failure: PolybusError | None = None

    @abc.abstractmethod
    async def open(self) -> None:
        """Connect, one attempt. Raises PolybusError `client.unreachable`."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Send what is pending and disconnect."""

    @abc.abstractmethod
    async def publish(self, topic: str, values: Sequence[bytes], headers: Headers | None) -> None:
        """Send without a receipt; returns at once unless too much waits to be sent."""

    @abc.abstractmethod
    async def flush(self) -> None:
        """Wait until everything published so far is sent.

        Raises:
            PolybusError: `client.disconnected`, the connection ended and `reconnect` is off.
        """

    async def publish_safely(
        self, topic: str, values: Sequence[bytes], headers: Headers | None, *, retry: bool
    ) -> Position:
        """Send and wait for the receipt of the last value, which covers all.

        Raises:
            PolybusError: the bus's refusal, or `client.receipt-unknown`, the messages may be stored
                or not: the connection broke and `retry` is off, no receipt came for
                `receipt_timeout_s`, or the bus refused a message without naming it.
        """
        while True:
            try:
                return await self._publish_once(topic, values, headers)
            except ConnectionBrokenError:
                if not retry:
                    raise

    @abc.abstractmethod
    async def _publish_once(
        self, topic: str, values: Sequence[bytes], headers: Headers | None
    ) -> Position:
        """Send and wait for the receipt. Raises as `publish_safely`."""


def client_closed() -> UsageError:
    return UsageError("client.closed", "the client is closed")


@dataclass(slots=True)
class PendingReceipt:
    """A publish that waits for its receipt."""

    number: int
    topic: str
    values: Sequence[bytes]
    receipt: asyncio.Future[Position]
    timer: asyncio.TimerHandle | None = None

    @property
    def receipt_id(self) -> str:
        return str(self.number)

    @property
    def largest_bytes(self) -> int:
        return max(map(len, self.values))


class PendingReceipts:
    """The receipts that a publisher waits for on its connection."""

    def __init__(self) -> None:
        self._out: dict[str, PendingReceipt] = {}
        self._asked_count = 0
        # Topics of messages without a receipt, and the first receipt that proves them all.
        self._unproven: set[str] = set()
        self._proof_number = 0

    def __len__(self) -> int:
        return len(self._out)

    @property
    def all_proven(self) -> bool:
        """Whether the bus has accepted everything that was sent without a receipt."""
        return not self._unproven

    def ask(self, topic: str, values: Sequence[bytes]) -> PendingReceipt:
        """Register a receipt to wait for; call `forget` afterwards."""
        self._asked_count += 1
        receipt: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        asked = PendingReceipt(self._asked_count, topic, values, receipt)
        self._out[asked.receipt_id] = asked
        return asked

    def forget(self, asked: PendingReceipt) -> None:
        self._out.pop(asked.receipt_id, None)

    def sent_without(self, topic: str) -> None:
        """Messages were sent without a receipt."""
        self._unproven.add(topic)
        self._proof_number = self._asked_count + 1

    def stored(self, receipt_id: str, position: Position) -> None:
        asked = self._out.get(receipt_id)
        if asked is None:
            return
        if asked.number >= self._proof_number:
            self._unproven.clear()
        if not asked.receipt.done():
            asked.receipt.set_result(position)

    def lost(self, error: PolybusError) -> None:
        """The connection is lost: no more receipts come."""
        self._unproven.clear()
        for asked in self._out.values():
            refuse(asked.receipt, error)

    def refused(self, refusal: Refusal) -> bool:
        """Fail the receipts that will not come; return whether one is certainly the cause."""
        error = refusal.error
        if refusal.receipt_id is not None:
            known = self._out.get(refusal.receipt_id)
            return _refuse_all([known] if known is not None else [], error)
        out = [asked for asked in self._out.values() if not asked.receipt.done()]
        if not out:
            return False
        # An error about a topic applies to all its messages.
        named = [
            asked
            for asked in out
            if asked.topic in refusal.topics or _names(error.text, asked.topic)
        ]
        if named:
            return _refuse_all(named, error)
        if refusal.topics or isinstance(error, BusyError | PeerError):
            # It is about topics without a pending receipt, about messages we read instead of sent,
            # or about an answer that we could not parse.
            return False
        if any(_names(error.text, topic) for topic in self._unproven):
            return False
        if isinstance(error, StorageError):
            # The log accepts no writes, so no pending receipt will come.
            return _refuse_all(out, error)
        return self._refuse_one_of(out, error)

    def _refuse_one_of(self, out: list[PendingReceipt], error: PolybusError) -> bool:
        """One of these was refused, or a message without a receipt: report only what is certain."""
        if self._unproven:
            _refuse_all(out, _unclear(error))
            return False
        if len(out) == 1:
            return _refuse_all(out, error)
        if error.code.endswith(TOO_LARGE):
            # The largest message is over the limit, whichever one the bus refused.
            refuse(max(out, key=lambda asked: asked.largest_bytes).receipt, error)
        return _refuse_all(out, _unclear(error))


def refuse(future: asyncio.Future[Position] | asyncio.Future[None], error: PolybusError) -> None:
    """Fail a future that is not done."""
    if not future.done():
        future.set_exception(error)
        # Mark it as retrieved: the waiting task may have been cancelled.
        future.exception()


def _refuse_all(blamed: Sequence[PendingReceipt], error: PolybusError) -> bool:
    for asked in blamed:
        refuse(asked.receipt, error)
    return bool(blamed)


def _names(text: str, topic: str) -> bool:
    """Whether the bus's text names the topic, which is quoted there."""
    return f"'{topic}'" in text or repr(topic) in text


def no_receipt(timeout_s: float) -> PolybusError:
    """The error after a receipt timeout."""
    text = f"the bus sent no receipt for {timeout_s:g} seconds; the message may be stored or not"
    return PolybusError(RECEIPT_UNKNOWN, text)


def _unclear(error: PolybusError) -> PolybusError:
    text = f"the bus refused a message without naming it; this may be stored or not ({error})"
    return PolybusError(RECEIPT_UNKNOWN, text)
