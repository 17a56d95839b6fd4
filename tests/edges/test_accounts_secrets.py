"""Passwords and tokens of every protocol are in nothing that the bus tells, writes or starts."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from access_kit import CONNECTORS, TOPIC
from accounts_kit import SPEAKERS
from edge_kit import TIMEOUT_S, UdpClient, until
from websockets.asyncio.client import connect

from polybus.edges.node import Node
from polybus.log.layout import admin_token_path
from polybus.services.accounts import accounts, throttle
from polybus.testing import ScriptedPeer, run_bus

WRONG = "gu3ssed-s3cret"
RIGHT = "r1ght-s3cret"


@pytest.fixture(autouse=True)
def without_delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (accounts, throttle):
        monkeypatch.setattr(module, "DELAY_S_MIN", 0.0)
    yield


async def log_in_everywhere(node: Node, token: str) -> str:
    """Wrong and right credentials on every protocol; what the bus answers."""
    told = ""
    for user, secret in (("shop", WRONG), ("", WRONG), ("shop", RIGHT), ("", token)):
        for protocol in (*SPEAKERS, "udp"):
            speaker = SPEAKERS.get(protocol, SPEAKERS["goms"])
            peer: Any = ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S)
            if protocol == "udp":
                peer = UdpClient(node.udp_port)
            async with peer as found:
                await found.send(speaker.login(user, secret))
                heard = await speaker.hear(found)
                assert heard[0] == ("error" if secret == WRONG else "login")
                # A login that is not complete.
                await found.send(speaker.login(user, secret)[:-3] + b"\n")
                told += str(heard)
        url = f"ws://127.0.0.1:{node.tcp_port}/v1/live"
        async with connect(url) as page:
            given = {"user": user, "password": secret} if user else {"token": secret}
            await page.send(json.dumps({"op": "login", **given}))
            told += str(await page.recv())
    port = int(node.addresses[2].rpartition(":")[2])
    before = node.bus.log.bounds(TOPIC).stop
    for secret in (WRONG, token):
        async with ScriptedPeer(port, timeout_s=TIMEOUT_S) as queue:
            for one in (secret.encode(), b"x"):
                await queue.send(len(one).to_bytes(4) + one)
            if secret == WRONG:
                assert await queue.read_to_end() == b""
            else:
                await until(lambda: node.bus.log.bounds(TOPIC).stop == before + 1)
    return told


def started() -> str:
    """The command lines of this process, which has the bus, and of those that it started."""
    pids = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    found = [Path(f"/proc/{pid}") for pid in (str(os.getpid()), *pids.split())]
    return " ".join(path.joinpath("cmdline").read_text() for path in found if path.exists())


async def shown_to_administrators(node: Node) -> str:
    token = admin_token_path(node.data).read_text().strip()
    header = {"authorization": f"Bearer {token}"}
    base = f"http://127.0.0.1:{node.tcp_port}"
    text = ""
    async with httpx.AsyncClient(base_url=base, headers=header, timeout=TIMEOUT_S) as client:
        for path in (
            *("/metrics", "/healthz", "/readyz", "/v1/connections", "/v1/accounts"),
            *("/v1/settings", "/v1/info", "/v1/figures", "/v1/graph"),
        ):
            answer = await client.get(path)
            assert answer.status_code == 200
            text += answer.text
    assert "polybus_" in text and "shop" in text
    return text


async def test_credentials_are_in_nothing_that_the_bus_tells(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG, "polybus")
    data = str(tmp_path)
    async with run_bus(data=data) as node:
        await node.accounts.create("shop", RIGHT)
        node.bus.create_topic(TOPIC)
    settings: dict[str, Any] = {"accounts": {"default": "off"}, "connectors": CONNECTORS}
    async with run_bus("open", data=data, **settings) as node:
        header = {"authorization": f"Bearer {admin_token_path(node.data).read_text().strip()}"}
        base = f"http://127.0.0.1:{node.tcp_port}/v1/accounts/shop"
        async with httpx.AsyncClient(headers=header, timeout=TIMEOUT_S) as client:
            made = await client.post(f"{base}/tokens", json={})
            await client.put(f"{base}/password", json={"password": RIGHT})
        token = made.json()["token"]
        found = await log_in_everywhere(node, token)
        found += await shown_to_administrators(node) + started()
    # What is pending when the bus stops is written.
    async with run_bus(data=data) as node:
        topics = [one for one in node.bus.topic_names(system=True) if "$" in one]
        assert {"$audit", "$events", "shop/$events"} <= set(topics)
        values = [
            bytes(value).decode()
            for topic in topics
            for batch in node.bus.log.read(topic, 0)
            for value in batch.values()
        ]
    assert any("account-token" in one for one in values)
    assert "auth.failed" in caplog.text
    found += caplog.text + "".join(values)
    for secret in (WRONG, RIGHT, token.split("_", 2)[2]):
        encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
        for form in (secret, encoded, secret.encode().hex()):
            assert form not in found
