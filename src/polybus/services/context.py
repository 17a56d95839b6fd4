"""What every service is given: the bus, the settings, the clock, the loop and the shared gates."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polybus.bus.bus import Bus
from polybus.config import Config
from polybus.log.interface import Log
from polybus.services.durability import Durability
from polybus.services.events import EventBook
from polybus.services.memory import MemoryGate


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One bus as its services and edges see it.

    Attributes:
        loop: runs everything; its `time()` is the monotonic clock.
        clock_us: the wall clock, in microseconds since 1970.
        memory: whether there is room for more messages.
        durability: what the log has announced, and a way to wait for it.
        events: what happened, for the topic `$events`.
    """

    bus: Bus
    config: Config
    loop: asyncio.AbstractEventLoop
    clock_us: Callable[[], int]
    memory: MemoryGate
    durability: Durability
    events: EventBook

    @property
    def log(self) -> Log:
        return self.bus.log

    @property
    def data(self) -> Path:
        return Path(self.config.data)
