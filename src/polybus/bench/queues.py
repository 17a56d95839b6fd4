"""Queues compared with `multiprocessing.connection` and pyzmq: messages per second, one way.

Each run sends messages from one end to the other (over TCP: to another process). The receiving end
counts messages and bytes and answers after the last; the clock runs until the answer. The systems
take turns in each round, and the median counts, because single runs vary.
"""

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from polybus.bench import BenchError
from polybus.bench.report import BenchFigure, Target
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
# Our queues must be this many times as fast as a system, for a place and a size in bytes.
TARGETS = {
    ("tcp", "pyzmq", 1024): 1.0,
    ("tcp", "pyzmq", 1 << 20): 1.0,
    ("tcp", "multiprocessing", 16): 3.0,
    ("in process", "multiprocessing", 16): 3.0,
}


@dataclass(frozen=True, slots=True)
class QueueLoad:
    message_bytes: int
    count: int

    @property
    def window(self) -> int:
        """How many messages may be in flight, in a system with such a limit."""
        return max(8, min(WINDOW_MESSAGES_MAX, WINDOW_BYTES // self.message_bytes))

    def check(self, count: int, total_bytes: int) -> None:
        if (count, total_bytes) != (self.count, self.count * self.message_bytes):
            raise BenchError(f"{count} of {self.count} messages arrived")


# Our queues.


class _Source(MessageListener, ConnectListener):
    """Sends the load within the window, and stops the pump at the answer."""

    def __init__(self, load: QueueLoad, pump: EventPump) -> None:
        self._message = bytes(load.message_bytes)
        self._left = load.count
        self._window = load.window
        self._in_flight = 0
        self._pump = pump

    def connected(self, queue: MessageQueue) -> None:
        self._queue = queue
        queue.set_listener(self)
        self._fill()

    def _fill(self) -> None:
        count = min(self._left, self._window - self._in_flight)
        send, message = self._queue.send, self._message
        for _ in range(count):
            send(message)
        self._left -= count
        self._in_flight += count

    def sent(self, message: bytes) -> None:
        self._in_flight -= 1
        if 2 * self._in_flight <= self._window and self._left:
            self._fill()

    def received(self, message: bytes) -> None:
        self._pump.stop()


class _Sink(MessageListener, AcceptListener):
    """Counts the load and answers after the last message."""

    def __init__(self, load: QueueLoad, closed: Callable[[], None]) -> None:
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


def _polybus_process(load: QueueLoad, ready: Connection) -> None:
    pump = EventPump()
    registry = Registry()
    registry.add("sink", HOST, any_port=True)
    broker = QueueBroker("sink", pump, transport=TcpTransport(registry))

    def start() -> None:
        broker.bind(1, _Sink(load, pump.stop))
        ready.send(registry.address("sink", 1))

    Task(pump).post(start)
    pump.run()


def _polybus_tcp(load: QueueLoad) -> float:
    with _process(_polybus_process, load) as (_, port):
        registry = Registry()
        registry.add("sink", HOST, {1: port})
        pump = EventPump()
        broker = QueueBroker("source", pump, transport=TcpTransport(registry))
        Task(pump).post(lambda: broker.connect("sink", 1, _Source(load, pump)))
        start_s = time.perf_counter()
        pump.run()
        return time.perf_counter() - start_s


def _polybus_local(load: QueueLoad) -> float:
    pump = EventPump()
    broker = QueueBroker("both", pump)

    def start() -> None:
        broker.bind(1, _Sink(load, lambda: None))
        broker.connect("both", 1, _Source(load, pump))

    Task(pump).post(start)
    start_s = time.perf_counter()
    pump.run()
    return time.perf_counter() - start_s


# multiprocessing.connection.


def _take(load: QueueLoad, receive: Callable[[], Sized]) -> None:
    total_bytes = 0
    for _ in range(load.count):
        total_bytes += len(receive())
    load.check(load.count, total_bytes)


def _connection_process(load: QueueLoad, ready: Connection) -> None:
    with Listener((HOST, 0)) as listener:
        ready.send(listener.address)
        with listener.accept() as connection:
            _take(load, connection.recv_bytes)
            connection.send_bytes(ANSWER)


def _give(load: QueueLoad, send: Callable[[bytes], object], receive: Callable[[], object]) -> float:
    message = bytes(load.message_bytes)
    start_s = time.perf_counter()
    for _ in range(load.count):
        send(message)
    receive()
    return time.perf_counter() - start_s


def _connection_tcp(load: QueueLoad) -> float:
    with _process(_connection_process, load) as (host, port), Client((host, port)) as connection:
        return _give(load, connection.send_bytes, connection.recv_bytes)


def _connection_local(load: QueueLoad) -> float:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, _thread(load, theirs.recv_bytes, theirs.send_bytes):
        return _give(load, ours.send_bytes, ours.recv_bytes)


# pyzmq.


def _zmq_pair(context: Any, load: QueueLoad) -> Any:
    import zmq

    pair = context.socket(zmq.PAIR)
    pair.linger = 0
    pair.sndhwm = pair.rcvhwm = load.window
    return pair


def _zmq_process(load: QueueLoad, ready: Connection, *, copy: bool = True) -> None:
    import zmq

    with zmq.Context() as context, _zmq_pair(context, load) as pair:
        ready.send((HOST, pair.bind_to_random_port(f"tcp://{HOST}")))
        _take(load, partial(pair.recv, copy=copy))
        pair.send(ANSWER)
        # The other end closes first, so that the answer is not dropped.
        ready.recv()


def _zmq_tcp(load: QueueLoad, *, copy: bool = True) -> float:
    import zmq

    with (
        _process(partial(_zmq_process, copy=copy), load) as (host, port),
        zmq.Context() as context,
        _zmq_pair(context, load) as pair,
    ):
        pair.connect(f"tcp://{host}:{port}")
        return _give(load, partial(pair.send, copy=copy), pair.recv)


def _zmq_local(load: QueueLoad) -> float:
    import zmq

    with (
        zmq.Context() as context,
        _zmq_pair(context, load) as ours,
        _zmq_pair(context, load) as theirs,
    ):
        theirs.bind("inproc://bench")
        ours.connect("inproc://bench")
        with _thread(load, theirs.recv, theirs.send):
            return _give(load, ours.send, ours.recv)


# The run.


@contextmanager
def _process(
    target: Callable[[QueueLoad, Connection], None], load: QueueLoad
) -> Iterator[tuple[str, int]]:
    """Run the receiving end in a process of its own; yields the address it listens on."""
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
def _thread(
    load: QueueLoad, receive: Callable[[], Sized], send: Callable[[bytes], object]
) -> Iterator[None]:
    """Run the receiving end in a thread."""

    def sink() -> None:
        _take(load, receive)
        send(ANSWER)

    thread = threading.Thread(target=sink)
    thread.start()
    try:
        yield
    finally:
        thread.join(10)


MEASURES: dict[tuple[str, str], Callable[[QueueLoad], float]] = {
    ("tcp", "polybus"): _polybus_tcp,
    ("tcp", "pyzmq"): _zmq_tcp,
    ("tcp", "pyzmq, no copy"): partial(_zmq_tcp, copy=False),
    ("tcp", "multiprocessing"): _connection_tcp,
    ("in process", "polybus"): _polybus_local,
    ("in process", "pyzmq"): _zmq_local,
    ("in process", "multiprocessing"): _connection_local,
}


def has_zmq() -> bool:
    return find_spec("zmq") is not None


def _measures() -> dict[tuple[str, str], Callable[[QueueLoad], float]]:
    """The measures of the systems that are installed."""
    return {key: run for key, run in MEASURES.items() if has_zmq() or "pyzmq" not in key[1]}


def run_count(rounds: int, sizes: tuple[int, ...] = SIZES) -> int:
    """How many runs `run_queue_bench` makes."""
    return rounds * len(sizes) * len(_measures())


def run_queue_bench(
    sizes: tuple[int, ...] = SIZES,
    *,
    rounds: int = ROUNDS,
    scale: float = 1.0,
    tell: Callable[[str], object] = lambda _: None,
) -> list[BenchFigure]:
    """Measure every installed system at every size; `scale` makes the runs longer or shorter."""
    measures = _measures()
    figures = []
    for size in sizes:
        count = int(scale * min(MESSAGES_PER_RUN_MAX, BYTES_PER_RUN_MAX // size))
        load = QueueLoad(size, max(1, count))
        times_s: dict[tuple[str, str], list[float]] = {key: [] for key in measures}
        for number in range(rounds):
            for key, run in measures.items():
                tell(f"{size} bytes, round {number + 1}: {key[1]} {key[0]}")
                times_s[key].append(run(load))
        rates = {key: load.count / statistics.median(runs) for key, runs in times_s.items()}
        figures += figures_of(size, rates)
    return figures


def figures_of(size: int, rates: dict[tuple[str, str], float]) -> list[BenchFigure]:
    """The figures of one message size, from rates by place and system."""
    figures = []
    for (place, system), rate in rates.items():
        target = TARGETS.get((place, system, size))
        figures.append(
            BenchFigure(
                work=f"{place}, {size:,} bytes",
                who=system,
                value=rate,
                unit="messages/s",
                ratio=None if system == "polybus" else rates[place, "polybus"] / rate,
                target=None if target is None else Target(value=target, at_least=True),
                note=f"{rate * size / 1e6:,.0f} MB/s",
            )
        )
    return figures
