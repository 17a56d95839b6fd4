"""goMS over UDP: a datagram holds whole objects, and an address is a client.

An address that sends nothing for `udp-idle-s` is forgotten with its registrations. So is one beyond
loopback that has sent no proof for that time.

An address beyond loopback may be forged. So it must be proven first: the bus answers every datagram
from it with a key, in a datagram that is not larger, and does nothing else. A client that returns
the key can receive at that address. The key is derived from the address and the time, so a flood of
forged addresses leaves no state.

A proof expires too: after half of `udp-idle-s` every datagram from a proven address is answered
with a key, and only its return keeps the address. So the bus cannot be made to send forever to an
address whose client is gone.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Hashable, Sequence

from polybus.batch import Batch, Buffer
from polybus.bus.subscriptions import Publisher
from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.edges.protocols.goms import GomsTranslator
from polybus.edges.protocols.peer import Peer
from polybus.errors import ConfigError
from polybus.services.accounts.accounts import is_loopback, source_of
from polybus.wire.goms import Event, Prove, decode_datagram, encode_prove

DATAGRAM_BYTES_MAX = 65507
SWEEP_S = 5.0
KEY_S = 10.0
"""A key is valid for at least this time, and less than twice as long."""
# Short, because the datagram with the key may not be larger than the one it answers.
KEY_BYTES = 5
SOURCE_SHARE = 10
"""The share of all remembered addresses that one machine, or one IPv6 network, may have."""
UdpAddress = tuple[str, int]


class UdpPeer(Peer):
    """One address. Its datagrams cannot be held back, and everything is sent at once."""

    def __init__(self, edge: "UdpEdge", address: UdpAddress) -> None:
        self._edge = edge
        self._address = address
        self.ip = address[0]
        self.name = f"{address[0]}:{address[1]}{edge.edge.context.node}"
        self.heard_s = 0.0
        """When the address was last proven."""

    def send(
        self, data: Buffer, batches: Sequence[Batch] = (), publisher: Publisher | None = None
    ) -> None:
        self._edge.send(data, self._address)

    def release(self, gate: Hashable) -> None:
        """A login or a download has ended."""
        self._edge.forget_unused(self._address)

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
        self._by_source: Counter[str] = Counter()
        self._transport: asyncio.DatagramTransport | None = None
        self._stopping = False
        self._paused = False
        self._sweep: asyncio.TimerHandle | None = None
        self._secret = secrets.token_bytes(32)

    async def listen(self) -> int:
        """Open the socket and return its port."""
        if "goms" not in self.connector.protocols:
            text = f"a udp connector must speak goms, not {', '.join(self.connector.protocols)}"
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
        """Ignore further datagrams; answers are sent until `close`."""
        self._stopping = True

    def datagram_received(self, data: bytes, addr: UdpAddress) -> None:
        if self._stopping:
            return
        events = decode_datagram(data, self._limits)
        known = self._peers.get(addr)
        is_local = is_loopback(addr[0])
        is_proven = is_local or self._is_proven(known, data, addr, events)
        if known is None and not is_proven:
            return
        if known is None:
            source = "" if is_local else source_of(addr[0])
            share = max(1, self._limits.udp_peers_max // SOURCE_SHARE)
            is_crowded = source and self._by_source[source] >= share
            if is_crowded or len(self._peers) >= self._limits.udp_peers_max:
                self.edge.bad_peers.record(
                    addr[0], "goms", "udp.too-many", "too many addresses (udp-peers-max)"
                )
                return
            self._by_source[source] += 1
            new = UdpPeer(self, addr)
            known = self._peers[addr] = new, GomsTranslator(self.edge, new, self.connector)
        peer, translator = known
        if is_proven:
            peer.heard_s = self._loop.time()
        if translator.is_logging_in:
            # It cannot be held back, and must not fill our memory meanwhile.
            self.edge.bad_peers.count("udp.dropped", 1)
            return
        for event in events:
            if not isinstance(event, Prove):
                translator.take(event)
        self.forget_unused(addr)

    def forget_unused(self, address: UdpAddress) -> None:
        """Forget an address without state, so that a flood of forged ones leaves nothing."""
        known = self._peers.get(address)
        if known is None or not is_loopback(address[0]):
            return
        translator = known[1]
        is_itself = translator.access is self.edge.accounts.without_login(address[0])
        if is_itself and translator.is_idle:
            self.forget(address)

    def _is_proven(
        self,
        known: tuple[UdpPeer, GomsTranslator] | None,
        data: bytes,
        address: UdpAddress,
        events: list[Event],
    ) -> bool:
        """Whether the address of a datagram is proven; recently proven ones need no new proof."""
        if known is not None and not any(isinstance(event, Prove) for event in events):
            is_recent = self._loop.time() - known[0].heard_s < self._limits.udp_idle_s / 2
            if is_recent:
                return False
        return self._prove(data, address, events, is_known=known is not None)

    def _prove(
        self, data: bytes, address: UdpAddress, events: list[Event], *, is_known: bool
    ) -> bool:
        """Whether a datagram proves its address; otherwise send a key."""
        now = int(self._loop.time() / KEY_S)
        given = [event.key.encode() for event in events if isinstance(event, Prove)]
        keys = [self._key(address, moment) for moment in (now, now - 1)]
        is_proven = any(hmac.compare_digest(one, key.encode()) for one in given for key in keys)
        if is_proven and is_known:
            # A client returns each key: answering that would loop forever.
            return True
        answer = encode_prove(keys[0])
        if len(answer) <= len(data):
            self.send(answer, address)
        else:
            self.edge.bad_peers.count("udp.answer-withheld", 1)
        return is_proven

    def _key(self, address: UdpAddress, moment: int) -> str:
        text = f"{address[0]} {address[1]} {moment}".encode()
        return hashlib.blake2b(text, key=self._secret, digest_size=KEY_BYTES).hexdigest()

    def members(self) -> list[GomsTranslator]:
        return [translator for _, translator in self._peers.values()]

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
            source = "" if is_loopback(address[0]) else source_of(address[0])
            self._by_source[source] -= 1
            if not self._by_source[source]:
                del self._by_source[source]
            known[1].leave_all()
            known[1].let_go()

    def _forget_idle(self) -> None:
        self._sweep = self._loop.call_later(SWEEP_S, self._forget_idle)
        oldest = self._loop.time() - self._limits.udp_idle_s
        for address, (peer, _) in list(self._peers.items()):
            if peer.heard_s < oldest:
                self.forget(address)
