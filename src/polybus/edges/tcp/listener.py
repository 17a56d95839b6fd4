"""A listener: one configured connector and what is spoken there."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from polybus.config import Connector
from polybus.edges.tcp.buffers import READ_BYTES
from polybus.edges.tcp.connection import CARRY_BYTES_MAX, Connection
from polybus.edges.tcp.layers import tls_context

if TYPE_CHECKING:
    from polybus.edges.server import Server


class Listener:
    """Makes the connections of one TCP connector."""

    def __init__(self, server: Server, connector: Connector) -> None:
        self.server = server
        self.connector = connector
        self.protocols = connector.protocols
        self.tls: ssl.SSLContext | None = (
            tls_context(connector.tls) if connector.tls is not None else None
        )
        self.read_bytes_max = READ_BYTES - CARRY_BYTES_MAX

    def connect(self) -> Connection:
        return Connection(self)

    def reject(self, connection: Connection, found: str) -> None:
        """Close a connection that speaks nothing this connector does."""
        text = f"first bytes are {found}; this connector speaks {', '.join(self.protocols)}"
        self.server.bad_peers.note(connection.name, "unknown", "detect.unknown", text)
        connection.close()
