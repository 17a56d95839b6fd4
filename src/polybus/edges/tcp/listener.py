"""Accepting connections: each becomes a socket of the pump.

A service manager may hold the listening sockets and hand them to the bus at its start (systemd's
socket activation). They outlive the bus, so clients that connect during a restart wait in the
backlog.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from polybus.edges.tcp.connection import Connection
from polybus.edges.tcp.context import TcpContext

logger = logging.getLogger("polybus.tcp")

BACKLOG = 4096
ACCEPTS_MAX = 64
"""How many connections are accepted before other tasks run."""
RETRY_S = 0.1
# The system has no room for another connection now.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FIRST_HANDED_FD = 3
"""As sd_listen_fds(3) says."""


class Listener:
    """Accepts the connections of one listening socket."""

    def __init__(
        self, tcp: TcpContext, listening: socket.socket, connect: Callable[[], Connection]
    ) -> None:
        self._tcp = tcp
        self._loop = tcp.loop
        self._socket = listening
        self._connect = connect
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                connected, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    # This peer has disconnected.
                    continue
                # The peer waits in the backlog.
                logger.error("no connection can be accepted: %s", error)
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(RETRY_S, self._listen)
                return
            connected.setblocking(False)
            if connected.family != socket.AF_UNIX:
                _tune(connected)
            connection = self._connect()
            try:
                transport = self._tcp.pump.add(connected, connection)
            except OSError as error:
                logger.error("a connection cannot be watched: %s", error)
                connected.close()
                continue
            connection.connection_made(transport)


def _tune(connected: socket.socket) -> None:
    """Send at once; to a peer on this machine, where there is no network to protect, unpaced.

    Congestion control that paces packets, such as BBR, costs a tenth of the throughput there.
    """
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connected.getpeername()[0] == connected.getsockname()[0]:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


@functools.cache
def handed_sockets() -> list[socket.socket]:
    """The sockets that the service manager handed to this process, without those in use."""
    count = os.environ.pop("LISTEN_FDS", "")
    handed: list[socket.socket] = []
    if os.environ.pop("LISTEN_PID", "") != str(os.getpid()) or not count.isdecimal():
        return handed
    for fd in range(FIRST_HANDED_FD, FIRST_HANDED_FD + int(count)):
        # Child processes of the bus must not inherit them.
        os.set_inheritable(fd, False)
        opened = socket.socket(fileno=fd)
        opened.setblocking(False)
        handed.append(opened)
    return handed


def _handed(family: int, address: tuple[object, ...]) -> socket.socket | None:
    """Take the socket that was handed to this process for an address."""
    for one in handed_sockets():
        is_stream = one.family == family and one.type == socket.SOCK_STREAM
        if is_stream and one.getsockname()[:2] == address[:2]:
            handed_sockets().remove(one)
            return one
    return None


async def bind(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of the host. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, number, _, address in dict.fromkeys(found):
            handed = _handed(family, address)
            if handed is not None:
                sockets.append(handed)
                continue
            try:
                opened = socket.socket(family, kind, number)
            except OSError:
                # This system has no IPv6, or no IPv4.
                continue
            sockets.append(opened)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            opened.bind(address)
            opened.setblocking(False)
            opened.listen(BACKLOG)
    except OSError:
        for opened in sockets:
            opened.close()
        raise
    if not sockets:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    return sockets


def bind_path(path: Path) -> socket.socket:
    """A listening Unix socket that only the user of this process may open. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        opened.bind(str(path))
    except OSError:
        opened.close()
        raise
    finally:
        os.umask(before)
    opened.setblocking(False)
    opened.listen(BACKLOG)
    return opened
