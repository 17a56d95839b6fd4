"""goMS over UDP: a datagram holds whole objects, and an address is a client.

An address that sends nothing for `udp-idle-s` is forgotten with its registrations. An answer to an
address that may be forged is never larger than the request, and nothing is replayed to it, so that
the bus cannot be used for reflection. Loopback addresses are trusted.
"""

import asyncio
import ipaddress
from collections.abc import Sequence

from polybus.batch import Batch, Buffer
from polybus.bus.subscriptions import Publisher
from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.edges.protocols.goms import GomsTranslator
from polybus.edges.protocols.translator import Peer
from polybus.errors import ConfigError
from polybus.wire.goms import decode_datagram

DATAGRAM_BYTES_MAX = 65507
SWEEP_S = 5.0
UdpAddress = tuple[str, int]


class UdpPeer(Peer):
    """One address. Its datagrams cannot be held back, and everything is sent at once."""

    def __init__(self, edge: "UdpEdge", address: UdpAddress) -> None:
        self._edge = edge
        self._address = address
        self.proven = ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
        self.name = f"{address[0]}:{address[1]}"
        self.heard_s = 0.0
        # How many bytes of answers it may get: for the current datagram, and in total.
        self.allowance_now: int | None = None
        self.allowance = 0

    def send(
        self, data: Buffer, batches: Sequence[Batch] = (), publisher: Publisher | None = None
    ) -> None:
        if not self.proven and not batches:
            size = len(data)
            now = self.allowance_now
            if size > self.allowance or (now is not None and size > now):
                self._edge.edge.bad_peers.count("udp.answer-withheld", 1)
                return
            self.allowance -= size
            if now is not None:
                self.allowance_now = now - size
        self._edge.send(data, self._address)

    def close(self) -> None:
        self._edge.forget(self._address)


class UdpEdge(asyncio.DatagramProtocol):
    """One UDP connector."""

    def __init__(self, edge: Edge, connector: Connector) -> None:
        self.edge = edge
        self._loop = edge.context.loop
        self._limits = edge.context.config.limits
        self.connector = connector
        # Peers do not refer to their translators, which refer to them.
        self._peers: dict[UdpAddress, tuple[UdpPeer, GomsTranslator]] = {}
        self._transport: asyncio.DatagramTransport | None = None
        self._stopping = False
        self._paused = False
        self._sweep: asyncio.TimerHandle | None = None

    async def listen(self) -> int:
        """Open the socket and return its port."""
        if "goms" not in self.connector.protocols:
            text = f"a udp connector speaks goms, not {', '.join(self.connector.protocols)}"
            raise ConfigError("config.invalid", f"connectors: {text}")
        transport, _ = await self._loop.create_datagram_endpoint(
            lambda: self, local_addr=(self.connector.ip, self.connector.port)
        )
        self._transport = transport
        self._sweep = self._loop.call_later(SWEEP_S, self._forget_idle)
        port: int = transport.get_extra_info("sockname")[1]
        return port

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for address in list(self._peers):
            self.forget(address)
        if self._transport is not None:
            self._transport.close()

    def stop_reading(self) -> None:
        """Ignore what still comes; answers go out until `close`."""
        self._stopping = True

    def datagram_received(self, data: bytes, addr: UdpAddress) -> None:
        if self._stopping:
            return
        known = self._peers.get(addr)
        if known is None:
            if len(self._peers) >= self._limits.udp_peers_max:
                self.edge.bad_peers.note(
                    addr[0], "goms", "udp.too-many", "too many addresses (udp-peers-max)"
                )
                return
            new = UdpPeer(self, addr)
            known = self._peers[addr] = new, GomsTranslator(self.edge, new, self.connector)
        peer, translator = known
        peer.heard_s = self._loop.time()
        peer.allowance += len(data)
        peer.allowance_now = len(data)
        for event in decode_datagram(data, self._limits):
            translator.handle(event)
        peer.allowance_now = None
        if not translator.subscriptions:
            # Nothing to remember: a flood of forged addresses leaves nothing behind.
            self.forget(addr)

    def pause_writing(self) -> None:
        """The network is too slow: what it does not take is lost, as datagrams are."""
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def send(self, data: Buffer, address: UdpAddress) -> None:
        """Send lines, as many whole ones as fit in each datagram."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._paused:
            self.edge.bad_peers.count("udp.dropped", 1)
            return
        if len(data) <= DATAGRAM_BYTES_MAX:
            self._transport.sendto(data, address)
            return
        lines = bytes(data).splitlines(keepends=True)
        packet: list[bytes] = []
        size = 0
        for line in lines:
            if size + len(line) > DATAGRAM_BYTES_MAX and packet:
                self._transport.sendto(b"".join(packet), address)
                packet, size = [], 0
            if len(line) > DATAGRAM_BYTES_MAX:
                self.edge.bad_peers.count("udp.message-too-large", 1)
                continue
            packet.append(line)
            size += len(line)
        if packet:
            self._transport.sendto(b"".join(packet), address)

    def forget(self, address: UdpAddress) -> None:
        known = self._peers.pop(address, None)
        if known is not None:
            known[1].leave_all()

    def _forget_idle(self) -> None:
        self._sweep = self._loop.call_later(SWEEP_S, self._forget_idle)
        oldest = self._loop.time() - self._limits.udp_idle_s
        for address, (peer, _) in list(self._peers.items()):
            if peer.heard_s < oldest:
                self.forget(address)
