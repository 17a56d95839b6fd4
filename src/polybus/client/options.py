"""What a caller may choose about a client."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass

from polybus.errors import PolybusError

ErrorListener = Callable[[PolybusError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of a client.

    Attributes:
        reconnect: whether a lost connection is made again, and subscriptions resume.
        connect_timeout_s: how long connecting, and the answer to a subscription, may take.
        receipt_timeout_s: how long a receipt may take once the message is on its way.
        close_timeout_s: how long the bus may take to read our last bytes when we leave.
        name: what the client is called in log lines.
        tls: the context for TLS connections; None means the system's certificates.
        on_error: told of refusals that no waiting call is to blame for; None means a log line.
        message_bytes_max: the largest message that is accepted.
        ready_bytes_max: how much a subscription holds that nobody has taken yet.
    """

    reconnect: bool = True
    connect_timeout_s: float = 10.0
    receipt_timeout_s: float = 30.0
    close_timeout_s: float = 5.0
    name: str = "polybus-client"
    tls: ssl.SSLContext | None = None
    on_error: ErrorListener | None = None
    message_bytes_max: int = 256 << 20
    ready_bytes_max: int = 8 << 20
