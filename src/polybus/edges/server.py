"""The server: the listeners of one bus, started and stopped together."""

import asyncio
import contextlib
import socket
from collections.abc import Collection

from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.edges.tcp.connection import Listener
from polybus.edges.tcp.shared import OpenConnection, TcpShared
from polybus.edges.udp import UdpEdge
from polybus.errors import ConfigError

BACKLOG = 4096


class Server:
    """Listens on every connector of one bus."""

    def __init__(self, edge: Edge, tcp: TcpShared) -> None:
        self._edge = edge
        self._context = edge.context
        self._tcp = tcp
        self._tcp_servers: list[asyncio.Server] = []
        self._udp_edges: list[UdpEdge] = []

    @property
    def connections(self) -> Collection[OpenConnection]:
        return self._tcp.connections

    async def start(self) -> list[str]:
        """Listen on every connector; return the addresses, `tcp://127.0.0.1:55545` and so on.

        Raises:
            ConfigError: an address or a certificate cannot be used; nothing is left open.
        """
        addresses = []
        for index, connector in enumerate(self._context.config.connectors):
            try:
                addresses.append(await self._listen(connector))
            except (ConfigError, OSError) as error:
                await self.stop()
                if isinstance(error, ConfigError):
                    raise ConfigError(error.code, f"connectors[{index}]: {error.text}") from error
                where = f"{connector.protocol} {connector.ip}:{connector.port}"
                text = f"connectors[{index}]: cannot listen on {where}: {error}"
                raise ConfigError("config.address", text) from error
        self._tcp.start()
        return addresses

    async def _listen(self, connector: Connector) -> str:
        if connector.protocol == "udp":
            edge = UdpEdge(self._edge, connector)
            self._udp_edges.append(edge)
            return f"udp://{connector.ip}:{await edge.listen()}"
        listener = Listener(self._tcp, connector)
        server = await self._context.loop.create_server(
            listener.connect, connector.ip, connector.port, backlog=BACKLOG
        )
        self._tcp_servers.append(server)
        bound: socket.socket = server.sockets[0]
        return f"tcp://{connector.ip}:{bound.getsockname()[1]}"

    async def stop(self) -> None:
        """Stop accepting, give receipts for what was read, then close every connection.

        Returns within `shutdown-timeout-s`. The caller closes the log.
        """
        for server in self._tcp_servers:
            server.close()
        for edge in self._udp_edges:
            edge.stop_reading()
        self._tcp.stop_reading()
        patience_s = self._context.config.limits.shutdown_timeout_s / 3
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._context.durability.wait_quietly(), patience_s)
        for edge in self._udp_edges:
            edge.close()
        await self._tcp.close(patience_s)
        await asyncio.sleep(0)
