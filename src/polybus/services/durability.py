"""Durability: what the log has announced, and a way to wait until messages are safe."""

import asyncio
import logging

from polybus.batch import Batch
from polybus.bus.bus import NOTHING, Bus
from polybus.errors import StorageError

logger = logging.getLogger("polybus.server")

# A log that has just recovered announces it with the next commit; wait that long before giving up.
RECOVERY_S = 0.5


class Durability:
    """The state of the log's writes. All methods run on the loop."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.error: StorageError | None = None

    def on_durable(self, ticket: int) -> None:
        """The log has made everything up to the ticket durable: give the receipts."""
        self.error = None
        self._bus.settle(ticket)

    def on_failed(self, error: StorageError) -> None:
        self.error = error
        logger.error("the log takes no writes: %s", error)

    async def wait(self, ticket: int | None = None) -> None:
        """Wait until the ticket, or everything published so far, is durable.

        Raises:
            StorageError: the log cannot be written; the messages may or may not be safe.
        """
        if ticket is not None and ticket <= self._bus.log.durable:
            return
        receipt = FutureReceipt()
        if ticket is None:
            self._bus.when_all_durable(receipt)
        else:
            self._bus.expect_receipt(ticket, NOTHING, receipt)
        await self.wait_for(receipt.given)

    async def wait_quietly(self) -> None:
        """Wait until everything published so far is durable, however long the log fails."""
        receipt = FutureReceipt()
        self._bus.when_all_durable(receipt)
        await receipt.given

    async def wait_for(self, given: asyncio.Future[None]) -> None:
        """Wait for a receipt. Raises as `wait`."""
        while not given.done():
            await asyncio.wait([given], timeout=RECOVERY_S)
            if self.error is not None and not given.done():
                text = f"the messages may not be stored: {self.error.text}"
                raise StorageError(self.error.code, text)


class FutureReceipt:
    """A receipt to await. Implements bus.ReceiptTaker."""

    def __init__(self) -> None:
        self.given: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def receipt(self, batch: Batch) -> None:
        if not self.given.done():
            self.given.set_result(None)
