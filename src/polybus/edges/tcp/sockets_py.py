"""System calls on sockets that never block: the pure-Python twin of `_sockets.pyx`.

    receive, transmit   how many bytes were read or written; 0 at the peer's end; a negative errno

Sockets are non-blocking, so nothing here waits. `Readiness` is an epoll, level-triggered.
"""

import os
import select

from polybus.batch import Buffer

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
EVENTS_MAX = 256


def receive(fd: int, view: memoryview, start: int, stop: int) -> int:
    """Read into `view[start:stop]`."""
    try:
        return os.readv(fd, [view[start:stop]])
    except OSError as error:
        return -(error.errno or 1)


def transmit(fd: int, data: Buffer) -> int:
    """Write as much as the socket takes."""
    try:
        return os.write(fd, data)
    except OSError as error:
        return -(error.errno or 1)


class Readiness:
    """Which of many sockets can be read or written."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._found: list[tuple[int, int]] = []

    def fileno(self) -> int:
        return -1 if self._epoll.closed else self._epoll.fileno()

    def watch(self, fd: int, events: int, before: int) -> None:
        """Watch for READABLE, WRITABLE, both or nothing; `before` is what was watched for."""
        if not before:
            self._epoll.register(fd, events)
        elif events:
            self._epoll.modify(fd, events)
        else:
            self._epoll.unregister(fd)

    def find(self) -> int:
        """Look which sockets are ready now; return how many, at most EVENTS_MAX."""
        self._found = self._epoll.poll(0, EVENTS_MAX)
        return len(self._found)

    def fd(self, index: int) -> int:
        """The descriptor of a socket that was found."""
        return self._found[index][0]

    def events(self, index: int) -> int:
        return self._found[index][1]

    def close(self) -> None:
        self._epoll.close()
