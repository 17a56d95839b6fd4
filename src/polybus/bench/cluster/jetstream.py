"""A NATS JetStream cluster of three servers on this machine; a process that ends all of them.

`python -m polybus.bench.cluster.jetstream FOLDER` prints `ready PORT PORT` when they have a leader.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from polybus.bench.brokers import HOST, START_TIMEOUT_S, BenchBroker, end, find_server

SERVERS = 3
POLL_S = 0.1
PROGRAM = "nats-server"
CONFIG = """\
listen: {host}:{port}
http: {host}:{http}
server_name: n{number}
jetstream {{ store_dir: "{folder}/n{number}" }}
cluster {{
  name: bench
  listen: {host}:{route}
  routes: [{routes}]
}}
"""
BROKER = BenchBroker(
    "nats-server JetStream, three replicas",
    "jetstream",
    "-m polybus.bench.cluster.jetstream {folder}",
    package=PROGRAM,
    needs=PROGRAM,
)


def main(folder: Path) -> None:
    """Run the servers until SIGTERM."""
    program = find_server(PROGRAM)
    assert program is not None
    ports = _free_ports(3 * SERVERS)
    clients, https, routes = ports[:SERVERS], ports[SERVERS : 2 * SERVERS], ports[2 * SERVERS :]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    processes = []
    try:
        for number in range(SERVERS):
            config = folder / f"n{number}.conf"
            config.write_text(
                CONFIG.format(
                    host=HOST,
                    port=clients[number],
                    http=https[number],
                    number=number,
                    folder=folder,
                    route=routes[number],
                    routes=", ".join(f"nats-route://{HOST}:{one}" for one in routes),
                )
            )
            with (folder / f"n{number}.log").open("wb") as log:
                command = [program, "-c", str(config)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(map(_is_healthy, https)):
            if time.monotonic() > deadline or stop.wait(POLL_S):
                raise SystemExit("the JetStream servers have no leader")
        print(f"ready {clients[0]} {clients[0]}", flush=True)  # noqa: T201
        stop.wait()
    finally:
        for process in processes:
            end(process, 5.0)


def _is_healthy(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{port}/healthz"):
        return True
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in sockets]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
