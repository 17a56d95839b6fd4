"""The administrator's ways in: a token, and a socket that only the owner may open."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import httpx
import pytest
from http_kit import http_bus

from polybus.config import Config, Connector
from polybus.edges.admin import load_or_make
from polybus.edges.node import Node, Server
from polybus.log.layout import admin_token_path


def test_a_token_is_made_once_and_for_the_owner_alone(tmp_path: Path) -> None:
    load_or_make(tmp_path)
    path = admin_token_path(tmp_path)
    text = path.read_text()
    load_or_make(tmp_path)
    assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_header_with_the_token_is_accepted(tmp_path: Path, scheme: str) -> None:
    token = load_or_make(tmp_path)
    text = admin_token_path(tmp_path).read_text().strip()
    assert token.is_in(f"{scheme} {text}")


def test_any_other_header_is_not(tmp_path: Path) -> None:
    token = load_or_make(tmp_path)
    text = admin_token_path(tmp_path).read_text().strip()
    for header in (None, "", "Bearer ", text, f"Basic {text}", f"Bearer {text[:-1]}", "Bearer é"):
        assert not token.is_in(header)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"short", b"\xff\xfe", b"a" * 20 + b"\0" * 20, b"\xc3\xa4" * 20]
)
def test_a_file_without_a_token_gets_a_new_one(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = admin_token_path(tmp_path)
    path.write_bytes(content)
    token = load_or_make(tmp_path)
    assert token.is_in(f"Bearer {path.read_text().strip()}")
    assert "admin.token-file" in caplog.text


async def test_the_socket_speaks_the_api_with_the_rights_of_the_administrator() -> None:
    async with http_bus("news", limits={"connections-max": 1}) as http:
        assert (await http.client.get("/healthz")).status_code == 200
        run = json.loads((http.node.data / "run.json").read_text())
        assert os.stat(run["admin"]).st_mode & 0o777 == 0o600
        transport = httpx.AsyncHTTPTransport(uds=run["admin"])
        # Although there are as many connections as there may be.
        async with httpx.AsyncClient(transport=transport, base_url="http://bus") as admin:
            topics = (await admin.get("/v1/topics")).json()["topics"]
            assert [one["name"] for one in topics] == ["news"]
            path = "/v1/topics/$events/messages"
            assert (await admin.post(path, content=b"{}")).status_code == 200
            assert (await http.client.post(path, content=b"{}")).status_code == 403
    with pytest.raises(FileNotFoundError):
        os.stat(run["admin"])


async def test_a_start_that_fails_at_the_socket_leaves_no_port_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise OSError("no room")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = Config(data=str(tmp_path), connectors=[Connector(port=port)])
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no room"):
        patched.setattr(Server, "listen_for_admin", fail)
        await Node(config).start()
    node = Node(config)
    await node.start()
    await node.stop()
