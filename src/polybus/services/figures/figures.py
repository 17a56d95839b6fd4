"""What the bus counts each second, once for all readers: rates, gauges, and their history.

The counters already exist, one per topic and protocol; this reads them each second, and less often
if that would take more than SHARE of the loop's time. The last hour is in memory (HOUR_POINTS).
Every FLUSH_S the means go to the system topic `$metrics`, which has the days before.
"""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sized
from typing import Any, Protocol

import msgspec

from polybus import names
from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.bus.topic import Topic
from polybus.config import Config
from polybus.errors import PolybusError
from polybus.processes import memory_bytes
from polybus.scan import Traffic
from polybus.services.ages import lags_s
from polybus.services.bad_peers import BadPeers
from polybus.services.consumers import ConsumerRegistry, ConsumerView
from polybus.services.context import Context
from polybus.services.figures.rings import SeriesRing
from polybus.services.sessions.inboxes import Inboxes

logger = logging.getLogger("polybus.figures")

METRICS_TOPIC = "$metrics"
PROTOCOL = "polybus"
INTERVAL_S = 1.0
INTERVAL_S_MAX = 10.0
SHARE = 0.01
FLUSH_S = 10.0
HOUR_POINTS = 3600
SERIES_MAX = 64
TOPICS_MAX = 50
"""Topics and groups with their own history: those with the most traffic or lag."""
BUSY_MAX = 200
SMOOTH_S = 5.0


class FigureSources(Protocol):
    """The sources of the figures."""

    @property
    def context(self) -> Context: ...
    @property
    def bus(self) -> Bus: ...
    @property
    def config(self) -> Config: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def inboxes(self) -> Inboxes: ...
    @property
    def consumers(self) -> ConsumerRegistry: ...
    @property
    def bad_peers(self) -> BadPeers: ...
    @property
    def websockets(self) -> Sized: ...
    @property
    def count_connections(self) -> Callable[[], int]: ...
    def delivered(self, topic: Topic) -> dict[str, Traffic]: ...


class TopicRate:
    """A topic's counters at the last sample, and its rates, smoothed over SMOOTH_S.

    Attributes:
        rates: messages in, bytes in, messages out and bytes out a second.
        last_us: when its last message came in, since the bus started.
    """

    __slots__ = ("_counts", "last_us", "rates", "topic", "totals")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.last_us = 0
        self.totals = (0, 0, 0, 0)
        self.rates = (0.0, 0.0, 0.0, 0.0)
        self._counts: dict[str, tuple[int, int]] = {}

    def update(
        self, counts: dict[str, tuple[int, int]], sums: Counter[str], seconds: float, now_us: int
    ) -> None:
        """Read the counters; add the increments to the sums of all topics."""
        fresh = [0, 0, 0, 0]
        totals = [0, 0, 0, 0]
        for name, (messages, value_bytes) in counts.items():
            messages_before, bytes_before = self._counts.get(name, (0, 0))
            at = 0 if name.startswith("in.") else 2
            way, _, protocol = name.partition(".")
            for index, unit, count in (
                (at, "messages", messages - messages_before),
                (at + 1, "bytes", value_bytes - bytes_before),
            ):
                fresh[index] += count
                sums[f"{way}.{unit}.{protocol}"] += count
                sums[f"{way}.{unit}"] += count
            totals[at] += messages
            totals[at + 1] += value_bytes
        if fresh[0]:
            self.last_us = now_us
        weight = 1 - math.exp(-seconds / SMOOTH_S)
        self.rates = _smoothed(self.rates, fresh, seconds, weight)
        self.totals = (totals[0], totals[1], totals[2], totals[3])
        self._counts = counts


def _smoothed(
    rates: tuple[float, float, float, float], fresh: list[int], seconds: float, weight: float
) -> tuple[float, float, float, float]:
    now = [
        rate + weight * (max(0, count) / seconds - rate)
        for rate, count in zip(rates, fresh, strict=True)
    ]
    # It decays forever; report no rates like 1e-9 messages a second.
    shown = [0.0 if rate < 0.005 else round(rate, 3) for rate in now]
    return shown[0], shown[1], shown[2], shown[3]


class BusFigures:
    """Samples of one bus.

    Attributes:
        latest: the series of the last sample, by name.
        groups: the lag of each consumer group.
        group_lag_s: the same in seconds, updated every FLUSH_S.
        time_s: when the last sample was taken, in seconds since 1970.
    """

    def __init__(self, state: FigureSources) -> None:
        self._state = state
        self._topics: dict[str, TopicRate] = {}
        self.second_ring = SeriesRing(HOUR_POINTS, SERIES_MAX)
        points = int(HOUR_POINTS / FLUSH_S)
        self.topic_ring = SeriesRing(points, TOPICS_MAX)
        self.group_ring = SeriesRing(points, TOPICS_MAX)
        self.age_ring = SeriesRing(points, TOPICS_MAX)
        self.latest: dict[str, float] = {}
        self.groups: dict[str, int] = {}
        self.group_lag_s: dict[str, float] = {}
        self._ages: dict[str, float] = {}
        self.time_s = 0.0
        self.on_sample: list[Callable[[], None]] = []
        self._sampled_s = state.loop.time()
        self._flushed_s = self._sampled_s
        self._counters: dict[str, float] = {}
        self._disk = (math.nan, math.nan)
        self._timer: asyncio.TimerHandle | None = None

    # Lifecycle

    def start(self) -> None:
        self._look_at_disk()
        self._count(time.process_time(), 1.0)
        # A new bus shows figures at once, not after a second.
        self._sampled_s -= INTERVAL_S
        self.sample()
        self._plan(INTERVAL_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _plan(self, interval_s: float) -> None:
        due_s = self._state.loop.time() + interval_s
        self._timer = self._state.loop.call_at(due_s, self._on_timer, due_s)

    def _on_timer(self, due_s: float) -> None:
        began_s = time.thread_time()
        self.sample(max(0.0, self._state.loop.time() - due_s))
        cost_s = time.thread_time() - began_s
        self._plan(min(max(INTERVAL_S, cost_s / SHARE), INTERVAL_S_MAX))

    # Sampling

    def sample(self, late_s: float = 0.0) -> None:
        """Take a sample now."""
        now_s, now_us = self._state.loop.time(), self._state.context.clock_us()
        seconds = max(now_s - self._sampled_s, 1e-3)
        self._sampled_s = now_s
        sums: Counter[str] = Counter()
        self._read_topics(sums, seconds, now_us)
        figures = {name: round(max(0, count) / seconds, 3) for name, count in sums.items()}
        figures |= self._gauges()
        figures |= self._count(time.process_time(), seconds)
        figures["loop-delay-ms"] = round(late_s * 1000, 3)
        views = self._state.consumers.views()
        self.groups = {one.group: one.lag for one in views}
        self.group_lag_s = {
            name: age_s
            for name, lag in self.groups.items()
            if (age_s := self._ages.get(name) if lag else 0.0) is not None
        }
        figures["lag"] = float(sum(self.groups.values()))
        self.latest = figures
        self.time_s = now_us / 1e6
        self.second_ring.add(self.time_s, figures)
        if now_s - self._flushed_s >= FLUSH_S:
            self._flushed_s = now_s
            if any(self.groups.values()):
                self._state.loop.run_in_executor(None, self._look_at_ages, views, now_us)
            self._flush()
        for call in self.on_sample:
            call()

    def _read_topics(self, sums: Counter[str], seconds: float, now_us: int) -> None:
        known: dict[str, TopicRate] = {}
        for topic in self._state.bus.every_topic():
            if not topic.taken and topic.name not in self._topics:
                continue
            rate = self._topics.get(topic.name)
            if rate is None or rate.topic is not topic:
                rate = TopicRate(topic)
            counts = {
                f"in.{protocol}": (one.messages, one.value_bytes)
                for protocol, one in topic.taken.items()
            }
            for protocol, one in self._state.delivered(topic).items():
                counts[f"out.{protocol}"] = (one.messages, one.value_bytes)
            # Messages of the bus about itself do not count as traffic.
            is_own = names.is_reserved(topic.name)
            rate.update(counts, Counter() if is_own else sums, seconds, now_us)
            known[topic.name] = rate
        self._topics = known

    def _gauges(self) -> dict[str, float]:
        state = self._state
        return {
            "connections": float(state.count_connections()),
            "websockets": float(len(state.websockets)),
            "sessions": float(len(state.inboxes)),
            "session-packs": float(sum(one.pack_count for one in state.inboxes.sessions())),
            "outbox-bytes": float(state.context.memory.ledger.bytes),
            "pending-bytes": float(state.bus.log.pending_bytes),
            "memory-bytes": float(memory_bytes()[1]),
            "disk-free-bytes": self._disk[0],
            "disk-total-bytes": self._disk[1],
        }

    def _count(self, cpu_s: float, seconds: float) -> dict[str, float]:
        """The increments since the last sample, per second."""
        state = self._state
        errors = state.bad_peers.counts
        syncs, sync_s = getattr(state.bus.log, "sync_figures", (0, 0.0))
        dropped = errors["outbox.dropped"] + errors["outbox.full"] + state.inboxes.messages_lost
        now = {
            "cpu": cpu_s,
            "receipts": float(state.bus.receipts_given),
            "errors": float(errors.total()),
            "drops": float(dropped),
            "fsyncs": float(syncs),
            "fsync-s": float(sync_s),
        }
        before, self._counters = self._counters or now, now
        rates = {name: round((now[name] - before[name]) / seconds, 4) for name in now}
        spent_s = rates.pop("fsync-s")
        rates["fsync-ms"] = round(1000 * spent_s / rates["fsyncs"], 3) if rates["fsyncs"] else 0.0
        return rates

    def _flush(self) -> None:
        """Write the means of the last FLUSH_S to `$metrics`, and read the disk usage."""
        self._state.loop.run_in_executor(None, self._look_at_disk)
        busiest = {one.topic.name: one.rates[0] for one in self.busy(TOPICS_MAX)}
        self.topic_ring.add(self.time_s, busiest)
        slowest = dict(sorted(self.groups.items(), key=lambda one: -one[1])[:TOPICS_MAX])
        self.group_ring.add(self.time_s, {name: float(lag) for name, lag in slowest.items()})
        ages = {name: age for name in slowest if (age := self.group_lag_s.get(name)) is not None}
        self.age_ring.add(self.time_s, ages)
        if not self._state.config.system.metrics:
            return
        _, series = self.second_ring.means(self.time_s - FLUSH_S + 0.5, 1e9)
        means = {name: round(mean[-1], 3) for name, mean in series.items() if mean}
        message: dict[str, Any] = {"time": self.time_s, "interval-s": FLUSH_S, "series": means}
        message |= {"topics": busiest, "groups": slowest, "group-lag-s": ages}
        batch = Batch.of(METRICS_TOPIC, [msgspec.json.encode(message)])
        batch.protocol = PROTOCOL
        try:
            self._state.bus.commit([batch])
        except PolybusError as error:
            # The log has reported that it takes no writes; the hour in memory continues.
            logger.info("figures were not written: %s", error.text)

    def _look_at_ages(self, views: list[ConsumerView], now_us: int) -> None:
        self._ages = lags_s(self._state.bus.log, views, now_us)

    def _look_at_disk(self) -> None:
        with contextlib.suppress(OSError):
            found = os.statvfs(self._state.context.data)
            size = found.f_frsize
            self._disk = (float(found.f_bavail * size), float(found.f_blocks * size))

    # Reading

    def of_topic(self, name: str) -> TopicRate | None:
        """The rates of a topic; None if it had no message since the bus started."""
        return self._topics.get(name)

    def busy(self, count: int = BUSY_MAX) -> list[TopicRate]:
        """The topics with traffic now, the busiest first."""
        found = [one for one in self._topics.values() if one.rates[0] or one.rates[2]]
        found.sort(key=lambda one: one.rates[0] + one.rates[2], reverse=True)
        return found[:count]
