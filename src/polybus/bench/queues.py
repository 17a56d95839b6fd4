"""Queues beside `multiprocessing.connection` and pyzmq: messages a second, one way.

Each measure sends a number of messages from one end to the other (over TCP: to another process),
which counts them and their bytes and answers when all are there; the clock runs until the answer.
The systems take turns round by round, and the median counts: single runs differ too much.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from polybus.bench.errors import BenchError
from polybus.queues import (
    AcceptListener,
    ConnectListener,
    EventPump,
    MessageListener,
    MessageQueue,
    QueueBroker,
    Registry,
    Task,
    TcpTransport,
)

SIZES = (16, 1024, 1 << 20)
ROUNDS = 3
BYTES_PER_RUN_MAX = 1 << 30
MESSAGES_PER_RUN_MAX = 400_000
WINDOW_BYTES = 8 << 20
WINDOW_MESSAGES_MAX = 20_000
ANSWER = b"all there"
HOST = "127.0.0.1"
# Place, system and size: how many times as fast as it ours has to be.
BARS = {
    ("tcp", "pyzmq", 1024): 1.0,
    ("tcp", "pyzmq", 1 << 20): 1.0,
    ("tcp", "multiprocessing", 16): 3.0,
    ("in process", "multiprocessing", 16): 3.0,
}


@dataclass(frozen=True, slots=True)
class Row:
    """The median rate of one system at one size, `where` is "tcp" or "in process"."""

    where: str
    system: str
    message_bytes: int
    messages_per_s: float


@dataclass(frozen=True, slots=True)
class Load:
    message_bytes: int
    count: int

    @property
    def window(self) -> int:
        """How many messages may be under way in a system that lets us say."""
        return max(8, min(WINDOW_MESSAGES_MAX, WINDOW_BYTES // self.message_bytes))

    def check(self, count: int, total_bytes: int) -> None:
        if (count, total_bytes) != (self.count, self.count * self.message_bytes):
            raise BenchError(f"{count} of {self.count} messages arrived")


# Queues of this package


class _Source(MessageListener, ConnectListener):
    """Sends the load, no more under way than the window, and stops the pump at the answer."""

    def __init__(self, load: Load, pump: EventPump) -> None:
        self._message = bytes(load.message_bytes)
        self._left = load.count
        self._window = load.window
        self._under_way = 0
        self._pump = pump

    def connected(self, queue: MessageQueue) -> None:
        self._queue = queue
        queue.set_listener(self)
        self._fill()

    def _fill(self) -> None:
        count = min(self._left, self._window - self._under_way)
        send, message = self._queue.send, self._message
        for _ in range(count):
            send(message)
        self._left -= count
        self._under_way += count

    def sent(self, message: bytes) -> None:
        self._under_way -= 1
        if 2 * self._under_way <= self._window and self._left:
            self._fill()

    def received(self, message: bytes) -> None:
        self._pump.stop()


class _Sink(MessageListener, AcceptListener):
    """Counts the load and answers when it is all there."""

    def __init__(self, load: Load, closed: Callable[[], None]) -> None:
        self._load = load
        self._count = 0
        self._bytes = 0
        self._closed = closed

    def accepted(self, queue: MessageQueue) -> None:
        self._queue = queue
        queue.set_listener(self)

    def received(self, message: bytes) -> None:
        self._count += 1
        self._bytes += len(message)
        if self._count == self._load.count:
            self._load.check(self._count, self._bytes)
            self._queue.send(ANSWER)

    def closed(self) -> None:
        self._closed()


def _polybus_process(load: Load, ready: Connection) -> None:
    pump = EventPump()
    registry = Registry()
    registry.add("sink", HOST, any_port=True)
    broker = QueueBroker("sink", pump, transport=TcpTransport(registry))

    def start() -> None:
        broker.bind(1, _Sink(load, pump.stop))
        ready.send(registry.address("sink", 1))

    Task(pump).post(start)
    pump.run()


def _polybus_tcp(load: Load) -> float:
    with _process(_polybus_process, load) as (_, port):
        registry = Registry()
        registry.add("sink", HOST, {1: port})
        pump = EventPump()
        broker = QueueBroker("source", pump, transport=TcpTransport(registry))
        Task(pump).post(lambda: broker.connect("sink", 1, _Source(load, pump)))
        start_s = time.perf_counter()
        pump.run()
        return time.perf_counter() - start_s


def _polybus_local(load: Load) -> float:
    pump = EventPump()
    broker = QueueBroker("both", pump)

    def start() -> None:
        broker.bind(1, _Sink(load, lambda: None))
        broker.connect("both", 1, _Source(load, pump))

    Task(pump).post(start)
    start_s = time.perf_counter()
    pump.run()
    return time.perf_counter() - start_s


# multiprocessing.connection


def _take(load: Load, receive: Callable[[], Sized]) -> None:
    total_bytes = 0
    for _ in range(load.count):
        total_bytes += len(receive())
    load.check(load.count, total_bytes)


def _connection_process(load: Load, ready: Connection) -> None:
    with Listener((HOST, 0)) as listener:
        ready.send(listener.address)
        with listener.accept() as connection:
            _take(load, connection.recv_bytes)
            connection.send_bytes(ANSWER)


def _give(load: Load, send: Callable[[bytes], object], receive: Callable[[], object]) -> float:
    message = bytes(load.message_bytes)
    start_s = time.perf_counter()
    for _ in range(load.count):
        send(message)
    receive()
    return time.perf_counter() - start_s


def _connection_tcp(load: Load) -> float:
    with _process(_connection_process, load) as (host, port), Client((host, port)) as connection:
        return _give(load, connection.send_bytes, connection.recv_bytes)


def _connection_local(load: Load) -> float:
    ours, theirs = multiprocessing.Pipe()

    def sink() -> None:
        _take(load, theirs.recv_bytes)
        theirs.send_bytes(ANSWER)

    with ours, theirs, _thread(sink):
        return _give(load, ours.send_bytes, ours.recv_bytes)


# pyzmq


def _zmq_pair(context: Any, load: Load) -> Any:
    import zmq

    pair = context.socket(zmq.PAIR)
    pair.linger = 0
    pair.sndhwm = pair.rcvhwm = load.window
    return pair


def _zmq_process(load: Load, ready: Connection, *, copy: bool = True) -> None:
    import zmq

    with zmq.Context() as context, _zmq_pair(context, load) as pair:
        ready.send((HOST, pair.bind_to_random_port(f"tcp://{HOST}")))
        _take(load, partial(pair.recv, copy=copy))
        pair.send(ANSWER)
        # The other end closes first: what is on its way must not be dropped.
        ready.recv()


def _zmq_tcp(load: Load, *, copy: bool = True) -> float:
    import zmq

    with (
        _process(partial(_zmq_process, copy=copy), load) as (host, port),
        zmq.Context() as context,
        _zmq_pair(context, load) as pair,
    ):
        pair.connect(f"tcp://{host}:{port}")
        return _give(load, partial(pair.send, copy=copy), pair.recv)


def _zmq_local(load: Load) -> float:
    import zmq

    with (
        zmq.Context() as context,
        _zmq_pair(context, load) as ours,
        _zmq_pair(context, load) as theirs,
    ):
        theirs.bind("inproc://bench")
        ours.connect("inproc://bench")

        def sink() -> None:
            _take(load, theirs.recv)
            theirs.send(ANSWER)

        with _thread(sink):
            return _give(load, ours.send, ours.recv)


# The run


@contextmanager
def _process(target: Callable[[Load, Connection], None], load: Load) -> Iterator[tuple[str, int]]:
    """A process of its own for the receiving end; gives the address it listens on."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(load, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(30):
            raise BenchError("the receiving process did not start")
        yield ours.recv()
        ours.send(None)
    finally:
        process.join(10)
        process.kill()
        process.join()
        ours.close()
        theirs.close()


@contextmanager
def _thread(target: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=target)
    thread.start()
    try:
        yield
    finally:
        thread.join(10)


MEASURES: dict[tuple[str, str], Callable[[Load], float]] = {
    ("tcp", "polybus"): _polybus_tcp,
    ("tcp", "pyzmq"): _zmq_tcp,
    ("tcp", "pyzmq, no copy"): partial(_zmq_tcp, copy=False),
    ("tcp", "multiprocessing"): _connection_tcp,
    ("in process", "polybus"): _polybus_local,
    ("in process", "pyzmq"): _zmq_local,
    ("in process", "multiprocessing"): _connection_local,
}


def has_zmq() -> bool:
    try:
        import zmq  # noqa: F401
    except ImportError:
        return False
    return True


def _measures() -> dict[tuple[str, str], Callable[[Load], float]]:
    """Those of the systems that are installed."""
    return {key: run for key, run in MEASURES.items() if has_zmq() or "pyzmq" not in key[1]}


def run_count(rounds: int, sizes: tuple[int, ...] = SIZES) -> int:
    """How many runs `run_queue_bench` makes."""
    return rounds * len(sizes) * len(_measures())


def run_queue_bench(
    sizes: tuple[int, ...] = SIZES,
    *,
    rounds: int = ROUNDS,
    scale: float = 1.0,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """Measure every system at every size; `scale` makes the runs longer or shorter.

    pyzmq is left out where it is not installed.
    """
    measures = _measures()
    rows = []
    for size in sizes:
        count = int(scale * min(MESSAGES_PER_RUN_MAX, BYTES_PER_RUN_MAX // size))
        load = Load(size, max(1, count))
        times_s: dict[tuple[str, str], list[float]] = {key: [] for key in measures}
        for number in range(rounds):
            for key, run in measures.items():
                progress(f"{size} bytes, round {number + 1}: {key[1]} {key[0]}")
                times_s[key].append(run(load))
        rows += [
            Row(*key, size, load.count / statistics.median(runs)) for key, runs in times_s.items()
        ]
    return rows


def ratio(rows: list[Row], where: str, message_bytes: int, system: str) -> float | None:
    """How many times as fast as `system` ours is; None where that was not measured."""
    rates = {
        row.system: row.messages_per_s
        for row in rows
        if (row.where, row.message_bytes) == (where, message_bytes)
    }
    return rates["polybus"] / rates[system] if system in rates else None


def bar_of(row: Row) -> float | None:
    """How many times as fast as this row's system ours must be."""
    return BARS.get((row.where, row.system, row.message_bytes))


def render(rows: list[Row]) -> str:
    """The table, then each bar that was missed."""
    heading = f"{'':12}{'bytes':>9}{'system':>17}{'messages/s':>13}{'MB/s':>9}{'polybus is':>12}"
    lines = [f"{heading}{'bar':>9}"]
    missed = []
    for row in rows:
        rate = row.messages_per_s
        times = ratio(rows, row.where, row.message_bytes, row.system)
        bar = bar_of(row)
        compared = "" if row.system == "polybus" or times is None else f"{times:.1f} ×"
        lines.append(
            f"{row.where:12}{row.message_bytes:>9,}{row.system:>17}{rate:>13,.0f}"
            f"{rate * row.message_bytes / 1e6:>9,.0f}{compared:>12}"
            f"{'' if bar is None else f'≥ {bar:g} ×':>9}".rstrip()
        )
        if bar is not None and times is not None and times < bar:
            where = f"{row.where}, {row.message_bytes:,} bytes"
            missed.append(f"Not met: {where}: {times:.2f} × {row.system}, the bar is ≥ {bar:g} ×.")
    held = sum(bar_of(row) is not None for row in rows)
    lines += ["", f"{held - len(missed)} of {held} bars met.", *missed]
    if not has_zmq():
        lines.append("pyzmq is not installed, so its rows and bars are missing: pip install pyzmq")
    return "\n".join(lines)


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows, each with its ratio and bar."""
    return [
        {name: getattr(row, name) for name in Row.__slots__}
        | {
            "ratio": ratio(rows, row.where, row.message_bytes, row.system),
            "bar": bar_of(row),
        }
        for row in rows
    ]
