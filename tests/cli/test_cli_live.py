"""Verbs that look at a running bus: what they show, and their exit codes."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import COMMAND, ServedBus, environment, polybus, serve
from click.testing import CliRunner

from polybus.cli.common.exits import at_start
from polybus.cli.status import status
from polybus.client.http.blocking import request, request_json
from polybus.error_codes import CODES
from polybus.log.topics import storage_error


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBus]:
    with serve(tmp_path_factory.mktemp("live") / "data", "news", "sport") as running:
        for value in ('{"price": 12, "name": "bolt"}', "plain text", '{"price": 3}'):
            sent = polybus("publish", "news", value, "--receipt", "--url", running.url())
            assert sent.returncode == 0, sent.stderr
        yield running


def test_the_status_of_a_running_bus_is_a_few_lines(bus: ServedBus) -> None:
    done = polybus("status", "--data", str(bus.data))
    text = done.stdout.decode()
    assert done.returncode == 0, text + done.stderr.decode()
    assert f"bus: runs as process {bus.process.pid} for" in text
    assert "topics: 2, 3 messages held" in text
    assert "health: ok" in text


def test_the_status_of_a_stopped_bus_is_a_problem(tmp_path: Path) -> None:
    done = polybus("status", "--json", "--data", str(tmp_path))
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert not found["running"] and "polybus serve" in found["problems"][0]


def test_a_disk_that_is_almost_full_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil._ntuple_diskusage(1000, 990, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    result = CliRunner().invoke(status, ["--data", str(tmp_path)])
    assert result.exit_code == 1 and "the disk is almost full" in result.output


def tail(bus: ServedBus, *options: str, url: str = "") -> tuple[str, str]:
    done = polybus("tail", "--from", "earliest", *options, "--url", url or bus.url())
    assert done.returncode == 0, done.stderr
    return done.stdout.decode(), done.stderr.decode()


def test_tail_takes_every_topic_by_a_star_and_a_bus_without_a_scheme(bus: ServedBus) -> None:
    out, _ = tail(bus, "*", "--count", "1", url=f"127.0.0.1:{bus.port}")
    assert out == 'news\t{"price": 12, "name": "bolt"}\n'
    refused = polybus("tail", "x*", "--url", bus.url())
    assert refused.returncode == 1 and b"no topic matches 'x*'" in refused.stderr


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("raw", "plain text\n"),
        ("hex", " 10 bytes\n00000000  70 6c 61 69 6e 20 74 65 78 74"),
        ("json", '"text":"plain text"}\n'),
    ],
)
def test_tail_prints_a_message_in_the_form_that_is_asked_for(
    bus: ServedBus, form: str, shown: str
) -> None:
    out, _ = tail(bus, "news", "--where", "text ~ ^plain", "--format", form, "--count", "1")
    assert shown in out


def test_an_unknown_topic_names_near_ones(bus: ServedBus) -> None:
    for command in (["tail", "newz", "--url", bus.url()], ["topics", "describe", "nwes"]):
        data = ["--data", str(bus.data)] if command[0] == "topics" else []
        done = polybus(*command, *data)
        assert done.returncode == 1 and b"did you mean news?" in done.stderr


@pytest.mark.parametrize("scheme", ["boson", "boson+properties", "goms", "http", "ws"])
def test_a_start_in_an_epoch_that_the_topic_never_had_is_told(bus: ServedBus, scheme: str) -> None:
    epoch = request_json(bus.url("http"), "GET", "/v1/topics/news")["epoch"]
    _, said = tail(bus, "news", "--from", "123:0", "--count", "2", url=bus.url(scheme))
    assert said.startswith(f"polybus: news has no epoch 123 (now {epoch}): it was deleted and")
    assert said.count("\n") == 1
    _, said = tail(bus, "news", "--from", f"{epoch}:0", "--count", "2", url=bus.url(scheme))
    assert said == ""


def test_a_port_that_is_taken_says_by_whom_and_what_to_do(bus: ServedBus, tmp_path: Path) -> None:
    done = polybus("serve", "--port", str(bus.port), "--data", str(tmp_path))
    text = done.stderr.decode()
    assert done.returncode == 2 and len(text.splitlines()) == 1
    assert f"in use by process {bus.process.pid}" in text and "--port" in text


def test_a_data_folder_that_cannot_be_used_is_not_tried_again() -> None:
    done = polybus("serve", "--port", "0", "--data", "/proc/nowhere")
    assert done.returncode == 1
    assert b"data.failed" in done.stderr and b"then start again" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "data.full"), (errno.EACCES, "log.denied"), (errno.EROFS, "log.denied")],
)
def test_a_start_names_a_full_disk_and_a_missing_right(number: int, code: str) -> None:
    error = at_start(storage_error(OSError(number, "it failed"), "the folder"))
    advice = CODES[error.code].advice
    assert error.code == code and "--data" in advice and "continues" not in advice


def test_topics_are_listed_with_sizes_rates_and_ages(bus: ServedBus) -> None:
    news = ""
    # The bus looks at its counters each second.
    while "ago" not in news:
        done = polybus("topics", "list", "--data", str(bus.data))
        heading, news, sport = done.stdout.decode().splitlines()
    assert heading.startswith("topic") and heading.endswith("last message  subscribers  lag")
    assert news.split()[:4] == ["news", "3", "51", "B"]
    assert " s " in news
    assert not any(len(word) == 13 and word.isdigit() for word in (news + sport).split())


def test_metrics_tell_of_the_process_its_disk_and_its_times(bus: ServedBus) -> None:
    def asked() -> dict[str, float]:
        lines = request(bus.url("http"), "GET", "/metrics").decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    replayed = 'polybus_messages_out_total{protocol="boson-frames",topic="news"}'
    before = asked()
    tail(bus, "news", "--count", "3")
    after = asked()
    assert after[replayed] == before.get(replayed, 0) + 3
    assert after["process_cpu_seconds_total"] > 0
    assert after["process_resident_memory_bytes"] > 1 << 20
    assert after["polybus_disk_free_bytes"] > 0 and after["polybus_journal_bytes"] > 0
    assert after['polybus_topic_history_bytes{topic="news"}'] == 0
    assert after['polybus_topic_stored_bytes{topic="news"}'] == 51
    assert any(name.startswith("polybus_build_info{version=") for name in after)
    for name in ("polybus_fsync_duration_seconds", "polybus_durable_latency_seconds"):
        assert after[f'{name}_bucket{{le="+Inf"}}'] == after[f"{name}_count"] >= 3


def test_the_lines_of_the_bus_are_json_if_that_is_asked_for(tmp_path: Path) -> None:
    settings = {"POLYBUS_LOGGING__FORMAT": "json", "POLYBUS_LOGGING__LEVEL": "info"}
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", "--data", str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**settings),
    ) as bus:
        assert bus.stdout is not None and b"ready" in bus.stdout.readline()
        bus.send_signal(signal.SIGHUP)
        assert bus.stderr is not None
        line = json.loads(bus.stderr.readline())
        bus.terminate()
        assert bus.wait(20) == 0
    assert line["level"] == "info" and line["logger"] == "polybus.server"
    assert line["message"] == "the settings were reloaded" and line["time"].endswith("Z")


def test_the_text_of_a_peer_is_one_line_of_the_log_without_control_characters(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", "--data", str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as bus:
        assert bus.stdout is not None and bus.stderr is not None
        address = bus.stdout.readline().split()[2].decode()
        forged = "x\n2026-11-17 12:30:00,104 ERROR polybus: gone\x1b[2J\u202e"
        asked = json.dumps({"messagetype": "register", "topics": [forged]})
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as peer:
            peer.sendall(asked.encode())
            assert b"001001" in peer.recv(4096)
        bus.terminate()
        lines = bus.stderr.read().decode().splitlines()
    assert [line for line in lines if "gone" in line] == lines[:1]
    assert lines[0].endswith(r"x\n2026-11-17 12:30:00,104 error polybus: gone\x1b[2j\u202e")
