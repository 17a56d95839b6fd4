"""Decides what is measured, compared with whom, and the targets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

RECEIPTS_UNANSWERED_MAX = 16_384
LATENCY_RATE_PER_S = 10_000
IDLE_CONNECTIONS = 10_000


class Metric(Enum):
    """What a scenario measures; the value is its unit."""

    RATE = "messages/s"
    LATENCY = "µs"
    MEMORY = "KiB"
    WAIT = "ms"

    @property
    def more_is_better(self) -> bool:
        return self is Metric.RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the load generator does."""

    publishers: int = 1
    subscribers: int = 1
    topics: int = 1
    payload_bytes: int = 100
    receipts: int = 0
    one_per_write: bool = False
    rate_per_s: int = 0
    window_bytes: int | None = None
    """How many bytes may be published and not yet delivered; None: the broker's default."""

    def arguments(self) -> list[str]:
        options = {
            "--publishers": self.publishers,
            "--subscribers": self.subscribers,
            "--topics": self.topics,
            "--payload-bytes": self.payload_bytes,
            "--receipts": self.receipts,
            "--rate": self.rate_per_s,
        }
        words = [word for name, value in options.items() for word in (name, str(value))]
        return [*words, "--one-per-write"] if self.one_per_write else words


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One contestant of a scenario. The first is the bus, the others are its peers."""

    broker: str
    protocol: str | None = None
    load: Workload | None = None
    """Its own load, if it differs from the scenario's."""
    label: str | None = None
    target: float | None = None
    """The bus must reach this many times its figure; for latency and memory, at most as many."""
    goal: float | None = None
    """A further target that is not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One kind of work that several brokers do in turn."""

    name: str
    title: str
    load: Workload
    entries: tuple[Entry, ...]
    metric: Metric = Metric.RATE
    limit: float | None = None
    """An absolute target for the bus, in the unit of the metric."""


BUS = Entry(broker="polybus")


def _one_per_write(publishers: int, subscribers: int) -> Scenario:
    return Scenario(
        name=f"single-{publishers}-{subscribers}",
        title=f"one frame per write, {publishers} → {subscribers}, log on",
        load=Workload(publishers=publishers, subscribers=subscribers, one_per_write=True),
        entries=(
            BUS,
            Entry(broker="nats", target=0.9, goal=1.2),
            Entry(broker="redis"),
        ),
    )


def _goms(subscribers: int) -> Scenario:
    return Scenario(
        name=f"goms-1-{subscribers}",
        title=f"goMS 1 → {subscribers}, log on",
        load=Workload(subscribers=subscribers),
        entries=(
            Entry(broker="polybus", protocol="goms"),
            Entry(broker="redis", target=1.0),
        ),
    )


RECEIPTS = Workload(receipts=RECEIPTS_UNANSWERED_MAX)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        name="boson-1-1",
        title="Boson 1 → 1, log on",
        load=Workload(),
        entries=(
            BUS,
            Entry(broker="nats", target=3.0),
            Entry(broker="redis", target=5.0),
            Entry(broker="mosquitto", target=35.0),
        ),
    ),
    Scenario(
        name="memory-1-1",
        title="Boson 1 → 1, log in memory",
        load=Workload(),
        entries=(
            Entry(broker="polybus-memory"),
            Entry(broker="nats", target=6.0),
            Entry(broker="relay", target=0.75),
        ),
    ),
    Scenario(
        name="boson-1-8",
        title="Boson 1 → 8, log on, delivered",
        load=Workload(subscribers=8),
        entries=(
            BUS,
            Entry(broker="nats", target=3.0),
            Entry(broker="redis"),
            Entry(broker="mosquitto"),
            Entry(broker="relay"),
        ),
    ),
    Scenario(
        name="topics-16",
        title="16 topics interleaved, log on",
        load=Workload(topics=16),
        entries=(BUS, Entry(broker="nats", target=3.0), Entry(broker="redis")),
    ),
    Scenario(
        name="topics-1000",
        title="1,000 topics interleaved, log on",
        load=Workload(topics=1000),
        entries=(BUS, Entry(broker="nats", target=1.0, goal=3.0), Entry(broker="redis")),
    ),
    Scenario(
        name="receipts",
        title="receipts after fsync; JetStream: acks of its file store",
        load=RECEIPTS,
        entries=(Entry(broker="polybus-fsync"), Entry(broker="jetstream", target=12.0)),
    ),
    Scenario(
        name="receipts-64",
        title="receipts after fsync over 64 topics",
        load=Workload(receipts=RECEIPTS_UNANSWERED_MAX, topics=64),
        entries=(
            Entry(broker="polybus-fsync"),
            Entry(broker="polybus-fsync", load=RECEIPTS, label="the same on one topic", target=0.8),
        ),
    ),
    _one_per_write(1, 1),
    _one_per_write(1, 8),
    _one_per_write(64, 1),
    _one_per_write(64, 8),
    Scenario(
        name="kib-1-1",
        title="1 KiB payloads, Boson 1 → 1, log on",
        load=Workload(payload_bytes=1024),
        entries=(BUS, Entry(broker="nats", target=2.0), Entry(broker="redis")),
    ),
    _goms(1),
    _goms(8),
    Scenario(
        name="latency",
        title="latency at 10,000 messages per second, log on",
        load=Workload(rate_per_s=LATENCY_RATE_PER_S),
        metric=Metric.LATENCY,
        entries=(
            BUS,
            Entry(broker="nats", target=1.5),
            Entry(broker="redis"),
            Entry(broker="mosquitto"),
        ),
    ),
    Scenario(
        name="idle",
        title="memory of idle TCP connections",
        load=Workload(subscribers=IDLE_CONNECTIONS),
        metric=Metric.MEMORY,
        limit=12,
        entries=(BUS, Entry(broker="nats"), Entry(broker="redis"), Entry(broker="mosquitto")),
    ),
)
