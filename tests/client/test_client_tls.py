"""The client over TLS, on every protocol; the certificate here is for tests only."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from client_kit import SCHEMES, take

import polybus
from polybus.errors import PolybusError
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
