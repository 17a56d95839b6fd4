"""`polybus serve` with a queue connector, and `publish` and `tail` on queue://."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_kit import COMMAND, environment, polybus

LIMIT_BYTES = 1 << 20


class Bridge(NamedTuple):
    boson: str
    queue: str

    @property
    def queue_address(self) -> tuple[str, int]:
        host, _, port = self.queue.removeprefix("queue://").rpartition(":")
        return host, int(port)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Bridge]:
    """A bus whose port was given by --port, which leaves the queue's as it is."""
    config = folder / "bus.json"
    connectors = [
        {"protocoll": "tcp", "ip": "127.0.0.1", "port": 55545},
        {"protocoll": "tcp", "ip": "127.0.0.1", "port": 0, "speaks": "queue", "topic": "news"},
    ]
    limits = {"message-bytes-max": LIMIT_BYTES}
    config.write_text(json.dumps({"connectors": connectors, "limits": limits}))
    serve = ["serve", "--config", str(config), "--data", str(folder / "data"), "--port", "0"]
    with subprocess.Popen(
        [*COMMAND, *serve], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
    ) as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline().decode()
            first, second = re.findall(r"tcp://(\S+)", ready)
            yield Bridge(f"boson://{first}", f"queue://{second}")
        finally:
            process.terminate()
            assert process.wait(20) == 0


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    with serving(tmp_path_factory.mktemp("bus")) as bridge:
        yield bridge


def test_what_is_published_on_a_queue_is_in_the_topic_of_its_connector(tmp_path: Path) -> None:
    with serving(tmp_path) as bus:
        done = polybus("publish", "news", "--lines", "--url", bus.queue, stdin=b"one\n\ntwo\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        done = polybus("tail", "news", "--from", "earliest", "--count", "3", "--url", bus.boson)
    assert (done.returncode, done.stdout) == (0, b"one\n\ntwo\n")


def test_tail_prints_what_comes_on_a_queue(bus: Bridge) -> None:
    command = [*COMMAND, "tail", "news", "--count", "1", "--json", "--url", bus.queue]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as tail:
        assert tail.stdout is not None
        # Nobody can be asked whether tail listens already, so it is sent again until it does.
        while tail.poll() is None:
            polybus("publish", "news", "hello", "--url", bus.boson)
        printed = json.loads(tail.stdout.read())
    assert tail.returncode == 0
    assert printed == {"topic": "news", "position": None, "gap": False, "text": "hello"}


def test_a_program_with_a_socket_can_take_part(bus: Bridge) -> None:
    with socket.create_connection(bus.queue_address, timeout=20) as program:
        program.sendall(b"\0\0\0\5hello")
        polybus("publish", "news", "to all", "--receipt", "--url", bus.boson)
        received = b""
        while len(received) < 10:
            received += program.recv(10 - len(received))
        # Its own message did not come back before it.
        assert received == b"\0\0\0\6to all"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["publish", "news", "x", "--receipt"], b"client.unsupported"),
        (["publish", "news", "x", "--header", "a=b"], b"headers.invalid"),
        (["tail", "news", "--from", "earliest"], b"client.unsupported"),
        (["tail", "news", "sport"], b"client.unsupported"),
        (["tail", "news", "--url", "queue://127.0.0.1"], b"client.url"),
    ],
)
def test_what_a_queue_cannot_do_is_exit_2_with_its_reason(
    bus: Bridge, arguments: list[str], code: bytes
) -> None:
    done = polybus(*arguments, POLYBUS_URL=bus.queue)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"polybus: " + code + b": ")


def test_a_connector_without_its_topic_is_exit_2_and_names_the_key(tmp_path: Path) -> None:
    config = tmp_path / "bus.json"
    config.write_text('{"connectors": [{"protocoll": "tcp", "port": 0, "speaks": "queue"}]}')
    for verb in (["serve"], ["config", "check"]):
        done = polybus(*verb, "--config", str(config), cwd=tmp_path)
        assert done.returncode == 2
        (line,) = [one for one in done.stderr.splitlines() if one.startswith(b"polybus: ")]
        assert b"connectors[0].topic" in line


@pytest.mark.parametrize("before", [b"", b"fine\n"])
def test_a_message_that_the_bus_refuses_is_exit_1(bus: Bridge, before: bytes) -> None:
    lines = before + b"x" * (LIMIT_BYTES + 1)
    done = polybus("publish", "news", "--lines", "--url", bus.queue, stdin=lines)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"polybus: client.disconnected: queue://127.0.0.1:")
    assert b"the bus refused a message" in done.stderr


def test_a_queue_without_its_topic_is_exit_1(tmp_path: Path) -> None:
    with serving(tmp_path) as bus:
        removed = polybus("topics", "delete", "news", "--yes", "--data", str(tmp_path / "data"))
        assert removed.returncode == 0, removed.stderr
        for _ in range(3):
            done = polybus("publish", "news", "hello", "--url", bus.queue)
            assert (done.returncode, done.stdout) == (1, b"")
            # The bus may be too quick for the connect to succeed.
            assert re.match(rb"polybus: client\.(disconnected|unreachable): queue:", done.stderr)
