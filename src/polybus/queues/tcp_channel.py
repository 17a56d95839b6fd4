"""A channel over a TCP socket."""

from __future__ import annotations

import socket
from typing import Protocol

from polybus.queues.channel import Channel, Life
from polybus.queues.limits import QueueLimits
from polybus.queues.pump import EventPump
from polybus.queues.ring import Buffer
from polybus.queues.task import Task

RECV_BYTES_MAX = 1 << 20


class Home(Protocol):
    """Where a channel's socket comes from and goes back to."""

    scratch: memoryview
    """What the channels of a pump read into: fresh memory for every read costs more than the read
    itself (page faults). Nothing refers to it once a read event is over."""

    def give_back(
        self, channel: TcpChannel, sock: socket.socket, limits: QueueLimits, *, by_us: bool
    ) -> None:
        """Close the socket; if it ends by our doing, once the other end has read everything."""
        ...


class TcpChannel(Channel):
    """Reads and writes when the loop says that the socket is ready."""

    def __init__(
        self,
        pump: EventPump,
        task: Task,
        limits: QueueLimits,
        sock: socket.socket,
        home: Home,
    ) -> None:
        super().__init__(pump, task, limits)
        self._socket = sock
        self._home = home
        self._watches_reads = False
        self._watches_writes = False

    def _readable(self) -> None:
        self._pump.enter(self._task, self._read_event)
        if not self._reads and self._watches_reads:
            self._watches_reads = False
            self._pump.loop.remove_reader(self._socket)

    def _writable(self) -> None:
        self._pump.enter(self._task, self.flush)
        if not self._writes and self._watches_writes:
            self._watches_writes = False
            self._pump.loop.remove_writer(self._socket)

    def _pull(self, size: int) -> Buffer | None:
        try:
            count = self._socket.recv_into(self._home.scratch, min(size, RECV_BYTES_MAX))
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError:
            # A reset is an end like any other: there is nothing else to read.
            return None
        return self._home.scratch[:count] if count else None

    def _push(self) -> int | None:
        try:
            return self._socket.sendmsg(self._unwritten())
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return None

    def _await_readable(self) -> None:
        if not self._watches_reads:
            self._watches_reads = True
            self._pump.loop.add_reader(self._socket, self._readable)

    def _await_writable(self) -> None:
        if not self._watches_writes:
            self._watches_writes = True
            self._pump.loop.add_writer(self._socket, self._writable)

    def _shut(self) -> None:
        self.release()
        by_us = self._life is Life.DISCONNECTED
        self._home.give_back(self, self._socket, self._limits, by_us=by_us)

    def release(self) -> None:
        """Watch the socket no more."""
        loop = self._pump.loop
        if self._watches_reads:
            loop.remove_reader(self._socket)
        if self._watches_writes:
            loop.remove_writer(self._socket)
        self._watches_reads = self._watches_writes = False

    def close(self) -> None:
        """Close the socket at once: the pump has stopped."""
        self.release()
        self._socket.close()
