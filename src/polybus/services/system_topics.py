"""The system topics: created when the bus starts; the bus itself writes `$events`."""

import asyncio
import logging
import time
from collections.abc import Callable

from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.config import Config
from polybus.errors import PolybusError
from polybus.log.interface import TopicSettings
from polybus.services.events import EVENTS_TOPIC, EventBook

logger = logging.getLogger("polybus.events")

STATS = "$stats"
ALERTS = "$alerts"
MADE_AT_START = (EVENTS_TOPIC, STATS, ALERTS)
PROTOCOL = "polybus"
WRITE_INTERVAL_S = 0.2
WRITE_INTERVAL_S_MAX = 5.0
# The share of the time that writing events may take. With many busy sessions they are written less
# often.
WRITE_SHARE = 0.02


def make_topics(bus: Bus, config: Config) -> None:
    """Create the system topics that do not exist. Raises StorageError."""
    for name in MADE_AT_START:
        bus.make_system_topic(name, settings_of(config))


def settings_of(config: Config) -> TopicSettings:
    """The retention of a new system topic."""
    return TopicSettings(
        retention_age_s=config.system.retention_age_s, retention_bytes=config.system.retention_bytes
    )


class EventWriter:
    """Writes collected events to `$events`, in one batch a few times a second."""

    def __init__(
        self,
        bus: Bus,
        loop: asyncio.AbstractEventLoop,
        clock_us: Callable[[], int],
        *,
        enabled: bool,
    ) -> None:
        self._bus = bus
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._interval_s = WRITE_INTERVAL_S
        self.book = EventBook(clock_us=clock_us, on_pending=self._arm, enabled=enabled)

    def _arm(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._interval_s, self.write)

    def write(self) -> None:
        """Write what was collected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        began_s = time.thread_time()
        messages = self.book.take()
        if not messages:
            return
        batch = Batch.of(EVENTS_TOPIC, messages)
        batch.protocol = PROTOCOL
        try:
            self._bus.commit([batch])
        except PolybusError as error:
            # The log has reported that it takes no writes. These events are lost.
            logger.info("%d event messages were not written: %s", len(messages), error.text)

        elapsed_s = time.thread_time() - began_s
        self._interval_s = min(max(WRITE_INTERVAL_S, elapsed_s / WRITE_SHARE), WRITE_INTERVAL_S_MAX)

    def close(self) -> None:
        """Write what is left; later events are not written."""
        self._closed = True
        if self._bus.has_topic(EVENTS_TOPIC):
            self.write()
