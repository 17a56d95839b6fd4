"""The brokers: how each is started on a free port with its data in a given folder, and ended.

Each is configured not to drop: peers' output limits are lifted, the bus makes publishers wait. The
generator keeps what is under way bounded, the same for all.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from polybus.bench.errors import BenchError

# A bus that declares a thousand topics syncs a few files for each, on whatever disk this is.
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
HOST = "127.0.0.1"
# Debian puts servers where a user's PATH does not look.
SERVER_FOLDERS = ("/usr/sbin", "/usr/local/sbin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a broker runs: its own folder, its port, the topics it will be asked for."""

    folder: Path
    port: int
    topics: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """One way of running a broker."""

    title: str
    protocol: str
    """What the generator speaks to it unless a scenario says otherwise."""
    program: str
    package: str | None = None
    """The Debian package; None for what comes with Polybus."""
    command: Callable[[str, Place], list[str]]
    window_bytes: int = 16 << 20
    """What may be published but not delivered; slow brokers take long to work it off."""

    def find(self) -> str | None:
        """The path of its program, or None if it is not installed."""
        path = os.pathsep.join((os.environ.get("PATH", os.defpath), *SERVER_FOLDERS))
        return shutil.which(self.program, path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A broker that accepts connections."""

    pid: int
    port: int
    subscribe_port: int


@contextmanager
def running(broker: Broker, folder: Path, topics: list[str]) -> Iterator[Running]:
    """Start a broker and end it afterwards, whatever happens in between.

    Raises:
        BenchError: it is not installed, or did not come up; the text has what it printed last.
    """
    program = broker.find()
    if program is None:
        raise BenchError(f"not installed: apt-get install {broker.package}")
    place = Place(folder=folder, port=_free_port(), topics=topics)
    output = folder / "output"
    with output.open("wb") as log:
        process = subprocess.Popen(
            broker.command(program, place), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield _await_ready(process, place.port, output)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def _await_ready(process: subprocess.Popen[bytes], port: int, output: Path) -> Running:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        # The relay takes any two ports and says which; everyone else has the one it was given.
        said = re.match(r"ready (\d+) (\d+)\n", output.read_text(errors="replace"))
        if said:
            return Running(pid=process.pid, port=int(said[1]), subscribe_port=int(said[2]))
        try:
            socket.create_connection((HOST, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.02)
        else:
            return Running(pid=process.pid, port=port, subscribe_port=port)
    last = output.read_text(errors="replace").strip().rpartition("\n")[2]
    raise BenchError(f"did not come up: {last[:200] or 'it printed nothing'}")


def _bus(durability: str) -> Broker:
    def command(program: str, place: Place) -> list[str]:
        config = {
            "durability": durability,
            "slow-subscriber": "wait",
            "topics": place.topics,
            "connectors": [{"protocol": "tcp", "ip": HOST, "port": place.port}],
        }
        path = place.folder / "bus.json"
        path.write_bytes(msgspec.json.encode(config))
        start = "from polybus.cli import main; main()"
        data = str(place.folder / "data")
        return [program, "-c", start, "serve", "--config", str(path), "--data", data]

    title = f"polybus ({durability})"
    return Broker(title=title, protocol="boson", program=sys.executable, command=command)


def _nats(program: str, place: Place) -> list[str]:
    return [program, "-a", HOST, "-p", str(place.port)]


def _jetstream(program: str, place: Place) -> list[str]:
    path = place.folder / "nats.conf"
    store = msgspec.json.encode(str(place.folder / "jetstream")).decode()
    path.write_text(f"listen: {HOST}:{place.port}\njetstream {{ store_dir: {store} }}\n")
    return [program, "-c", str(path)]


def _redis(program: str, place: Place) -> list[str]:
    options = ["--save", "", "--appendonly", "no", "--maxclients", "20000"]
    options += ["--client-output-buffer-limit", "pubsub 0 0 0", "--dir", str(place.folder)]
    return [program, "--bind", HOST, "--port", str(place.port), *options]


def _mosquitto(program: str, place: Place) -> list[str]:
    path = place.folder / "mosquitto.conf"
    path.write_text(
        f"listener {place.port} {HOST}\nallow_anonymous true\npersistence false\n"
        "set_tcp_nodelay true\nmax_queued_messages 0\nmax_queued_bytes 0\n"
    )
    return [program, "-c", str(path)]


def _websockets(program: str, place: Place) -> list[str]:
    return [program, "-m", "polybus.bench.broadcast_server", str(place.port)]


def all_brokers(generator: Path) -> dict[str, Broker]:
    """Every broker by the name scenarios call it; the relay is a mode of the generator."""
    return {
        "polybus": _bus("interval"),
        "polybus-memory": _bus("memory"),
        "polybus-fsync": _bus("fsync"),
        "nats": Broker(
            title="nats-server",
            protocol="nats",
            program="nats-server",
            package="nats-server",
            command=_nats,
        ),
        "jetstream": Broker(
            title="nats-server JetStream",
            protocol="jetstream",
            program="nats-server",
            package="nats-server",
            command=_jetstream,
        ),
        "redis": Broker(
            title="redis-server",
            protocol="resp",
            program="redis-server",
            package="redis-server",
            command=_redis,
        ),
        "mosquitto": Broker(
            title="mosquitto",
            protocol="mqtt",
            program="mosquitto",
            package="mosquitto",
            command=_mosquitto,
            window_bytes=2 << 20,
        ),
        "websockets": Broker(
            title="websockets broadcast",
            protocol="broadcast",
            program=sys.executable,
            command=_websockets,
        ),
        "relay": Broker(
            title="bare relay",
            protocol="boson",
            program=str(generator),
            command=lambda program, place: [program, "relay"],
        ),
    }
