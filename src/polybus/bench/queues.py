"""Queues compared with `multiprocessing.connection` and pyzmq: messages per second, one way.

Each run sends messages from one end to the other: over TCP to another process, or in one process.
The receiving end counts messages and bytes and answers after the last; the clock runs until the
answer.
"""

import multiprocessing
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
from polybus.bench.report import BenchFigure, Target, medians
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
BYTES_PER_RUN_MAX = 1 << 30
MESSAGES_PER_RUN_MAX = 400_000
WINDOW_BYTES = 8 << 20
WINDOW_MESSAGES_MAX = 20_000
ANSWER = b"all there"
HOST = "127.0.0.1"
START_S_MAX = 30.0
END_S_MAX = 10.0
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


def _polybus_sink(load: QueueLoad, ready: Connection) -> None:
    pump = EventPump()
    registry = Registry()
    registry.add("sink", HOST, any_port=True)
    broker = QueueBroker("sink", pump, transport=TcpTransport(registry))

    def start() -> None:
        broker.bind(1, _Sink(load, pump.stop))
        ready.send(registry.address("sink", 1))

    _run_pump(pump, start)


def _polybus_tcp(load: QueueLoad) -> float:
    with _receiver(_polybus_sink, load) as (_, port):
        registry = Registry()
        registry.add("sink", HOST, {1: port})
        pump = EventPump()
        broker = QueueBroker("source", pump, transport=TcpTransport(registry))
        return _run_pump(pump, lambda: broker.connect("sink", 1, _Source(load, pump)))


def _polybus_local(load: QueueLoad) -> float:
    pump = EventPump()
    broker = QueueBroker("both", pump)

    def start() -> None:
        broker.bind(1, _Sink(load, lambda: None))
        broker.connect("both", 1, _Source(load, pump))

    return _run_pump(pump, start)


def _run_pump(pump: EventPump, start: Callable[[], object]) -> float:
    Task(pump).post(start)
    start_s = time.perf_counter()
    pump.run()
    return time.perf_counter() - start_s


# The peers: each a receiving end, and a run that sends to it.


def _take(load: QueueLoad, receive: Callable[[], Sized], send: Callable[[bytes], object]) -> None:
    total_bytes = 0
    for _ in range(load.count):
        total_bytes += len(receive())
    load.check(load.count, total_bytes)
    send(ANSWER)


def _give(load: QueueLoad, send: Callable[[bytes], object], receive: Callable[[], object]) -> float:
    message = bytes(load.message_bytes)
    start_s = time.perf_counter()
    for _ in range(load.count):
        send(message)
    receive()
    return time.perf_counter() - start_s


def _connection_sink(load: QueueLoad, ready: Connection, *, family: str) -> None:
    with Listener(family=family) as listener:
        ready.send(listener.address)
        with listener.accept() as connection:
            _take(load, connection.recv_bytes, connection.send_bytes)


def _connection(load: QueueLoad, *, over_tcp: bool) -> float:
    sink = partial(_connection_sink, family="AF_INET" if over_tcp else "AF_UNIX")
    with _receiver(sink, load, in_process=not over_tcp) as address, Client(address) as connection:
        return _give(load, connection.send_bytes, connection.recv_bytes)


def _zmq_pair(load: QueueLoad) -> Any:
    import zmq

    pair: Any = zmq.Context.instance().socket(zmq.PAIR)
    pair.linger = 0
    pair.sndhwm = pair.rcvhwm = load.window
    return pair


def _zmq_sink(load: QueueLoad, ready: Connection, *, address: str, copy: bool) -> None:
    with _zmq_pair(load) as pair:
        pair.bind(address)
        ready.send(pair.last_endpoint)
        _take(load, partial(pair.recv, copy=copy), pair.send)
        # The other end closes first, so that the answer is not dropped.
        ready.recv()


def _zmq(load: QueueLoad, *, over_tcp: bool, copy: bool = True) -> float:
    address = f"tcp://{HOST}:*" if over_tcp else "inproc://bench"
    sink = partial(_zmq_sink, address=address, copy=copy)
    with _receiver(sink, load, in_process=not over_tcp) as endpoint, _zmq_pair(load) as pair:
        pair.connect(endpoint)
        return _give(load, partial(pair.send, copy=copy), pair.recv)


# The run.


@contextmanager
def _receiver(
    sink: Callable[[QueueLoad, Connection], None], load: QueueLoad, *, in_process: bool = False
) -> Iterator[Any]:
    """Run the receiving end in a thread, or in a process of its own; yields its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    make = threading.Thread if in_process else context.Process
    worker = make(target=sink, args=(load, theirs), daemon=True)
    worker.start()
    try:
        if not ours.poll(START_S_MAX):
            raise BenchError("the receiving end did not start")
        yield ours.recv()
        ours.send(None)
    finally:
        worker.join(END_S_MAX)
        if isinstance(worker, context.Process):
            worker.kill()
            worker.join()


MEASURES: dict[str, dict[str, Callable[[QueueLoad], float]]] = {
    "tcp": {
        "polybus": _polybus_tcp,
        "pyzmq": partial(_zmq, over_tcp=True),
        "pyzmq, no copy": partial(_zmq, over_tcp=True, copy=False),
        "multiprocessing": partial(_connection, over_tcp=True),
    },
    "in process": {
        "polybus": _polybus_local,
        "pyzmq": partial(_zmq, over_tcp=False),
        "multiprocessing": partial(_connection, over_tcp=False),
    },
}


def has_zmq() -> bool:
    return find_spec("zmq") is not None


def run_count(rounds: int, sizes: tuple[int, ...] = SIZES) -> int:
    """How many runs `run_queue_bench` makes."""
    return rounds * len(sizes) * sum(len(_installed(place)) for place in MEASURES)


def _installed(place: str) -> dict[str, Callable[[QueueLoad], float]]:
    found = MEASURES[place].items()
    return {system: run for system, run in found if has_zmq() or "pyzmq" not in system}


def run_queue_bench(
    sizes: tuple[int, ...] = SIZES, *, rounds: int, scale: float, tell: Callable[[str], object]
) -> list[BenchFigure]:
    """Measure every installed system at every size; `scale` makes the runs longer or shorter."""
    figures = []
    for size in sizes:
        count = int(scale * min(MESSAGES_PER_RUN_MAX, BYTES_PER_RUN_MAX // size))
        load = QueueLoad(size, max(1, count))
        for place in MEASURES:
            runs = {system: partial(run, load) for system, run in _installed(place).items()}
            taken_s = medians(runs, rounds, tell, work=f"{place}, {size:,} bytes")
            rates = {system: load.count / seconds for system, seconds in taken_s.items()}
            figures += figures_of(place, size, rates)
    return figures


def figures_of(place: str, size: int, rates: dict[str, float]) -> list[BenchFigure]:
    """The figures of one place and message size, from rates by system."""
    figures = []
    for system, rate in rates.items():
        target = TARGETS.get((place, system, size))
        figures.append(
            BenchFigure(
                work=f"{place}, {size:,} bytes",
                who=system,
                value=rate,
                unit="messages/s",
                ratio=None if system == "polybus" else rates["polybus"] / rate,
                target=None if target is None else Target(value=target, at_least=True),
                note=f"{rate * size / 1e6:,.0f} MB/s",
            )
        )
    return figures
