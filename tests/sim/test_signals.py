"""Signals of a bus: the settings are read again while it runs, and a start can be ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import cast

import httpx
import msgspec
import pytest
from warm_kit import WARM

from polybus.cli.serve import _reload, _reload_at
from polybus.config import Config
from polybus.edges.node import Node
from polybus.errors import StorageError
from polybus.log.files import FileLog
from polybus.testing import run_bus

# Sends a signal to its own process at the first audit event that has the word in it, as
# `import polybus.edges.node`, `open .../topic.json` or `socket.bind`.
AT_AN_EVENT = """
import os, runpy, sys
number, moment = int(sys.argv[1]), sys.argv[2]
del sys.argv[1:3]
def hook(event, arguments):
    global moment
    if moment and moment in " ".join([event, *map(str, arguments)]):
        moment = ""
        os.kill(os.getpid(), number)
sys.addaudithook(hook)
runpy.run_module("polybus.cli", run_name="__main__", alter_sys=True)
"""


def environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("POLYBUS_")}


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("cli/serve/", signal.SIGTERM),
        ("import polybus.edges.node", signal.SIGINT),
        ("polybus.json.tmp", signal.SIGTERM),
        ("new/0/topic.json", signal.SIGTERM),
        ("topics/news", signal.SIGTERM),
        ("os.mkdir", signal.SIGINT),
        ("state.db", signal.SIGTERM),
        ("socket.bind", signal.SIGTERM),
        ("admin.sock", signal.SIGINT),
        ("run.json", signal.SIGTERM),
    ],
)
async def test_a_signal_during_the_start_ends_with_zero_and_leaves_a_folder_that_starts(
    tmp_path: Path, moment: str, number: int
) -> None:
    imports = moment.startswith(("__pycache__", "import"))
    program = AT_AN_EVENT if imports else WARM + AT_AN_EVENT
    command = [sys.executable, "-c", program, str(int(number)), moment, "serve", "--port", "0"]
    command += ["--data", str(tmp_path), "--topic", "news"]
    ended = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, timeout=20, env=environment()
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    async with run_bus("news", data=str(tmp_path)) as node:
        assert node.bus.log.topics()


async def test_sighup_reads_the_settings_again(tmp_path: Path) -> None:
    """What needs a restart is named; an invalid file changes nothing."""
    file = tmp_path / "polybus.json"
    settings: dict[str, object] = {"topics": ["one"], "connectors": [{"port": 0}]}
    file.write_text(json.dumps(settings))
    data = tmp_path / "data"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "polybus.cli", "serve", "--config", str(file), "--data", str(data)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(20):
            assert b"ready" in await process.stdout.readline()
            settings |= {"topics": ["one", "two"], "limits": {"connections-max": 7}}
            file.write_text(json.dumps(settings))
            process.send_signal(signal.SIGHUP)
            line = await process.stderr.readline()
            assert b"limits.connections-max" in line and b"topics" not in line
            assert (data / "accounts/default/topics/two/topic.json").exists()
            file.write_text(json.dumps(settings | {"topics": ["three"], "limits": {"nix": 1}}))
            process.send_signal(signal.SIGHUP)
            assert b"nix" in await process.stderr.readline()
            assert not (data / "accounts/default/topics/three").exists()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


TLS = Path(__file__).parents[1] / "client" / "tls"


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    trusting = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    trusting.load_verify_locations(str(TLS / "renewed-cert.pem"))
    return await asyncio.open_connection("localhost", port, ssl=trusting)


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = re.findall(rb"(?i)content-length: (\d+)", head)
    await reader.readexactly(int(length))
    return head.startswith(b"HTTP/1.1 200 ")


async def served(port: int) -> str:
    """The name of the file whose certificate a new connection gets."""
    reader, writer = await connected(port)
    assert await answers(reader, writer)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    for name in ("cert.pem", "renewed-cert.pem"):
        if ssl.PEM_cert_to_DER_cert((TLS / name).read_text()) == found:
            return name
    return "another"


async def test_sighup_takes_a_renewed_certificate_and_keeps_the_old_one_if_it_is_bad(
    tmp_path: Path,
) -> None:
    """New connections get the new certificate; those that are open continue."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    async def reload(cert_name: str, key_name: str, *words: str) -> None:
        shutil.copy(TLS / cert_name, cert)
        shutil.copy(TLS / key_name, key)
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        line = (await process.stderr.readline()).decode()
        assert all(word in line for word in words), line

    shutil.copy(TLS / "cert.pem", cert)
    shutil.copy(TLS / "key.pem", key)
    file = tmp_path / "polybus.json"
    connector = {"port": 0, "tls": {"cert": str(cert), "key": str(key)}}
    file.write_text(json.dumps({"connectors": [connector]}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "polybus.cli", "serve", "--verbose", "--config", str(file)),
        *("--data", str(tmp_path / "data")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20):
            ready = await process.stdout.readline()
            port = int(re.findall(rb"tcp://127\.0\.0\.1:(\d+)", ready)[0])
            reader, writer = await connected(port)
            assert await served(port) == "cert.pem"
            await reload("renewed-cert.pem", "renewed-key.pem", "the settings were reloaded")
            assert await served(port) == "renewed-cert.pem"
            for bad in ("cert.pem", "key.pem"):  # not of this key; not a certificate at all
                said = ("ERROR", "config.tls", str(cert), "the bus keeps its settings")
                await reload(bad, "renewed-key.pem", *said)
                assert await served(port) == "renewed-cert.pem"
            assert await answers(reader, writer)
            writer.close()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_reloaded_settings_apply_and_others_keep_their_values(tmp_path: Path) -> None:
    async with run_bus("news", data=str(tmp_path)) as node:
        changed: dict[str, object] = {
            "retention": {"bytes": 5000, "hold-for-consumers": False},
            "pipeline": {"gold": False},
            "durability": "interval",
            "topics": [{"name": "orders", "retention": {"age-s": 9}}],
        }
        restart = node.reload(reread(node, changed))
        await node.create_declared()
        assert restart == ["durability"]
        assert node.services.consumers.held_from("news") is None
        log = node.bus.log
        assert isinstance(log, FileLog)
        assert log.settings("orders").retention_age_s == 9
        assert b'"gold":false' in (tmp_path / "pipeline/settings.json").read_bytes()
        assert node.config.durability == "fsync"


async def test_settings_over_http_are_those_of_the_last_reload(tmp_path: Path) -> None:
    async with run_bus("news", data=str(tmp_path)) as node:
        retention = {"bytes": 5000, "hold-for-consumers": False}
        node.reload(reread(node, {"retention": retention, "durability": "interval"}))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{node.tcp_port}") as client:
            shown = (await client.get("/v1/settings")).json()["settings"]
    assert (shown["retention"]["bytes"], shown["durability"]) == (5000, "fsync")


async def test_a_topic_that_cannot_be_created_does_not_hide_what_was_reloaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing:
        def reload(self, config: Config) -> list[str]:
            return ["durability"]

        async def create_declared(self) -> None:
            raise StorageError("log.refused", "Kafka does not")

    await _reload(cast(Node, Refusing()), Config)
    assert "the settings were reloaded, but topics could not be created" in caplog.text
    assert "settings that need a restart keep their values: durability" in caplog.text
    assert "keeps its settings" not in caplog.text


async def test_a_reload_that_fails_by_surprise_is_logged_and_the_next_one_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reloaded = asyncio.Event()
    results = iter([RuntimeError("a surprise"), None])

    class Surprising:
        def reload(self, config: Config) -> list[str]:
            error = next(results)
            if error is not None:
                hangup.set()
                raise error
            return []

        async def create_declared(self) -> None:
            reloaded.set()

    hangup = asyncio.Event()
    hangup.set()
    task = asyncio.create_task(_reload_at(hangup, cast(Node, Surprising()), Config))
    try:
        async with asyncio.timeout(10):
            await reloaded.wait()
    finally:
        task.cancel()
    assert "a surprise" in caplog.text


def reread(node: Node, changed: dict[str, object]) -> Config:
    return msgspec.convert(msgspec.to_builtins(node.config) | changed, Config)
