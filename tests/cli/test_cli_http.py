"""`publish` and `tail` on http:// and ws://, and `sessions`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import ServedBus, polybus, serve

from polybus.cli import sessions  # noqa: F401  this is what is tested


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBus]:
    with serve(tmp_path_factory.mktemp("bus"), "news", "ws", "http") as served:
        yield served


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_what_is_published_is_printed(bus: ServedBus, scheme: str) -> None:
    url = bus.url(scheme)
    done = polybus("publish", scheme, "--lines", "--url", url, stdin=b"one\ntwo\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    done = polybus("publish", scheme, "three", "--receipt", "--header", "a=b", "--url", url)
    assert done.returncode == 0 and done.stdout.endswith(b":2\n")
    done = polybus("tail", scheme, "--from", "earliest", "--count", "3", "--url", url)
    assert (done.returncode, done.stdout) == (0, b"one\ntwo\nthree\n")


def test_a_refusal_is_exit_1(bus: ServedBus) -> None:
    for extra in ([], ["--receipt"]):
        done = polybus("publish", "nowhere", "x", *extra, "--url", bus.url("http"))
        assert done.returncode == 1
        assert done.stderr.startswith(b"polybus: topic.unknown: ")


def test_a_session_is_made_filled_and_ended(bus: ServedBus) -> None:
    url = bus.url("http")
    done = polybus("sessions", "create", "news", "--ttl", "60", "--json", POLYBUS_URL=url)
    assert done.returncode == 0
    key = json.loads(done.stdout)["sessionKey"]
    plain = polybus("sessions", "create", POLYBUS_URL=url).stdout.decode().strip()
    assert len(key) >= 22 and len(plain) >= 22
    done = polybus("sessions", "push", key, '[["a", 1], ["b"]]', "--json", POLYBUS_URL=url)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"events": 2})
    done = polybus("sessions", "broadcast", '[["c"]]', "--json", POLYBUS_URL=url)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"sessions": 2})
    assert polybus("sessions", "delete", plain, POLYBUS_URL=url).stdout == b"deleted\n"
    done = polybus("sessions", "push", plain, '[["a"]]', POLYBUS_URL=url)
    assert done.returncode == 1
    assert done.stderr.startswith(b"polybus: session.unknown: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["push", "key", "{"], b"JSON"),
        (["create", "--from", "yesterday"], b"position.invalid"),
        (["create", "--url", "boson://127.0.0.1:{port}"], b"client.unsupported"),
    ],
)
def test_wrong_usage_is_exit_2(bus: ServedBus, arguments: list[str], said: bytes) -> None:
    words = [word.replace("{port}", str(bus.port)) for word in arguments]
    done = polybus("sessions", *words, POLYBUS_URL=bus.url("http"))
    assert done.returncode == 2
    assert said in done.stderr


def test_no_bus_is_exit_1(tmp_path: Path) -> None:
    done = polybus("sessions", "create", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith(b"polybus: client.unreachable: ")
