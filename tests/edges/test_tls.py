"""TLS of a connector: required or not, clients' certificates, and renewals."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from certificate_kit import Authority
from edge_kit import frame, is_alive, line, properties, until
from http_kit import raw
from queue_connector_kit import message, queues_of

import polybus
from polybus.edges.node import Node
from polybus.edges.tcp import certificates
from polybus.edges.tcp.connection import Connection
from polybus.errors import ConfigError
from polybus.testing import ScriptedPeer, run_bus

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
# What a client says first, and what it is answered on a connector that requires TLS.
PLAIN = {
    "boson-frames": (frame("news", b"1"), b"$errortls.required "),
    "boson-properties": (properties(("topic", b"news")), b"tls.required "),
    "goms": (line("register", topics=["news"]), b'"error-code":"000403"'),
    "http": (HEALTH, b'"code":"tls.required"'),
}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


def connector(authority: Authority, **fields: Any) -> dict[str, Any]:
    cert, key = authority.sign("bus")
    return {"protocol": "tcp", "port": 0, "tls": {"cert": str(cert), "key": str(key), **fields}}


@contextlib.asynccontextmanager
async def connected(
    node: Node, authority: Authority, certificate: tuple[Path, Path] | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    context = ssl.create_default_context(cafile=str(authority.path))
    if certificate is not None:
        context.load_cert_chain(*certificate)
    reader, writer = await asyncio.open_connection("localhost", node.tcp_port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def health(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> str:
    """The body of /healthz on an open connection."""
    reader, writer = streams
    writer.write(HEALTH)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    (length,) = [one for one in head.lower().split(b"\r\n") if one.startswith(b"content-length")]
    return (await reader.readexactly(int(length.split()[1]))).decode()


# Required


@pytest.mark.parametrize("protocol", PLAIN)
@pytest.mark.parametrize("alone", [False, True])
async def test_a_connector_that_requires_tls_says_so_in_the_clients_protocol(
    authority: Authority, protocol: str, alone: bool
) -> None:
    wanted = connector(authority, required=True)
    if alone:
        wanted["speaks"] = protocol
    said, answer = PLAIN[protocol]
    async with run_bus("news", connectors=[wanted]) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(said)
            found = await peer.read_to_end()
        assert answer in found and b"requires TLS" in found
        assert found.count(b"tls.required") <= 2 and node.bad_peers.counts["tls.required"] == 1
        assert node.bus.log.bounds("news").stop == 0
        async with connected(node, authority) as (reader, writer):
            writer.write(said)
            if protocol == "http":
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"


async def test_gzip_without_tls_is_refused_too(authority: Authority) -> None:
    async with run_bus("news", connectors=[connector(authority, required=True)]) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(gzip.compress(frame("news", b"1")))
            assert b"tls.required" in gzip.decompress(await peer.read_to_end())
        assert node.bus.log.bounds("news").stop == 0


async def test_without_required_a_connector_accepts_both(authority: Authority) -> None:
    async with run_bus("news", "alive", connectors=[connector(authority)]) as node:
        await is_alive(node)
        async with connected(node, authority) as streams:
            assert await health(streams) == "ok\n"


async def test_programs_on_the_machine_use_a_connector_without_tls_if_there_is_one(
    authority: Authority,
) -> None:
    connectors = [connector(authority, required=True), connector(authority)]
    async with run_bus(connectors=connectors) as node:
        encrypted, plain = (one.rpartition(":")[2] for one in node.addresses)
        run = json.loads((node.data / "run.json").read_text())
        assert run["http"] == [f"http://127.0.0.1:{plain}", f"https://127.0.0.1:{encrypted}"]


async def test_udp_has_no_tls(authority: Authority) -> None:
    udp = connector(authority) | {"protocol": "udp", "speaks": "goms"}
    with pytest.raises(ConfigError, match=r"connectors\[0\].tls"):
        async with run_bus(connectors=[udp]):
            pass


async def test_a_queue_connector_is_tls_from_the_first_byte(authority: Authority) -> None:
    """Also for a queue that only listens."""
    wanted = connector(authority) | {"speaks": "queue", "topic": "news"}
    async with run_bus("news", connectors=[wanted]) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(message(b"plain"))
            await peer.read_to_end()
        assert node.bad_peers.counts["tls.failed"] == 1
        async with (
            connected(node, authority) as (reader, _),
            connected(node, authority) as (_, writer),
        ):
            await until(lambda: len(queues_of(node)) == 2)
            writer.write(message(b"secret"))
            assert await asyncio.wait_for(reader.readexactly(10), 10) == message(b"secret")
        url = f"queue+tls://localhost:{node.tcp_port}"
        async with polybus.connect(url, ca_file=authority.path) as client:
            subscription = await client.subscribe("news")
            await until(lambda: len(queues_of(node)) == 2)
            await client.publish("news", "again")
            assert (await anext(aiter(subscription))).text == "again"


async def test_the_page_of_an_encrypted_bus_is_its_own_origin(authority: Authority) -> None:
    async with run_bus("news", connectors=[connector(authority)]) as node:
        for scheme, status in (("https", b"200"), ("http", b"403")):
            async with connected(node, authority) as (reader, writer):
                own = f"localhost:{node.tcp_port}"
                lines = f"host: {own}\r\norigin: {scheme}://{own}\r\ncontent-length: 0\r\n\r\n"
                writer.write(b"POST /v1/topics/news/messages HTTP/1.1\r\n" + lines.encode())
                assert (await reader.readline()).split()[1] == status


# Certificates of clients


def name_of_peer(node: Node) -> str | None:
    (connection,) = node.tcp.connections
    return cast(Connection, connection).certificate_name


async def test_the_name_of_a_verified_certificate_is_known(authority: Authority) -> None:
    wanted = connector(authority, **{"client-ca": str(authority.path)})
    several = authority.sign("one", "two")
    async with run_bus("news", connectors=[wanted]) as node:
        for certificate, name in (
            (authority.sign("sensor 7"), "sensor 7"),
            (authority.sign(), None),
            (several, None),
            (None, None),
        ):
            async with connected(node, authority, certificate) as streams:
                assert await health(streams) == "ok\n"
                assert name_of_peer(node) == name
            await until(lambda: not node.tcp.connections)
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(line("register", topics=["news"], ack=True))
            await peer.read_line()
            assert name_of_peer(node) is None


async def test_a_certificate_that_names_an_account_is_a_login(authority: Authority) -> None:
    wanted = connector(authority, **{"client-ca": str(authority.path)})
    shop = authority.sign("Shop")
    async with run_bus("news", connectors=[wanted]) as node:
        await node.accounts.create("shop")
        node.bus.create_topic("shop/news")
        async with connected(node, authority, shop) as (reader, writer):
            writer.write(line("register", topics=["news"], ack=True))
            assert await reader.readline() == line("reg-ack", topics=["news"])
            assert node.bus.topic("shop/news").subscribers
            node.accounts.delete("shop")
            assert json.loads(await reader.readline())["error-code"] == "000401"
            assert await reader.read() == b""
        async with connected(node, authority, shop) as (reader, writer):
            # The default account's: the connection is one of loopback.
            writer.write(line("register", topics=["news"], ack=True))
            await reader.readline()
            assert node.bus.topic("news").subscribers


@pytest.mark.slow
async def test_connections_by_certificate_count_for_their_account(authority: Authority) -> None:
    wanted = connector(authority, **{"client-ca": str(authority.path)})
    limits = {"account-connections-max": 1}
    shop, register = authority.sign("shop"), line("register", topics=["news"], ack=True)
    async with run_bus("news", connectors=[wanted], limits=limits) as node:
        await node.accounts.create("shop")
        node.bus.create_topic("shop/news")
        async with connected(node, authority, shop) as (reader, writer):
            writer.write(register)
            assert await reader.readline() == line("reg-ack", topics=["news"])
            async with connected(node, authority, shop) as (second, writing):
                writing.write(register)
                assert json.loads(await second.readline())["error-code"] == "000429"
                assert await second.read() == b""
            # It is not the default account instead.
            assert not node.bus.topic("news").subscribers
        await until(lambda: not node.tcp.connections)
        live = b"GET /v1/live HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\n"
        live += b"connection: upgrade\r\nsec-websocket-version: 13\r\n"
        live += b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        async with connected(node, authority, shop) as (reader, writer):
            writer.write(live)
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            async with connected(node, authority, shop) as (second, writing):
                writing.write(live)
                assert b"account.connections" in await second.read()
        await until(lambda: not node.tcp.connections)
        async with connected(node, authority, shop) as (reader, writer):
            writer.write(register)
            assert await reader.readline() == line("reg-ack", topics=["news"])


async def test_requests_with_a_certificate_that_names_an_account_are_the_account_s(
    authority: Authority,
) -> None:
    wanted = connector(authority, **{"client-ca": str(authority.path)})
    settings: dict[str, Any] = {"connectors": [wanted], "accounts": {"default": "off"}}
    request = b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n%b\r\n"
    async with run_bus("news", **settings) as node:
        await node.accounts.create("shop")
        node.bus.create_topic("shop/orders")
        answers = []
        for name, header in [
            ("Shop", b""),
            ("office", b""),
            ("shop", b"authorization: Basic x\r\n"),
        ]:
            async with connected(node, authority, authority.sign(name)) as (reader, writer):
                writer.write(request % header)
                answers.append((await reader.read()).partition(b" ")[2])
        assert answers[0].startswith(b"200") and b'"name":"orders"' in answers[0]
        assert answers[1].startswith(b"401") and b"auth.needed" in answers[1]
        # Who names somebody means it.
        assert answers[2].startswith(b"401") and b"auth.failed" in answers[2]


async def test_a_certificate_of_another_authority_is_refused(
    authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger").sign("sensor 7")
    wanted = connector(authority, **{"client-ca": str(authority.path)})
    async with run_bus("alive", connectors=[wanted]) as node:
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            async with connected(node, authority, stranger) as streams:
                await health(streams)
        assert node.bad_peers.counts["tls.failed"] == 1
        await is_alive(node)


async def test_nobody_is_asked_for_a_certificate_without_an_authority(
    authority: Authority,
) -> None:
    async with run_bus(connectors=[connector(authority)]) as node:
        async with connected(node, authority, authority.sign("sensor 7")) as streams:
            assert await health(streams) == "ok\n"
            assert name_of_peer(node) is None


async def test_an_authority_that_cannot_be_read_keeps_the_bus_from_starting(
    authority: Authority,
) -> None:
    with pytest.raises(ConfigError, match=r"connectors\[0\]: tls.client-ca"):
        async with run_bus(connectors=[connector(authority, **{"client-ca": "missing.pem"})]):
            pass


async def test_an_encrypted_key_is_refused_and_asks_nobody_for_its_password(
    authority: Authority,
) -> None:
    cert, key = authority.sign("bus", password=b"secret")
    tls = {"cert": str(cert), "key": str(key)}
    with pytest.raises(ConfigError, match="config.tls"):
        async with run_bus(connectors=[{"protocol": "tcp", "port": 0, "tls": tls}]):
            pass


# Renewals


async def served(node: Node, authority: Authority) -> str:
    """The common name of the certificate that a new connection gets."""
    async with connected(node, authority) as (_, writer):
        subject = writer.get_extra_info("peercert")["subject"]
        return str(dict(part for parts in subject for part in [parts[0]])["commonName"])


async def test_changed_files_are_loaded_and_bad_ones_reported(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that are open continue meanwhile."""
    monkeypatch.setattr(certificates, "CHECK_S", 0.02)
    wanted = connector(authority)
    cert, key = Path(wanted["tls"]["cert"]), Path(wanted["tls"]["key"])
    renewed_cert, renewed_key = authority.sign("renewed")
    failures: dict[Any, str]
    async with (
        run_bus("news", connectors=[wanted]) as node,
        connected(node, authority) as before,
    ):
        failures = node.http.certificates.failures
        assert await served(node, authority) == "bus"
        shutil.copy(renewed_cert, cert)
        await until(lambda: bool(failures))
        assert await served(node, authority) == "bus"
        report = await health(before)
        assert report.startswith("ok\nconfig.tls: bus-cert.pem has changed and cannot be used: ")
        assert str(cert.parent) not in report
        ready = await raw(node, b"GET /readyz HTTP/1.0\r\n\r\n")
        assert report.encode() in ready
        metrics = await raw(node, b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b"\npolybus_tls_reload_failures 1\n" in metrics

        shutil.copy(renewed_key, key)
        await until(lambda: not failures)
        assert await served(node, authority) == "renewed"
        assert await health(before) == "ok\n"

        os.unlink(cert)
        await until(lambda: bool(failures))
        assert "No such file" in await health(before)
        assert await served(node, authority) == "renewed"


async def test_a_reload_reports_a_bad_file_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = connector(authority)
    async with run_bus("news", connectors=[wanted]) as node:
        found = node.http.certificates
        shutil.copy(wanted["tls"]["cert"], wanted["tls"]["key"])
        with pytest.raises(ConfigError, match="config.tls"):
            node.reload(node.config)
        assert len(found.failures) == 1
        (settings,) = found.failures
        await found.refresh(settings)
        assert "previous certificate" not in caplog.text
        assert await served(node, authority) == "bus"
        authority.sign("bus")
        node.reload(node.config)
        assert json.dumps(found.failures) == "{}"
