"""The context of every service: the bus, the settings, the clock, the loop and shared gates."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polybus.bus.bus import Bus
from polybus.config import Config
from polybus.errors import StorageError
from polybus.log.interface import Log
from polybus.services.cluster_table import ClusterTable
from polybus.services.events import EventRecorder
from polybus.services.memory import MemoryGate

logger = logging.getLogger("polybus.server")

# A recovered log announces that with its next commit; wait that long before giving up.
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
            StorageError: the log cannot be written; the messages may or may not be durable.
        """
        if ticket is not None and ticket <= self._bus.log.durable:
            return
        await self.wait_for(self.future(ticket))

    async def wait_for(self, given: asyncio.Future[None]) -> None:
        """Wait for a receipt. Raises as `wait` does."""
        while not given.done():
            await asyncio.wait([given], timeout=RECOVERY_S)
            if self.error is not None and not given.done():
                text = f"the messages may not be stored: {self.error.text}"
                raise StorageError(self.error.code, text)

    def future(self, ticket: int | None = None) -> asyncio.Future[None]:
        """Done when the ticket, or everything published so far, is durable, without a timeout."""
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bus.when_durable(lambda _: None if given.done() else given.set_result(None), ticket)
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One bus as its services and edges see it.

    Attributes:
        loop: runs everything; its `time()` is the monotonic clock.
        clock_us: the wall clock, in microseconds since 1970.
        memory: whether there is room for more messages.
        durability: what the log has announced, and how to wait for it.
        events: records events for the topic `$events`.
        cluster_table: what the nodes of a cluster share; None without a cluster.
        node: the suffix of peer names, which makes them unique in a cluster.
    """

    bus: Bus
    config: Config
    loop: asyncio.AbstractEventLoop
    clock_us: Callable[[], int]
    memory: MemoryGate
    durability: Durability
    events: EventRecorder
    cluster_table: ClusterTable | None = None
    node: str = ""

    @property
    def log(self) -> Log:
        return self.bus.log

    @property
    def data(self) -> Path:
        return Path(self.config.data)
