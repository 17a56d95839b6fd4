"""Decides what is measured, compared with whom, and the targets."""

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Literal

RECEIPTS_UNANSWERED_MAX = 16_384
PROBE_RATE_PER_S = 1_000
LATENCY_RATES_PER_S = (1_000, 10_000, 50_000)
RECEIPT_MARGIN_US = 150
IDLE_CONNECTIONS = 10_000
CONSOLES = 10
PAGE_MS_MAX = 1000


class Metric(Enum):
    """What a scenario measures; the value is its unit."""

    RATE = "messages/s"
    LATENCY = "µs"
    MEMORY = "KiB"
    WAIT = "ms"


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
    ping_pong: bool = False
    """Whether each message is published after the delivery of the one before."""
    beside: Literal["bulk", "single"] | None = None
    """A flood on one more topic: in large writes, or one message a write."""
    window_bytes: int | None = None
    """How many bytes may be published and not yet delivered; None: the broker's default."""

    logins_per_s: float = 0.0
    """How many visitors log in beside it; the broker must have accounts."""
    consoles: int = 0
    """How many pages follow the bus live beside it."""
    page: bool = False
    """Nothing but a page of the console, in a browser."""

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
        if self.beside is not None:
            words += ["--beside", self.beside]
        flags = {"--one-per-write": self.one_per_write, "--ping-pong": self.ping_pong}
        return words + [flag for flag, is_set in flags.items() if is_set]


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
    margin: float | None = None
    """By how much the bus may exceed its figure, in the unit of the metric."""
    p99: bool = False
    """Whether the target holds for the 99th percentile, too."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of work that several brokers do in turn."""

    name: str
    title: str
    load: Workload
    entries: tuple[Entry, ...]
    metric: Metric = Metric.RATE
    limit: float | None = None
    """An absolute target for the bus, in the unit of the metric."""


DISK = "disk"
BUS = Entry(broker="polybus")
LOGIN = Entry(broker="polybus-login")
FSYNC = Entry(broker="polybus-fsync")
MEMORY = Entry(broker="polybus-memory")
RECEIPTS = Workload(receipts=RECEIPTS_UNANSWERED_MAX)
REQUESTS = Workload(receipts=1, one_per_write=True)


def peer(broker: str, target: float | None = None, goal: float | None = None) -> Entry:
    return Entry(broker=broker, target=target, goal=goal)


nats, redis, mosquitto = (partial(peer, name) for name in ("nats", "redis", "mosquitto"))


def _one_per_write(publishers: int, subscribers: int, target: float) -> Scenario:
    return Scenario(
        f"single-{publishers}-{subscribers}",
        f"one frame per write, {publishers} → {subscribers}, log on",
        Workload(publishers=publishers, subscribers=subscribers, one_per_write=True),
        (BUS, nats(target), redis()),
    )


def _latency(rate_per_s: int, subscribers: int) -> Scenario:
    return Scenario(
        f"latency-{rate_per_s // 1000}k-1-{subscribers}",
        f"latency at {rate_per_s:,} messages per second, 1 → {subscribers}, log on",
        Workload(rate_per_s=rate_per_s, subscribers=subscribers),
        (BUS, replace(nats(1.0), p99=True), redis(goal=1.0)),
        Metric.LATENCY,
    )


def _probe(flood: Literal["bulk", "single"], title: str) -> Scenario:
    return Scenario(
        f"probe-{flood}",
        f"latency at {PROBE_RATE_PER_S:,} per second beside a flood {title}, log on",
        Workload(rate_per_s=PROBE_RATE_PER_S, beside=flood),
        (BUS, nats(1.0), redis()),
        Metric.LATENCY,
    )


def _goms(subscribers: int) -> Scenario:
    name, title = f"goms-1-{subscribers}", f"goMS 1 → {subscribers}, log on"
    bus = Entry(broker="polybus", protocol="goms")
    return Scenario(name, title, Workload(subscribers=subscribers), (bus, redis(3.0)))


SCENARIOS = (
    Scenario(
        "boson-1-1",
        "Boson 1 → 1, log on",
        Workload(),
        (BUS, nats(3.5), redis(6.0), mosquitto(50.0)),
    ),
    Scenario(
        "memory-1-1",
        "Boson 1 → 1, log in memory",
        Workload(),
        (MEMORY, nats(6.0), peer("relay", 0.75)),
    ),
    Scenario(
        "boson-1-8",
        "Boson 1 → 8, log on, delivered",
        Workload(subscribers=8),
        (BUS, nats(3.5), redis(), mosquitto(), peer("relay")),
    ),
    Scenario(
        "topics-16", "16 topics interleaved, log on", Workload(topics=16), (BUS, nats(3.0), redis())
    ),
    Scenario(
        "topics-1000",
        "1,000 topics interleaved, log on",
        Workload(topics=1000),
        (BUS, nats(3.0), redis()),
    ),
    Scenario(
        "receipts",
        "receipts after fsync; JetStream: acks of its file store",
        RECEIPTS,
        (FSYNC, peer("jetstream", 15.0)),
    ),
    Scenario(
        "receipts-64",
        "receipts after fsync over 64 topics",
        replace(RECEIPTS, topics=64),
        (FSYNC, replace(FSYNC, load=RECEIPTS, label="the same on one topic", target=0.8)),
    ),
    _one_per_write(1, 1, 1.5),
    _one_per_write(1, 8, 1.5),
    _one_per_write(8, 8, 1.0),
    _one_per_write(64, 1, 1.2),
    _one_per_write(64, 8, 1.2),
    Scenario(
        "kib-1-1",
        "1 KiB payloads, Boson 1 → 1, log on",
        Workload(payload_bytes=1024),
        (BUS, nats(2.0), redis()),
    ),
    _goms(1),
    _goms(8),
    *(_latency(rate, subscribers) for subscribers in (1, 8) for rate in LATENCY_RATES_PER_S),
    Scenario(
        "receipt-latency",
        f"receipts after fsync at {PROBE_RATE_PER_S:,} messages per second",
        replace(RECEIPTS, rate_per_s=PROBE_RATE_PER_S),
        (FSYNC, Entry(broker=DISK, margin=RECEIPT_MARGIN_US), peer("jetstream")),
        Metric.LATENCY,
    ),
    Scenario(
        "ping-pong",
        "one message in flight, log on",
        Workload(ping_pong=True),
        (BUS, nats(1.0), redis()),
        Metric.LATENCY,
    ),
    _probe("bulk", "in large writes"),
    _probe("single", "of single writes"),
    Scenario(
        "requests-single",
        "receipts one by one beside a flood of single writes, log in memory",
        replace(REQUESTS, beside="single"),
        (MEMORY, replace(MEMORY, load=REQUESTS, label="without the flood", target=0.25)),
    ),
    Scenario(
        "console-1-1",
        f"Boson 1 → 1 with {CONSOLES} consoles open, log on",
        Workload(consoles=CONSOLES),
        (BUS, replace(BUS, load=Workload(), label="without consoles", target=0.97)),
    ),
    Scenario(
        "console-page",
        "from the address to a console that shows live figures, with an empty cache",
        Workload(page=True),
        (BUS,),
        Metric.WAIT,
        limit=PAGE_MS_MAX,
    ),
    Scenario(
        "login-1-1",
        "Boson 1 → 1, logged in, log on",
        Workload(),
        (LOGIN, replace(BUS, label="without a login", target=0.98)),
    ),
    Scenario(
        "login-beside",
        f"latency at {PROBE_RATE_PER_S:,} per second beside 10,000 logins a minute, log on",
        Workload(rate_per_s=PROBE_RATE_PER_S, logins_per_s=10_000 / 60),
        (
            LOGIN,
            replace(
                LOGIN,
                load=Workload(rate_per_s=PROBE_RATE_PER_S),
                label="without other logins",
                target=2.0,
                p99=True,
            ),
        ),
        Metric.LATENCY,
    ),
    Scenario(
        "idle",
        "memory of idle TCP connections",
        Workload(subscribers=IDLE_CONNECTIONS),
        (BUS, nats(), redis(), mosquitto()),
        Metric.MEMORY,
        limit=6,
    ),
)
