"""The settings of a client, and the address of its bus."""

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from polybus.client.urls import Address
from polybus.errors import PolybusError

log = logging.getLogger("polybus.client")
ErrorListener = Callable[[PolybusError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Settings of a client; `connect` explains those that are not here.

    Attributes:
        close_timeout_s: how long the bus may take to read our last bytes on close.
        tls: the context for TLS connections; None means the system's certificates.
        message_bytes_max: the largest message that is accepted.
        ready_bytes_max: how many bytes a subscription holds that were not read yet.
    """

    address: Address
    reconnect: bool = True
    connect_timeout_s: float = 10.0
    receipt_timeout_s: float = 30.0
    close_timeout_s: float = 5.0
    name: str = "polybus-client"
    tls: ssl.SSLContext | None = None
    on_error: ErrorListener | None = None
    message_bytes_max: int = 256 << 20
    ready_bytes_max: int = 8 << 20

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """The context for TLS connections to the bus; None for plain ones."""
        return (self.tls or ssl.create_default_context()) if self.address.tls else None

    def report(self, error: PolybusError) -> None:
        """Pass an error that no waiting call can raise to `on_error`, or log it."""
        if self.on_error is not None:
            self.on_error(error)
        else:
            log.warning("%s: %s", self.name, error)
