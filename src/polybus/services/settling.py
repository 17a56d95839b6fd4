"""Waits until what was published so far is durable: for readers that must not see what may go."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from polybus.batch import Batch
from polybus.errors import StorageError

if TYPE_CHECKING:
    from polybus.edges.http.edge import HttpEdge

POLL_S = 0.5


class Settling:
    """One wait. Implements bus.ReceiptTaker."""

    def __init__(self, edge: HttpEdge) -> None:
        self._edge = edge
        self._durable: asyncio.Future[None] = edge.loop.create_future()
        edge.bus.when_all_durable(self)

    def receipt(self, batch: Batch) -> None:
        if not self._durable.done():
            self._durable.set_result(None)

    async def wait(self) -> None:
        """Raises StorageError: the log cannot be written, so it may never be durable."""
        while not self._durable.done():
            await asyncio.wait([self._durable], timeout=POLL_S)
            error = self._edge.server.storage_error
            if error is not None and not self._durable.done():
                raise StorageError(error.code, f"what is published is not durable: {error.text}")
