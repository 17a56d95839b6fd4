"""Authentication between a node and the brokers: TLS and SASL."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from polybus.config import KafkaLogin, KafkaTls
from polybus.errors import ConfigError


def client_settings(tls: KafkaTls | None, login: KafkaLogin | None) -> dict[str, Any]:
    """Arguments for aiokafka's client. Raises ConfigError `config.cluster`: a file is unusable."""
    found: dict[str, Any] = {}
    try:
        if tls is not None:
            context = ssl.create_default_context(cafile=tls.ca)
            if tls.cert is not None:
                context.load_cert_chain(tls.cert, tls.key)
            found["ssl_context"] = context
        if login is not None:
            found["sasl_mechanism"] = login.mechanism
            found["sasl_plain_username"] = login.user
            found["sasl_plain_password"] = Path(login.password_file).read_text().strip()
    except (OSError, ValueError) as error:
        text = f"cluster.tls or cluster.login names a file that cannot be used: {error}"
        raise ConfigError("config.cluster", text) from error
    kinds = {(False, False): "PLAINTEXT", (True, False): "SSL", (False, True): "SASL_PLAINTEXT"}
    found["security_protocol"] = kinds.get((tls is not None, login is not None), "SASL_SSL")
    return found
