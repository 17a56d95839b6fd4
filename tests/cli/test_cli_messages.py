"""`polybus publish` and `polybus tail`, through the real command."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import COMMAND, ServedBus, environment, polybus, serve

from polybus.cli import publish, tail  # noqa: F401  these are what is tested


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBus]:
    topics = ("one", "lines", "files", "headers", "binary", "many", "live", "receipts", "stdin")
    with serve(tmp_path_factory.mktemp("data"), *topics, "typed") as served:
        yield served


def tail_json(
    bus: ServedBus, topic: str, count: int, scheme: str = "boson"
) -> list[dict[str, object]]:
    done = polybus(
        *("tail", topic, "--from", "earliest", "--count", str(count), "--json"),
        *("--url", bus.url(scheme)),
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("scheme", ["boson", "boson+properties", "goms"])
def test_a_published_message_can_be_tailed(bus: ServedBus, scheme: str) -> None:
    done = polybus("publish", "one", "hello", "--url", bus.url(scheme))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    done = polybus("tail", "one", "--from", "earliest", "--count", "1", "--url", bus.url(scheme))
    assert (done.returncode, done.stdout) == (0, b"hello\n")


def test_the_url_may_come_from_the_environment(bus: ServedBus) -> None:
    done = polybus("publish", "receipts", "x", "--receipt", POLYBUS_URL=bus.url())
    assert done.returncode == 0, done.stderr
    epoch, offset = done.stdout.decode().strip().split(":")
    assert int(epoch) > 0 and int(offset) >= 0


def test_a_receipt_is_printed_as_json_too(bus: ServedBus) -> None:
    done = polybus("publish", "receipts", "x", "--receipt", "--json", "--url", bus.url())
    printed = json.loads(done.stdout)
    assert (printed["topic"], printed["messages"]) == ("receipts", 1)
    assert ":" in printed["position"]


def test_standard_input_is_one_message_unless_lines_are_asked_for(bus: ServedBus) -> None:
    polybus("publish", "stdin", "--url", bus.url(), stdin=b"a\nb\n")
    polybus("publish", "stdin", "--lines", "--url", bus.url(), stdin=b"c\r\nd\n\ne")
    texts = [message["text"] for message in tail_json(bus, "stdin", 5)]
    assert texts == ["a\nb\n", "c", "d", "", "e"]


def test_a_file_can_be_published_many_times(bus: ServedBus, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(b"1\n2\n")
    done = polybus(
        *("publish", "files", "--file", str(file), "--lines", "--count", "2", "--json"),
        *("--url", bus.url()),
    )
    assert json.loads(done.stdout)["messages"] == 4
    assert [message["text"] for message in tail_json(bus, "files", 4)] == ["1", "2", "1", "2"]


def test_what_is_typed_need_not_be_text(bus: ServedBus) -> None:
    """The shell passes any bytes: they are published as they are."""
    data, header = os.fsdecode(b"\xff\xfe"), os.fsdecode(b"a=\xff")
    url = bus.url("boson+properties")
    done = polybus("publish", "typed", data, "--header", header, "--url", url)
    assert (done.returncode, done.stderr) == (0, b"")
    (message,) = tail_json(bus, "typed", 1, "boson+properties")
    assert message["base64"] == base64.b64encode(b"\xff\xfe").decode()
    assert message["headers"] == {"a": {"base64": base64.b64encode(b"\xff").decode()}}


def test_count_publishes_a_message_so_often(bus: ServedBus) -> None:
    done = polybus("publish", "many", "x", "--count", "2500", "--receipt", "--url", bus.url())
    assert done.stdout.strip().endswith(b":2499")


def test_headers_are_published_and_shown(bus: ServedBus) -> None:
    url = bus.url("goms")
    done = polybus("publish", "headers", "x", "--header", "lang=en", "--receipt", "--url", url)
    assert done.returncode == 0, done.stderr
    (message,) = tail_json(bus, "headers", 1, "boson+properties")
    assert message["headers"] == {"lang": {"text": "en"}}
    shown = polybus(
        *("tail", "headers", "--from", "earliest", "--count", "1", "--headers", "--url", url)
    )
    assert shown.stdout == b"[lang=en]\tx\n"


def test_what_a_stranger_sent_cannot_steer_the_terminal(bus: ServedBus) -> None:
    polybus("publish", "binary", "--url", bus.url(), stdin=b"\x1b[2J\nx")
    polybus("publish", "binary", "--url", bus.url(), stdin=b"\xff\x00")
    done = polybus("tail", "binary", "--from", "earliest", "--count", "2", "--url", bus.url())
    assert done.stdout == b"\\x1b[2J\\nx\nbase64:/wA=\n"
    assert tail_json(bus, "binary", 2)[1]["base64"] == "/wA="


def test_several_topics_are_told_apart(bus: ServedBus) -> None:
    done = polybus("publish", "live", "first", "--receipt", "--url", bus.url())
    start = done.stdout.decode().strip()
    done = polybus("tail", "live", "lines", "--from", start, "--count", "1", "--url", bus.url())
    assert done.stdout == b"live\tfirst\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_tail_prints_as_messages_come_and_ends_cleanly(
    bus: ServedBus, number: signal.Signals
) -> None:
    command = [*COMMAND, "tail", "live", "--from", "earliest", "--url", bus.url()]
    polybus("publish", "live", "here", "--receipt", "--url", bus.url())
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() != b""
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(20) == 0


def test_a_refused_message_is_one_line_and_exit_1(bus: ServedBus) -> None:
    for arguments in (["publish", "nowhere", "x"], ["tail", "nowhere"]):
        for scheme in ("boson", "boson+properties", "goms"):
            done = polybus(*arguments, "--url", bus.url(scheme))
            first, advice = done.stderr.decode().splitlines()
            assert done.returncode == 1
            assert first.startswith("polybus: topic.unknown: ")
            assert "topics create" in advice


@pytest.mark.parametrize(
    "arguments",
    [
        ["publish", "one", "x", "--lines"],
        ["publish", "one", "x", "--header", "nonsense"],
        ["publish", "one", "x", "--url", "smoke://signals"],
        ["publish", "one", "x", "--count", "0"],
        ["publish"],
        ["tail"],
        ["tail", "one", "--from", "the beginning"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_exit_2(bus: ServedBus, arguments: list[str]) -> None:
    done = polybus(*arguments, POLYBUS_URL=bus.url())
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr != b""


def test_no_bus_is_exit_1_with_what_to_do(tmp_path: Path) -> None:
    with serve(tmp_path) as gone:
        pass
    done = polybus("publish", "one", "x", "--url", gone.url())
    assert done.returncode == 1
    assert b"polybus: client.unreachable: " in done.stderr
    assert b"polybus serve" in done.stderr
