"""SIGTERM, restart, and a config that is wrong: through the real command."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sim_kit import (
    FramesPublisher,
    GomsPublisher,
    PropertiesPublisher,
    Publisher,
    check,
    served,
    stored,
)

from polybus.testing import ScriptedPeer

TOPIC_OPTIONS = ("--topic", "red", "--topic", "blue")


@pytest.mark.slow
async def test_sigterm_under_load_drains_and_exits_with_zero_in_time(tmp_path: Path) -> None:
    publishers: list[Publisher] = [
        FramesPublisher("frames"),
        PropertiesPublisher("properties"),
        GomsPublisher("goms"),
    ]
    for _ in range(3):
        async with served(tmp_path, *TOPIC_OPTIONS) as bus:
            load = [asyncio.create_task(one.run(bus.port)) for one in publishers]
            for one in publishers:
                await asyncio.wait_for(one.first_receipt.wait(), 20)
            async with asyncio.timeout(12):
                assert await bus.terminate() == 0
            await asyncio.gather(*load)
    check(publishers, stored(tmp_path))


@pytest.mark.slow
async def test_what_was_read_before_sigterm_gets_its_receipt(tmp_path: Path) -> None:
    """A subscriber gets what was published, a publisher its receipts, and both then the end."""
    async with served(tmp_path, *TOPIC_OPTIONS) as bus:
        async with ScriptedPeer(bus.port) as reader, ScriptedPeer(bus.port) as writer:
            await reader.send_frame("$subscribe", b"red tell=position")
            await reader.read_frame()
            for number in range(100):
                await writer.send_frame(f"red?receipt={number}", b"x" * 1000)
            # The first receipt tells that all were read: they came in one piece.
            first = await writer.read_frame()
            assert first[0] == "$receipt"
            stopping = asyncio.create_task(bus.terminate())
            said = await writer.read_to_end()
            got = await reader.read_to_end()
            assert await stopping == 0
    receipts = 1 + said.count(b"$receipt")
    assert got.count(b"x" * 1000) >= receipts
    assert len(stored(tmp_path)["red"]) >= receipts == 100


@pytest.mark.slow
async def test_a_restart_goes_on_where_the_bus_was(tmp_path: Path) -> None:
    """Offsets, epochs and topics made at run time are as before."""
    command = [sys.executable, "-m", "polybus.cli", "topics", "create", "green"]
    async with served(tmp_path, *TOPIC_OPTIONS) as bus:
        made = await asyncio.create_subprocess_exec(
            *command, "--data", str(tmp_path), stdout=asyncio.subprocess.DEVNULL
        )
        assert await made.wait() == 0
        async with ScriptedPeer(bus.port) as peer:
            await peer.send_frame("green?receipt=1", b"before")
            before = (await peer.read_frame())[1].decode().split()[1]
        assert await bus.terminate() == 0
    async with served(tmp_path) as bus, ScriptedPeer(bus.port) as peer:
        await peer.send_frame("green?receipt=2", b"after")
        after = (await peer.read_frame())[1].decode().split()[1]
        await peer.send_frame("$subscribe", b"green from=earliest")
        assert await peer.read_frame() == ("green", b"before")
        assert await peer.read_frame() == ("green", b"after")
        assert await bus.terminate() == 0
    epoch, _, offset = before.partition(":")
    assert (offset, after) == ("0", f"{epoch}:1")


# As systemd does: the socket has the number 3, and the process is the one that is named.
HAND_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.executable, [sys.executable, "-m", "polybus.cli", "serve", *sys.argv[2:]])
"""


def serve_handed(data: Path, listening: socket.socket, port: int) -> subprocess.Popen[str]:
    """A bus that is handed a listening socket."""
    options = ("--data", str(data), "--port", str(port), "--topic", "red")
    return subprocess.Popen(
        [sys.executable, "-c", HAND_OVER, str(listening.fileno()), *options],
        pass_fds=(listening.fileno(),),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_who_connects_during_a_restart_waits_in_the_socket_of_the_service_manager(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with serve_handed(tmp_path, listening, port) as bus:
            assert bus.stdout is not None and f":{port} " in bus.stdout.readline()
            bus.terminate()
            assert bus.wait(30) == 0
        with socket.create_connection(("127.0.0.1", port), 30) as early:
            early.sendall(b'{"messagetype":"register","topics":["red"]}\n')
            early.sendall(b'{"messagetype":"send","topics":["red"],"data":"x","ack":true}\n')
            with serve_handed(tmp_path, listening, port) as bus:
                assert b"send-ack" in early.recv(4096)
                bus.terminate()
                assert bus.wait(30) == 0


@pytest.mark.slow
def test_a_socket_of_the_service_manager_that_no_connector_has_is_refused(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        serve_handed(tmp_path, listening, 0) as bus,
    ):
        _, said = bus.communicate(timeout=30)
    assert bus.returncode == 2 and "config.address" in said and "service manager" in said


@pytest.mark.slow
async def test_a_subscriber_that_does_not_read_cannot_hold_up_the_shutdown(tmp_path: Path) -> None:
    async with served(tmp_path, *TOPIC_OPTIONS) as bus:
        async with ScriptedPeer(bus.port) as stuck, ScriptedPeer(bus.port) as writer:
            await stuck.send_frame("$subscribe", b"red tell=position")
            await stuck.read_frame()
            stuck._writer.transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(200):
                await writer.send_frame("red", b"x" * (1 << 16))
            async with asyncio.timeout(15):
                assert await bus.terminate() == 0


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"limits": {"outbox": 1}}, "outbox"),
        ({"durability": "sometimes"}, "durability"),
        ({"connectors": [{"protocoll": "tcp", "ip": "127.0.0.1", "port": 70000}]}, "port"),
        ({"connectors": [{"protocol": "tcp", "ip": "999.1.1.1", "port": 0}]}, "connectors"),
        ({"connectors": [{"speaks": "queue", "port": 0}]}, "connectors[0]"),
        ({"connectors": [{"port": 0, "tls": {"cert": "nix", "key": "nix"}}]}, "tls"),
        ({"topic-config": "nowhere.json"}, "topic-config"),
        ({"topics": ["$mine"]}, "topics"),
        ({"limits": {"message-bytes-max": 1 << 29}}, "message-bytes-max"),
    ],
)
@pytest.mark.slow
def test_a_wrong_config_is_one_line_that_names_the_key_and_exit_code_two(
    tmp_path: Path, config: dict[str, object], key: str
) -> None:
    path = tmp_path / "polybus.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "polybus.cli", "serve", "--config", str(path)]
    done = subprocess.run(
        [*command, "--data", str(tmp_path / "data")],
        capture_output=True,
        timeout=30,
        check=False,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and key in done.stderr
    assert "ready" not in done.stdout


@pytest.mark.slow
async def test_the_seeds_config_files_load_unchanged(tmp_path: Path) -> None:
    """`protocoll`, a topics file beside it, and nothing of ours."""
    (tmp_path / "topics.json").write_text('{"topics": ["Golang", "two words"]}')
    (tmp_path / "server.json").write_text(
        '{"topic-config": "topics.json", "connectors": ['
        '{"protocoll": "tcp", "ip": "127.0.0.1", "port": 55545},'
        '{"protocoll": "udp", "ip": "127.0.0.1", "port": 55545}]}'
    )
    options = ("--config", str(tmp_path / "server.json"))
    async with served(tmp_path / "data", *options) as bus, ScriptedPeer(bus.port) as peer:
        topics = ["golang", "two words"]
        await peer.send_json({"messagetype": "register", "topics": topics, "ack": True})
        assert await peer.read_json() == {"messagetype": "reg-ack", "topics": topics}
        assert await bus.terminate() == 0
