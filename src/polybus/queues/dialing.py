"""Connects under way over TCP: resolve, dial, try again until the time is up."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from polybus.queues.channel import Channel
from polybus.queues.limits import QueueLimits
from polybus.queues.pump import EventPump
from polybus.queues.registry import Registry
from polybus.queues.task import Task
from polybus.queues.transport import Attempt

RETRY_S = 0.02
ChannelMaker = Callable[[socket.socket, Task, QueueLimits], Channel | None]
SocketAddress = tuple[Any, ...]


class Dialing:
    """The connects of one transport.

    Where the accepting end is in this process too, it may see the connection first. Such an end
    leaves word with `after_connected`, and has its turn when the connecting one had its own.
    """

    def __init__(self, registry: Registry, channel: ChannelMaker) -> None:
        self._registry = registry
        self._channel = channel
        self._afterwards: dict[SocketAddress, list[Callable[[], object]]] = {}
        self._running: set[asyncio.Task[None]] = set()

    def start(self, pump: EventPump, name: str, port: int, attempt: Attempt) -> None:
        running = pump.loop.create_task(self._connect(pump, name, port, attempt))
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    def after_connected(self, peer: SocketAddress, tell: Callable[[], object]) -> None:
        """Call `tell` once the connect from `peer` is through: now, unless it is one of these."""
        afterwards = self._afterwards.get(peer)
        if afterwards is None:
            tell()
        else:
            afterwards.append(tell)

    def close(self) -> None:
        for running in self._running:
            running.cancel()

    async def _connect(self, pump: EventPump, name: str, port: int, attempt: Attempt) -> None:
        deadline_s = pump.loop.time() + attempt.timeout_s
        while True:
            sock = await self._dial(self._registry.address(name, port), attempt.limits)
            if sock is not None:
                break
            left_s = deadline_s - pump.loop.time()
            if left_s <= 0:
                pump.enter(attempt.task, attempt.refused)
                return
            await asyncio.sleep(min(RETRY_S, left_s))
        pump.enter(attempt.task, partial(self._connected, sock, attempt))

    def _connected(self, sock: socket.socket, attempt: Attempt) -> None:
        afterwards = self._afterwards.pop(sock.getsockname(), [])
        try:
            channel = self._channel(sock, attempt.task, attempt.limits)
            if channel is None:
                attempt.refused()
            else:
                attempt.connected(channel)
        finally:
            for tell in afterwards:
                tell()

    async def _dial(
        self, address: tuple[str, int] | None, limits: QueueLimits
    ) -> socket.socket | None:
        """A connected socket, or None."""
        if address is None:
            return None
        try:
            for family, where in await _resolve(*address):
                sock = socket.socket(family, socket.SOCK_STREAM)
                if await self._reach(sock, where, limits.dial_timeout_s):
                    return sock
        except OSError:
            return None
        return None

    async def _reach(self, sock: socket.socket, where: SocketAddress, timeout_s: float) -> bool:
        """Connect the socket; on failure it is closed."""
        ours: SocketAddress = ()
        reached = False
        try:
            sock.setblocking(False)
            if sock.connect_ex(where) not in (0, errno.EINPROGRESS):
                return False
            ours = sock.getsockname()
            self._afterwards[ours] = []
            async with asyncio.timeout(timeout_s):
                await _writable(sock)
            # A socket that dials a free port of its own machine can end up connected to itself.
            refused = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or ours == where
            reached = not refused
            return reached
        except TimeoutError:
            return False
        finally:
            if not reached:
                sock.close()
                for tell in self._afterwards.pop(ours, []):
                    tell()


async def _resolve(host: str, port: int) -> list[tuple[int, SocketAddress]]:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(family, where) for family, _, _, _, where in found]
    if version == 6:
        return [(socket.AF_INET6, (host, port, 0, 0))]
    return [(socket.AF_INET, (host, port))]


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(sock)
