"""Receipts: when a publisher learns that its message is durable."""

from collections import deque
from collections.abc import Sequence

from polybus import scan
from polybus.batch import Batch
from polybus.bus.subscriptions import ManyReceiptsTaker, ReceiptTaker
from polybus.log.interface import Log


class Receipts:
    """Receipts that wait for the log. They become due in ticket order, since the journal is one."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._waiting: deque[tuple[int, Sequence[Batch], ReceiptTaker]] = deque()
        self.given = 0

    @property
    def waiting(self) -> int:
        """How many batches wait for a receipt."""
        return sum(len(batches) for _, batches, _ in self._waiting)

    def expect(self, ticket: int, batches: Sequence[Batch], publisher: ReceiptTaker) -> None:
        """Give the publisher its receipts once everything up to the ticket is durable."""
        # The log's thread may be ahead of `settle`: earlier receipts come first.
        if ticket <= self._log.durable and not self._waiting:
            self._give(batches, publisher)
        else:
            self._waiting.append((ticket, batches, publisher))

    def settle(self, durable: int) -> None:
        """Give the receipts that are due: everything up to the ticket is durable."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= durable:
            _, batches, publisher = waiting.popleft()
            self._give(batches, publisher)

    def _give(self, batches: Sequence[Batch], publisher: ReceiptTaker) -> None:
        self.given += scan.count_receipts(batches)
        if len(batches) > 1 and isinstance(publisher, ManyReceiptsTaker):
            publisher.receipt_all(batches)
            return
        for batch in batches:
            publisher.receipt(batch)
