"""Receipts that are still out, and which of them a refusal ends.

Boson frames and goMS name no receipt in an error, so the blame must be found. A message that was
sent without a receipt may be the one that is meant, as long as it is unproven: the bus reads in
order, so a receipt of a later message proves that it was read and not complained about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from polybus.client.events import TOO_LARGE, Refused
from polybus.client.message import Position
from polybus.errors import BusyError, PeerError, PolybusError, StorageError

RECEIPT_UNKNOWN = "client.receipt-unknown"


@dataclass(slots=True)
class Asked:
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


class Receipts:
    """The receipts a publisher waits for on its connection."""

    def __init__(self) -> None:
        self._out: dict[str, Asked] = {}
        self._asked_count = 0
        # Topics of messages without a receipt, and the first receipt that would prove them all.
        self._unproven: set[str] = set()
        self._proof_number = 0

    def __len__(self) -> int:
        return len(self._out)

    @property
    def all_proven(self) -> bool:
        """Whether the bus has read everything that was sent without a receipt."""
        return not self._unproven

    def ask(self, topic: str, values: Sequence[bytes]) -> Asked:
        """A receipt to wait for; `forget` it afterwards."""
        self._asked_count += 1
        receipt: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        asked = Asked(self._asked_count, topic, values, receipt)
        self._out[asked.receipt_id] = asked
        return asked

    def forget(self, asked: Asked) -> None:
        self._out.pop(asked.receipt_id, None)

    def sent_without(self, topic: str) -> None:
        """Messages went out that nobody asked a receipt for."""
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
        """Nothing more is heard of what was sent."""
        self._unproven.clear()
        for asked in self._out.values():
            refuse(asked.receipt, error)

    def refused(self, refusal: Refused) -> bool:
        """End the receipts that will not come; tell whether one of them is surely to blame."""
        error = refusal.error
        if refusal.receipt_id is not None:
            known = self._out.get(refusal.receipt_id)
            return _refuse_all([known] if known is not None else [], error)
        out = [asked for asked in self._out.values() if not asked.receipt.done()]
        if not out:
            return False
        # An error about a topic holds for all its messages.
        named = [
            asked
            for asked in out
            if asked.topic in refusal.topics or _names(error.text, asked.topic)
        ]
        if named:
            return _refuse_all(named, error)
        if refusal.topics or isinstance(error, BusyError | PeerError):
            # About topics without a receipt out; about what we read, not what we sent; or no word
            # of the bus at all, but something we could not understand.
            return False
        if any(_names(error.text, topic) for topic in self._unproven):
            return False
        if isinstance(error, StorageError):
            # When the log takes no writes, no receipt that is still out will come.
            return _refuse_all(out, error)
        return self._refuse_one_of(out, error)

    def _refuse_one_of(self, out: list[Asked], error: PolybusError) -> bool:
        """One of these was refused, or a message without a receipt: say only what is certain."""
        if self._unproven:
            _refuse_all(out, _unclear(error))
            return False
        if len(out) == 1:
            return _refuse_all(out, error)
        if error.code.endswith(TOO_LARGE):
            # The largest is over the limit whichever of them it was that the bus came upon.
            refuse(max(out, key=lambda asked: asked.largest_bytes).receipt, error)
        return _refuse_all(out, _unclear(error))


def refuse(future: asyncio.Future[Position] | asyncio.Future[None], error: PolybusError) -> None:
    """End the wait, unless it has ended."""
    if not future.done():
        future.set_exception(error)
        # Whoever waited may have been cancelled meanwhile; that is no news for the log.
        future.exception()


def _refuse_all(blamed: Sequence[Asked], error: PolybusError) -> bool:
    for asked in blamed:
        refuse(asked.receipt, error)
    return bool(blamed)


def _names(text: str, topic: str) -> bool:
    """Whether the bus's sentence is about the topic: names stand in quotes there."""
    return f"'{topic}'" in text or repr(topic) in text


def no_receipt(timeout_s: float) -> PolybusError:
    """What is told when nothing has come for so long."""
    text = f"the bus gave no receipt for {timeout_s:g} seconds; the message may be stored or not"
    return PolybusError(RECEIPT_UNKNOWN, text)


def _unclear(error: PolybusError) -> PolybusError:
    text = f"the bus refused a message and did not say which; this may be stored or not ({error})"
    return PolybusError(RECEIPT_UNKNOWN, text)
