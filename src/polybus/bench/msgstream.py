"""msgstream sessions: memory, fan-out, long polls, and the time to a confirmed delivery.

The load generator opens the WebSockets and confirms every pack; this module opens the sessions and
the long polls. The fan-out is compared with a plain `websockets` server, which stores and confirms
nothing.
"""

import select
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import msgspec

from polybus.bench import BenchError
from polybus.bench.brokers import HOST, RunningBroker
from polybus.bench.measure import Bench, EntryOutcome, RunSample, for_this_machine
from polybus.bench.scenarios import BUS, Entry, Metric, Scenario, Workload, peer

TOPIC = "bench.0000"
IDLE_SESSIONS = 10_000
SESSION_KIB_MAX = 13
LISTENERS = 1_000
POLLS_MS_MAX = 60
CONFIRMED_RATE_PER_S = 1_000
FAN_OUT_WINDOW_BYTES = 128 << 10
# A broadcast accepts any amount at once and then sends it to one listener after the other.
PEER_WINDOW_BYTES = 16 << 10
POLL_DEADLINE_S = 30.0


def scenarios(*, idle: int = IDLE_SESSIONS, listeners: int = LISTENERS) -> tuple[Scenario, ...]:
    """What is measured; `--quick` has fewer sessions."""
    bus = Entry(broker="polybus", protocol="msgstream")
    fan_out = Workload(subscribers=listeners, window_bytes=FAN_OUT_WINDOW_BYTES)
    one_by_one = Workload(subscribers=listeners, window_bytes=1, one_per_write=True)
    websockets = replace(fan_out, window_bytes=PEER_WINDOW_BYTES)
    return (
        Scenario(
            "sessions-idle",
            f"{idle:,} idle WebSocket sessions",
            Workload(subscribers=idle),
            (bus,),
            Metric.MEMORY,
            limit=SESSION_KIB_MAX,
        ),
        Scenario(
            "fan-out",
            f"1 topic → {listeners:,} WebSocket sessions, log on, confirmed",
            fan_out,
            (bus, replace(peer("websockets", 20.0), load=websockets)),
        ),
        Scenario(
            "fan-out-single",
            "the same, each message after all have received the one before",
            one_by_one,
            (bus, peer("websockets", 1.0)),
        ),
        Scenario(
            "long-polls",
            f"{listeners:,} long polls woken by one publish: the last answer",
            Workload(subscribers=listeners),
            (BUS,),
            Metric.WAIT,
            limit=POLLS_MS_MAX,
        ),
        Scenario(
            "confirmed",
            f"publish to confirmed delivery, {CONFIRMED_RATE_PER_S:,} per second",
            Workload(rate_per_s=CONFIRMED_RATE_PER_S),
            (bus,),
            Metric.LATENCY,
        ),
    )


class SessionBench(Bench):
    """Opens the sessions that a run needs before it starts the generator."""

    def run(self, scenario: Scenario, outcome: EntryOutcome) -> RunSample:
        load = for_this_machine(outcome.entry.load or scenario.load)
        with self.server(outcome.broker, load) as (server, folder):
            if outcome.broker.protocol == "broadcast":
                return self.generate(server, scenario, outcome, load)
            before_kib = resident_kib(server.pid)
            keys = open_sessions(server.port, load.subscribers)
            if scenario.metric is Metric.WAIT:
                return {"last_ms": 1000 * wake_polls(server, keys)}
            file = folder / "keys"
            file.write_text("".join(f"{key}\n" for key in keys))
            sample = self.generate(server, scenario, outcome, load, "--keys", str(file))
            if scenario.metric is Metric.MEMORY:
                # The generator starts after the sessions were opened, but they count too.
                grown_kib = sample["after_kib"] - before_kib
                sample |= {
                    "before_kib": before_kib,
                    "connection_bytes": 1024 * grown_kib / load.subscribers,
                }
            return sample


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise BenchError(f"process {pid} is gone")


def open_sessions(port: int, count: int) -> list[str]:
    """Open sessions that follow the topic; return their keys. Raises BenchError."""
    body = msgspec.json.encode({"topics": [TOPIC]})
    keys: list[str] = []
    with _connections(port, 1) as (caller,):
        while len(keys) < count:
            caller.request("POST", "/v1/sessions", body)
            status, answer = _answer(caller)
            if status != 201:
                raise BenchError(f"a session was not opened: {status} {answer[:100]!r}")
            keys.append(msgspec.json.decode(answer)["sessionKey"])
    return keys


def wake_polls(server: RunningBroker, keys: Sequence[str]) -> float:
    """Seconds from one publish until all long polls are answered. Raises BenchError."""
    with (
        _connections(server.port, len(keys)) as callers,
        _connections(server.port, 1) as (publisher,),
    ):
        for caller, key in zip(callers, keys, strict=True):
            caller.request("GET", f"/msgstream?sessionKey={key}&transport=longpolling")
        _await_open_polls(publisher, len(keys))
        message = msgspec.json.encode("x" * 100)
        began_s = time.perf_counter()
        publisher.request("POST", f"/v1/topics/{TOPIC}/messages?receipt=memory", message)
        _await_answers(callers)
        took_s = time.perf_counter() - began_s
        expected = (200, b'{"1":[["%b",%b]]}' % (TOPIC.encode(), message))
        wrong = [answer for caller in callers if (answer := _answer(caller)) != expected]
        if wrong:
            raise BenchError(f"{len(wrong)} polls had a wrong answer: {wrong[0]!r:.100}")
    return took_s


@contextmanager
def _connections(port: int, count: int) -> Iterator[list[HTTPConnection]]:
    with ExitStack() as stack:
        callers = []
        for _ in range(count):
            caller = HTTPConnection(HOST, port, timeout=POLL_DEADLINE_S)
            callers.append(stack.enter_context(closing(caller)))
            caller.connect()
        yield callers


def _answer(caller: HTTPConnection) -> tuple[int, bytes]:
    response = caller.getresponse()
    return response.status, response.read()


def _await_open_polls(caller: HTTPConnection, count: int) -> None:
    """Wait until this many long polls are open at the bus."""
    deadline = time.monotonic() + POLL_DEADLINE_S
    wanted = b"\npolybus_polls %d\n" % count
    while True:
        caller.request("GET", "/metrics")
        if wanted in _answer(caller)[1]:
            return
        if time.monotonic() > deadline:
            raise BenchError(f"the bus did not open {count} long polls")
        time.sleep(0.02)


def _await_answers(callers: Sequence[HTTPConnection]) -> None:
    """Wait until every connection can be read; an answer is one small write of the bus."""
    pending = {caller.sock.fileno() for caller in callers}
    with select.epoll() as poller:
        for file in pending:
            poller.register(file, select.EPOLLIN)
        while pending:
            ready = poller.poll(POLL_DEADLINE_S, 256)
            if not ready:
                raise BenchError(f"{len(pending)} polls were not answered")
            for file, _ in ready:
                poller.unregister(file)
                pending.discard(file)
