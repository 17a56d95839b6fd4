# cython: annotation_typing=False
"""A connection's socket, with the methods of an asyncio transport: the pump reads and writes it.

Writing: what the socket does not take at once waits here, and the connection is paused until all of
it is out. Reading: the pump reads while `watched` has READABLE.

A socket that is neither read nor written is not in the epoll. So a peer that vanishes while it is
held back is noticed when it is read again, and costs nothing meanwhile.

Compiled as it is (transport.pxd), or run as it is.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol

try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython
if not cython.compiled:
    from polybus.edges.tcp.sockets_py import READABLE, WRITABLE, Readiness, transmit

if TYPE_CHECKING:
    from polybus.batch import Buffer
    from polybus.wire.codec import PlainCodec

READ_BYTES_FIRST = 64 << 10


class PumpedConnection(Protocol):
    """The interface of a connection for the pump."""

    name: str
    carry: bytes
    """Bytes of an unfinished message; they belong before the next read."""
    unfinished_bytes: int
    translator: Any

    def receive(self, data: Buffer) -> None:
        """Handle bytes, the carry included."""
        ...

    def message_completed(self) -> None:
        """A message that began in an earlier read has ended."""
        ...

    def eof_received(self) -> bool:
        """The peer sends no more; whether to keep the socket open."""
        ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, error: Exception | None) -> None: ...

    def hold(self, gate: Hashable) -> bool: ...

    def release(self, gate: Hashable) -> None: ...


@cython.cclass
class ReadInterceptor:
    """Intercepts some of a connection's reads."""

    __slots__ = ()

    def take(self, data: Buffer, start: int, stop: int) -> bool:
        """Take this part of the data; False if it is for the connection."""
        return False


@cython.cclass
class SocketTransport:
    """See the module docstring.

    Attributes:
        plain: the connection's codec while its messages may be published with those of others.
        access: what its peer may do, while `plain` is set.
        taker: gets reads before the connection, and takes those that it can handle.
        read_bytes: how much the pump reads at once.
        watched: what the epoll watches for.
        exempt_until, gathers, is_gathering, is_narrow, large_bytes, messages, small_reads, tick:
            the pump's, for peers that write single messages.
    """

    __slots__ = (
        "_ends_output",
        "_forget",
        "_has_ended",
        "_is_closed",
        "_is_closing",
        "_is_reading",
        "_loop",
        "_readiness",
        "_waiting",
        "access",
        "connection",
        "exempt_until",
        "fd",
        "gathers",
        "is_gathering",
        "is_narrow",
        "large_bytes",
        "messages",
        "plain",
        "read_bytes",
        "small_reads",
        "socket",
        "taker",
        "tick",
        "watched",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        readiness: Readiness,
        connected: socket.socket,
        connection: PumpedConnection,
        forget: Callable[[SocketTransport], None],
    ) -> None:
        """`forget` is called when the socket is closed."""
        self._loop = loop
        self._readiness = readiness
        self._forget = forget
        self.socket = connected
        self.fd = connected.fileno()
        self.connection: PumpedConnection = connection
        self.plain: PlainCodec[Any] | None = None
        self.access: Any = None
        self.taker: ReadInterceptor | None = None
        self.read_bytes = READ_BYTES_FIRST
        # Bytes that the socket has not taken yet; most sockets take everything at once, and an
        # empty deque has 760 bytes.
        self._waiting: deque[Buffer] | None = None
        self.watched = 0
        # The tick of the last small read, and the ticks in a row of which the end was waited for.
        self.tick = 0
        self.is_gathering = False
        self.gathers = 0
        # How many messages the last read at the end of a tick had. After fewer than two, its peer
        # does not wait again before the tick `exempt_until`.
        self.messages = 0
        self.exempt_until = 0
        # Small reads in a row; the bytes of other reads while its peer has a narrow window.
        self.small_reads = 0
        self.large_bytes = 0
        self.is_narrow = False
        self._is_reading = True
        self._has_ended = False
        self._ends_output = False
        self._is_closing = False
        self._is_closed = False

    # Reading

    def pause_reading(self) -> None:
        self._is_reading = False
        self.watch()

    def resume_reading(self) -> None:
        self._is_reading = True
        self.watch()

    def may_read(self) -> bool:
        return self._is_reading and not (self._has_ended or self._is_closing or self._is_closed)

    def watch(self) -> None:
        """Update the events that the epoll watches for."""
        events = 0
        if not self._is_closed:
            if self.may_read() and not self.is_gathering:
                events = READABLE
            if self._waiting:
                events |= WRITABLE
        if events != self.watched:
            self._readiness.watch(self.fd, events, self.watched)
            self.watched = events

    def ended(self) -> None:
        """The peer sends no more."""
        self._has_ended = True
        self.watch()
        if not self.connection.eof_received():
            self.close()

    # Writing

    def write(self, data: Buffer) -> None:
        """Write what the socket takes; the rest when it takes more."""
        if self._is_closed or self._ends_output:
            return
        if not self._waiting:
            sent = transmit(self.fd, data)
            if sent == len(data):
                return
            if sent < 0:
                if sent != -errno.EAGAIN:
                    self.fail(-sent)
                    return
                sent = 0
            self._waiting = deque((memoryview(data)[sent:] if sent else data,))
            self.watch()
            self.connection.pause_writing()
        elif len(data):
            self._waiting.append(data)

    def writable(self) -> None:
        """The socket takes more."""
        waiting = self._waiting
        while waiting:
            data = waiting[0]
            sent = transmit(self.fd, data)
            if sent < 0:
                if sent != -errno.EAGAIN:
                    self.fail(-sent)
                return
            if sent < len(data):
                waiting[0] = memoryview(data)[sent:]
                return
            waiting.popleft()
        self._waiting = None
        self.watch()
        self.connection.resume_writing()
        if self._waiting or self._is_closed:
            return
        if self._is_closing:
            self._end(None)
        elif self._ends_output:
            self._shut_down()

    def get_write_buffer_size(self) -> int:
        return sum([len(data) for data in self._waiting or ()])

    # Ending

    def write_eof(self) -> None:
        """Send EOF after what was written. Raises OSError."""
        if not self._ends_output and not self.is_closing():
            self._ends_output = True
            if not self._waiting:
                self.socket.shutdown(socket.SHUT_WR)

    def _shut_down(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        """Close after what was written."""
        if self.is_closing():
            return
        self._is_closing = True
        if self._waiting:
            self.watch()
        else:
            self._end(None)

    def abort(self) -> None:
        """Close at once."""
        self._end(None)

    def fail(self, number: int) -> None:
        """A system call failed: the connection is lost."""
        self._end(OSError(number, os.strerror(number)))

    def _end(self, error: Exception | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._waiting = None
        self.watch()
        # Not synchronously: the caller may be in the middle of its work.
        self._loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        connection, self.connection = self.connection, _NOBODY
        self.plain = self.taker = None
        self._forget(self)
        self.socket.close()
        connection.connection_lost(error)

    def is_closing(self) -> bool:
        return self._is_closing or self._is_closed

    # About the socket

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        try:
            match name:
                case "socket":
                    return self.socket
                case "peername":
                    return self.socket.getpeername()
                case "sockname":
                    return self.socket.getsockname()
        except OSError:
            # The peer is gone.
            pass
        return default


class _NullConnection:
    """Stands for the connection of a transport that is closed."""

    name = ""
    carry = b""
    unfinished_bytes = 0
    translator = None

    def receive(self, data: Buffer) -> None:
        return

    def message_completed(self) -> None:
        return

    def eof_received(self) -> bool:
        return True

    def pause_writing(self) -> None:
        return

    def resume_writing(self) -> None:
        return

    def connection_lost(self, error: Exception | None) -> None:
        return

    def hold(self, gate: Hashable) -> bool:
        return False

    def release(self, gate: Hashable) -> None:
        return


_NOBODY = _NullConnection()
