"""The client over TLS, on every protocol; the certificate here is for tests only."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from client_kit import SCHEMES, take

import polybus
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
