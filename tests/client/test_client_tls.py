"""The client over TLS, on every protocol; the certificate here is for tests only."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from client_kit import SCHEMES, take

import polybus
from polybus.client.http.blocking import request_json
from polybus.edges.node import Node
from polybus.errors import PolybusError, UsageError
from polybus.testing import run_bus

TLS = Path(__file__).parent / "tls"
CONNECTORS = [
    {
        "protocol": "tcp",
        "port": 0,
        "tls": {"cert": str(TLS / "cert.pem"), "key": str(TLS / "key.pem")},
    }
]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_messages_travel_encrypted(scheme: str) -> None:
    trusting = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    async with run_bus("news", connectors=CONNECTORS) as bus:
        url = f"{scheme}+tls://localhost:{bus.tcp_port}"
        async with (
            polybus.connect(url, ssl_context=trusting) as c,
            c.subscribe("news") as subscription,
        ):
            position = await c.publish("news", "secret", receipt=True)
            (message,) = await take(subscription, 1)
    assert (message.text, message.position) == ("secret", position)


async def test_a_certificate_nobody_vouches_for_is_refused() -> None:
    async with run_bus("news", connectors=CONNECTORS) as bus:
        with pytest.raises(PolybusError, match="client.unreachable"):
            async with polybus.connect(f"boson://localhost:{bus.tcp_port}?tls=1"):
                pass


@pytest.mark.parametrize("scheme", ["boson+tls", "wss", "https"])
async def test_a_client_trusts_the_certificates_of_a_file(scheme: str) -> None:
    async with run_bus("news", connectors=CONNECTORS) as bus:
        url = f"{scheme}://localhost:{bus.tcp_port}"
        async with polybus.connect(url, ca_file=TLS / "cert.pem") as client:
            assert await client.publish("news", "secret", receipt=True) is not None
        with pytest.raises(PolybusError, match="client.unreachable.*TLS"):
            async with polybus.connect(url, ca_file=TLS / "renewed-cert.pem"):
                pass


def test_a_client_names_a_ca_file_that_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for name in ("empty.pem", "missing.pem"):
        with pytest.raises(UsageError, match="client.ca-file"):
            polybus.connect("boson+tls://localhost", ca_file=tmp_path / name)
    context = ssl.create_default_context()
    with pytest.raises(UsageError, match="not both"):
        polybus.connect("boson+tls://localhost", ca_file=tmp_path / "x", ssl_context=context)


def required() -> list[dict[str, object]]:
    """A connector for all protocols, and one for queues, which both require TLS."""
    files = {"cert": str(TLS / "cert.pem"), "key": str(TLS / "key.pem"), "required": True}
    one = {"protocol": "tcp", "port": 0, "tls": files}
    return [one, one | {"speaks": "queue", "topic": "news"}]


def ports(bus: Node) -> dict[str, int]:
    """The ports of the connectors, by `queue` or `all`."""
    found = zip(("all", "queue"), bus.addresses, strict=True)
    return {name: int(address.rpartition(":")[2]) for name, address in found}


@pytest.mark.parametrize("scheme", [*SCHEMES, "queue"])
async def test_a_port_that_may_be_without_tls_is_named(scheme: str) -> None:
    plain = [{"protocol": "tcp", "port": 0}]
    plain.append(plain[0] | {"speaks": "queue", "topic": "news"})
    async with run_bus("news", connectors=plain) as bus:
        place = f"127.0.0.1:{ports(bus)['queue' if scheme == 'queue' else 'all']}"
        with pytest.raises(PolybusError, match=r"unreachable.*may be one without TLS") as one:
            async with polybus.connect(f"{scheme}+tls://{place}") as client:
                await client.publish("news", "x")
    # The bus has closed the connection, as anyone on the way can.
    assert f"{scheme}://{place}" not in one.value.text


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak TLS .*use goms://127"),
        (b"GET / HTTP/1.1\r\n", "does not speak TLS .*use goms://127"),
        (b"", "; the port may be one without TLS$"),
        (None, "; the port may be one without TLS$"),
    ],
)
async def test_the_plain_url_is_named_only_if_the_port_answers_with_other_bytes(
    answer: bytes | None, says: str
) -> None:
    """Who uses it sends passwords that anyone can read."""

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if answer is None:
            writer.transport.abort()
            return
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(on_connect, "127.0.0.1", 0)
    async with server:
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(PolybusError, match=says):
            async with polybus.connect(f"goms+tls://{place}"):
                pass
        says = says.replace("goms:", "http:")
        with pytest.raises(PolybusError, match=says):
            await asyncio.to_thread(request_json, f"https://{place}", "GET", "/v1/topics")


@pytest.mark.parametrize("scheme", [*SCHEMES, "queue"])
@pytest.mark.parametrize("does", ["publish", "subscribe"])
async def test_a_port_that_requires_tls_is_an_error_and_no_loss(scheme: str, does: str) -> None:
    """It would be the same after every reconnect."""
    async with run_bus("news", connectors=required(), limits={"detect-timeout-s": 0.2}) as bus:
        place = f"127.0.0.1:{ports(bus)['queue' if scheme == 'queue' else 'all']}"
        url = f"{scheme}://{place}"
        with pytest.raises(PolybusError, match=r"tls\.required") as one:
            async with asyncio.timeout(3), polybus.connect(url) as client:
                if does == "publish":
                    while True:
                        await client.publish("news", "x")
                        await asyncio.sleep(0)
                async with client.subscribe("news") as subscription:
                    await take(subscription, 1)
        assert scheme in ("http", "ws") or f"use {scheme}+tls://{place}" in one.value.text


async def test_blocking_calls_name_the_wrong_scheme_too() -> None:
    async with run_bus("news", connectors=required()) as bus:
        url = f"http://127.0.0.1:{ports(bus)['queue']}"
        with pytest.raises(PolybusError, match=r"tls\.required.*use https://"):
            await asyncio.to_thread(request_json, url, "GET", "/v1/topics")
    async with run_bus("news") as bus:
        url = f"https://127.0.0.1:{bus.tcp_port}"
        with pytest.raises(PolybusError, match=r"may be one without TLS$"):
            await asyncio.to_thread(request_json, url, "GET", "/v1/topics")
