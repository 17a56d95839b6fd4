"""Durability: what the log has announced, and a way to wait until messages are safe."""

import asyncio
import logging

from polybus.bus.bus import Bus
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
        given = self.future(ticket)
        while not given.done():
            await asyncio.wait([given], timeout=RECOVERY_S)
            if self.error is not None and not given.done():
                text = f"the messages may not be stored: {self.error.text}"
                raise StorageError(self.error.code, text)

    def future(self, ticket: int | None = None) -> asyncio.Future[None]:
        """Done when the ticket, or everything published so far, is durable, however late."""
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bus.when_durable(lambda _: None if given.done() else given.set_result(None), ticket)
        return given
