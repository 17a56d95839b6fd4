"""`polybus cluster`: a whole cluster on this machine, to try out failures of its parts.

The brokers are a real Kafka, the nodes are `polybus serve` processes with `log = "kafka://…"`. This
process only starts them, reports when one has ended, and ends all of them when it exits.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import click

from polybus.cli.serve import DEMO_TOPIC
from polybus.client import connect
from polybus.errors import PolybusError, StorageError
from polybus.testing.kafka import KafkaBrokers

READY = "polybus ready: "
STOP_TIMEOUT_S = 15.0
LOOK_S = 0.5
DEMO_S = 0.5


@click.group(epilog="Example: polybus cluster up --brokers 3 --nodes 3 --data /tmp/cluster")
def cluster() -> None:
    """Run a Kafka cluster and nodes over it on this machine."""


@cluster.command(
    epilog="""\b
Example:
  polybus cluster up --data /tmp/cluster --demo
  polybus cluster up --brokers 3 --nodes 3 --data /tmp/cluster --topic orders
"""
)
@click.option("--brokers", type=click.IntRange(1, 9), default=3, show_default=True)
@click.option("--nodes", type=click.IntRange(1, 9), default=3, show_default=True)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="The folder of all brokers and nodes; a later run continues with it.",
)
@click.option("--topic", "topics", multiple=True, help="Create this topic if it is missing.")
@click.option(
    "--demo",
    is_flag=True,
    help="Publish to the topic demo continuously, and print commands to try.",
)
def up(brokers: int, nodes: int, data: Path, topics: tuple[str, ...], demo: bool) -> None:
    """Start brokers and nodes; end all of them at SIGTERM or Ctrl-C.

    Prints a line for each node when it accepts connections, then what can be killed.
    """
    stop = threading.Event()
    for asked in (signal.SIGTERM, signal.SIGINT):
        signal.signal(asked, lambda *_: stop.set())
    with ExitStack() as stack:
        kafka = KafkaBrokers(data.resolve() / "kafka", count=brokers)
        stack.callback(kafka.stop)
        kafka.start()
        for number in range(1, brokers + 1):
            click.echo(
                f"broker {number} ready: {kafka.addresses[number - 1]} {_pid(kafka, number)}"
            )
        running = {}
        addresses = []
        for number in range(1, nodes + 1):
            if stop.is_set():
                return
            node = NodeProcess(number, data.resolve(), kafka.url, brokers)
            stack.callback(node.stop)
            address = node.start((*topics, DEMO_TOPIC) if demo else topics)
            click.echo(f"node {number} ready: {address} pid={node.pid}")
            running[f"node {number}"] = node
            addresses.append(address.removeprefix("tcp://"))
        if demo:
            url = f"boson://{','.join(addresses)}"
            stack.enter_context(DemoPublisher(url))
            click.echo(_first_steps(url, kafka, running))
        click.echo("kill -9 any of these pids: clients continue with the others; Ctrl-C ends all")
        _watch(stop, kafka, running)


def _first_steps(url: str, kafka: KafkaBrokers, running: dict[str, "NodeProcess"]) -> str:
    program = "polybus"
    if shutil.which(program) is None:
        program = os.path.relpath(Path(sys.executable).with_name(program))
    return f"""
A message is published to {DEMO_TOPIC} twice a second. Try, in another terminal:

  {program} tail {DEMO_TOPIC} --url {url}
  kill -9 {running["node 1"].pid}    # node 1, which tail uses: it continues at another node
  kill -9 {kafka.pid(1)}    # broker 1: messages may wait about 9 s, and none is lost
"""


class DemoPublisher:
    """Publishes numbers for as long as the context lasts, at any node that answers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="polybus-demo")

    def __enter__(self) -> Self:
        self._task = self._loop.create_task(self._publish())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    async def _publish(self) -> None:
        async with connect(self._url) as client:
            for number in itertools.count(1):
                # While no node answers, or brokers are missing.
                with contextlib.suppress(PolybusError):
                    await client.publish(DEMO_TOPIC, f"message {number}", receipt=True, retry=True)
                await asyncio.sleep(DEMO_S)


def _pid(kafka: KafkaBrokers, number: int) -> str:
    return f"pid={kafka.pid(number)}"


def _watch(stop: threading.Event, kafka: KafkaBrokers, running: dict[str, "NodeProcess"]) -> None:
    """Wait for the end, and report processes that end before."""
    ended: set[str] = set()
    while not stop.wait(LOOK_S):
        gone = {name for name, node in running.items() if not node.is_running()}
        gone |= {f"broker {one}" for one in range(1, kafka.count + 1) if not kafka.is_running(one)}
        for name in sorted(gone - ended):
            click.echo(f"{name} has ended")
        ended |= gone


class NodeProcess:
    """One node of the cluster, in a separate process."""

    def __init__(self, number: int, data: Path, log: str, brokers: int) -> None:
        self._number = number
        self._data = data / f"node-{number}"
        self._settings = {
            "POLYBUS_LOG": log,
            "POLYBUS_CLUSTER__REPLICAS": str(min(3, brokers)),
            "POLYBUS_CLUSTER__INSYNC_MIN": str(min(2, brokers)),
        }
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, topics: tuple[str, ...]) -> str:
        """Return its TCP address when it accepts connections.

        Raises StorageError `cluster.failed`.
        """
        wanted = [word for topic in topics for word in ("--topic", topic)]
        where = ["--data", str(self._data), "--port", "0", "--stop-with-stdin"]
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "polybus.cli", "serve", *where, *wanted],
            env=os.environ | self._settings,
            # It ends with this process, however that ends.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(READY):
                return next(one for one in line.split() if one.startswith("tcp://"))
        code = process.wait()
        raise StorageError("cluster.failed", f"node {self._number} ended with {code}; see above")

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
