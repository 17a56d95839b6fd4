"""The brokers: how each is started on a free port with its data in a given folder, and ended.

Each is configured not to drop messages: the output limits of the peers are lifted, and the bus
makes publishers wait. The generator limits the messages in flight, for all in the same way.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from polybus.bench import BenchError, logins
from polybus.bench.scenarios import DISK

# A bus that declares a thousand topics syncs a few files for each.
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
HOST = "127.0.0.1"
BROADCAST = "polybus.bench.broadcast_server"
# Debian installs servers in folders that are not on the PATH of a user.
SERVER_FOLDERS = ("/usr/sbin", "/usr/local/sbin")


@dataclass(frozen=True, slots=True)
class BenchBroker:
    """One way of running a broker.

    Attributes:
        protocol: what the generator speaks to it unless a scenario names another.
        arguments: its command line. {port}, {folder} and {config} are replaced.
        config: the content of its config file. {port}, {folder} and "{topics}" are replaced.
        package: the Debian package; None for what is part of Polybus.
        needs: a program that its own program starts.
        window_bytes: how many bytes may be published and not yet delivered.
        logs_in: whether the topics belong to an account, to which the generator logs in.
    """

    title: str
    protocol: str
    arguments: str
    config: str = ""
    program: str = sys.executable
    package: str | None = None
    window_bytes: int = 16 << 20
    logs_in: bool = False
    needs: str | None = None

    def find(self) -> str | None:
        """The path of its program, or None if it is not installed."""
        if self.needs is not None and find_server(self.needs) is None:
            return None
        return find_server(self.program)


def find_server(program: str) -> str | None:
    """The path of a program, or None if it is not installed."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *SERVER_FOLDERS))
    return shutil.which(program, path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningBroker:
    """A broker that accepts connections."""

    pid: int
    port: int
    subscribe_port: int
    token: str = ""


@contextmanager
def running(
    broker: BenchBroker, folder: Path, topics: list[str], *, visitors: int = 0
) -> Iterator[RunningBroker]:
    """Start a broker, and end it with the block. Raises BenchError if it does not start.

    `visitors`: how many accounts it has for others to log in to.
    """
    program = broker.find()
    if program is None:
        raise BenchError(f"not installed: apt-get install {broker.package}")
    with socket.create_server((HOST, 0)) as probe:
        port = int(probe.getsockname()[1])
    output, config = folder / "output", folder / "config.json"
    values = {"{port}": str(port), "{folder}": str(folder), "{config}": str(config)}
    values['"{topics}"'] = msgspec.json.encode(topics).decode()

    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace(name, value)
        return text

    config.write_text(filled(broker.config))
    token = logins.prepare(folder / "data", topics, visitors) if broker.logs_in else ""
    command = [program, *map(filled, shlex.split(broker.arguments))]
    with output.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield replace(_await_ready(process, port, output), token=token)
    finally:
        end(process, STOP_TIMEOUT_S)


def end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """End a process; kill it after the timeout."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_ready(process: subprocess.Popen[bytes], port: int, output: Path) -> RunningBroker:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        # Some choose two ports and print them; every other broker has the given port.
        said = re.search(r"^ready (\d+) (\d+)\n", output.read_text(errors="replace"), re.M)
        if said:
            return RunningBroker(pid=process.pid, port=int(said[1]), subscribe_port=int(said[2]))
        try:
            socket.create_connection((HOST, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.02)
        else:
            return RunningBroker(pid=process.pid, port=port, subscribe_port=port)
    last = output.read_text(errors="replace").strip().rpartition("\n")[2]
    raise BenchError(f"did not start: {last[:200] or 'it printed nothing'}")


def bus(title: str, **settings: Any) -> BenchBroker:
    """A bus with these settings, with its data in the subfolder `data`."""
    connectors = [{"protocol": "tcp", "ip": HOST, "port": 0}]
    config = {"topics": "{topics}", "connectors": connectors, **settings}
    arguments = "-m polybus.cli serve --config {config} --data {folder}/data --port {port}"
    return BenchBroker(title, "boson", arguments, msgspec.json.encode(config).decode())


def all_brokers(generator: Path) -> dict[str, BenchBroker]:
    """Every broker by its name in scenarios; the relay is a mode of the generator."""

    def own(durability: str) -> BenchBroker:
        settings = {"durability": durability, "slow-subscriber": "wait"}
        return bus(f"polybus ({durability})", **settings)

    def server(name: str, protocol: str, arguments: str, config: str = "") -> BenchBroker:
        return BenchBroker(name, protocol, arguments, config, program=name, package=name)

    jetstream = f'listen: {HOST}:{{port}}\njetstream {{ store_dir: "{{folder}}/jetstream" }}\n'
    redis = (
        f"--bind {HOST} --port {{port}} --dir {{folder}} --save '' --appendonly no "
        "--maxclients 20000 --client-output-buffer-limit 'pubsub 0 0 0'"
    )
    mosquitto = (
        f"listener {{port}} {HOST}\nallow_anonymous true\npersistence false\n"
        "set_tcp_nodelay true\nmax_queued_messages 0\nmax_queued_bytes 0\n"
    )
    nats = server("nats-server", "nats", f"-a {HOST} -p {{port}}")
    with_store = server("nats-server", "jetstream", "-c {config}", jetstream)
    # It takes seconds to deliver more than 2 MiB.
    slow = replace(server("mosquitto", "mqtt", "-c {config}", mosquitto), window_bytes=2 << 20)
    return {
        "polybus": own("interval"),
        "polybus-login": replace(own("interval"), title="polybus, logged in", logs_in=True),
        "polybus-memory": own("memory"),
        "polybus-fsync": own("fsync"),
        "nats": nats,
        "jetstream": replace(with_store, title="nats-server JetStream"),
        "redis": server("redis-server", "resp", redis),
        "mosquitto": slow,
        "websockets": BenchBroker("websockets broadcast", "broadcast", f"-m {BROADCAST} {{port}}"),
        DISK: BenchBroker("the disk alone", "", ""),
        "relay": BenchBroker("bare relay", "boson", "relay", program=str(generator)),
    }
