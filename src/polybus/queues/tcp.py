"""The transport over TCP: brokers in other processes and on other machines, found by a registry."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from functools import partial

from polybus.errors import UsageError
from polybus.queues.dialing import Dialing
from polybus.queues.limits import QueueLimits
from polybus.queues.pump import EventPump
from polybus.queues.registry import Registry
from polybus.queues.task import Task
from polybus.queues.tcp_channel import RECV_BYTES_MAX, TcpChannel
from polybus.queues.transport import Attempt, Binding

BACKLOG = 1024
ACCEPTS_PER_TURN_MAX = 64
ACCEPT_PAUSE_S = 1.0
DRAIN_BYTES = 1 << 16

logger = logging.getLogger("polybus.queues")


class TcpTransport:
    """Listening sockets, channels and connects under way of the brokers of one pump."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._names: set[str] = set()
        self._pump = EventPump()  # the first broker brings the real one
        self._listening: dict[tuple[str, int], tuple[socket.socket, Binding]] = {}
        self._channels: set[TcpChannel] = set()
        self._lingering: dict[socket.socket, asyncio.TimerHandle] = {}
        self._dialing = Dialing(registry, self._channel)
        self.scratch = memoryview(bytearray(RECV_BYTES_MAX))

    def join(self, name: str, pump: EventPump) -> None:
        if name in self._names:
            raise UsageError("queue.name-taken", f"there is a broker {name!r} already")
        if self._names and pump is not self._pump:
            raise UsageError("queue.pump-other", "the brokers of a transport share one pump")
        if not self._names:
            self._pump = pump
            pump.own(self)
        self._names.add(name)

    # Accepting

    def bind(self, name: str, port: int, binding: Binding) -> bool:
        """As Transport says; false as well if another program has the TCP port.

        Raises:
            UsageError: `queue.name-unknown`, or `queue.bind-failed` if this machine cannot.
        """
        if (name, port) in self._listening:
            return False
        place = self._registry.place(name)
        address = (place.host, 0) if place and place.any_port else None
        address = address or self._registry.address(name, port)
        if place is None or address is None:
            text = f"the registry has no place for port {port} of {name!r}"
            raise UsageError("queue.name-unknown", text)
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        try:
            sock = socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            text = f"cannot listen on {address[0]} port {address[1]}: {error.strerror}"
            raise UsageError("queue.bind-failed", text) from error
        sock.setblocking(False)
        place.taken[port] = sock.getsockname()[1]
        self._listening[name, port] = (sock, binding)
        self._watch(sock, binding)
        return True

    def unbind(self, name: str, port: int) -> bool:
        listening = self._listening.pop((name, port), None)
        if listening is None:
            return False
        sock, binding = listening
        self._pump.loop.remove_reader(sock)
        # Who got through to the socket before was connected, and is accepted still.
        while self._accept(sock, binding):
            pass
        sock.close()
        place = self._registry.place(name)
        if place is not None:
            place.taken.pop(port, None)
        return True

    def _watch(self, sock: socket.socket, binding: Binding) -> None:
        if sock.fileno() >= 0:
            ready = partial(self._accept_ready, sock, binding)
            enter = partial(self._pump.enter, binding.task, ready)
            self._pump.loop.add_reader(sock, enter)

    def _accept_ready(self, sock: socket.socket, binding: Binding) -> None:
        try:
            for _ in range(ACCEPTS_PER_TURN_MAX):
                if not self._accept(sock, binding):
                    return
        except OSError as error:
            # Out of file descriptors, most likely: the socket would be ready for ever meanwhile.
            logger.warning("cannot accept, paused for %s s: %s", ACCEPT_PAUSE_S, error)
            self._pump.loop.remove_reader(sock)
            self._pump.loop.call_later(ACCEPT_PAUSE_S, self._watch, sock, binding)

    def _accept(self, sock: socket.socket, binding: Binding) -> bool:
        """Take one connect; false if there is none."""
        try:
            accepted, peer = sock.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionAbortedError:
            return True
        channel = self._channel(accepted, binding.task, binding.limits)
        if channel is not None:
            event = partial(binding.accepted, channel)
            tell = partial(self._pump.soon, binding.task, event)
            # The connecting end, if it is ours, hears of it before the accepting one.
            self._dialing.after_connected(peer, tell)
        return True

    # Connecting

    def connect(self, name: str, port: int, attempt: Attempt) -> bool:
        if self._registry.place(name) is None:
            self._pump.soon(attempt.task, attempt.refused)
            return False
        self._dialing.start(self._pump, name, port, attempt)
        return True

    # Channels

    def _channel(self, sock: socket.socket, task: Task, limits: QueueLimits) -> TcpChannel | None:
        """A channel on a connected socket; None, and the socket closed, if there are too many."""
        if len(self._channels) >= limits.connections_max:
            sock.close()
            return None
        sock.setblocking(False)
        # Messages of a turn are written together already; holding them back only costs time.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = TcpChannel(self._pump, task, limits, sock, self)
        self._channels.add(channel)
        return channel

    def give_back(
        self, channel: TcpChannel, sock: socket.socket, limits: QueueLimits, *, by_us: bool
    ) -> None:
        self._channels.discard(channel)
        if not by_us:
            sock.close()
            return
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            sock.close()
            return
        # Closing a socket with unread bytes resets it, and takes what is on its way to the other
        # end along. So what still comes is read and dropped until that end has seen ours.
        loop = self._pump.loop
        self._lingering[sock] = loop.call_later(limits.linger_s, self._end_lingering, sock)
        loop.add_reader(sock, self._drain, sock)

    def _drain(self, sock: socket.socket) -> None:
        try:
            ended = not sock.recv(DRAIN_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            ended = True
        if ended:
            self._end_lingering(sock)

    def _end_lingering(self, sock: socket.socket) -> None:
        self._lingering.pop(sock).cancel()
        self._pump.loop.remove_reader(sock)
        sock.close()

    def close(self) -> None:
        """Close every socket: the pump has stopped."""
        self._dialing.close()
        for sock in list(self._lingering):
            self._end_lingering(sock)
        for sock, _ in self._listening.values():
            self._pump.loop.remove_reader(sock)
            sock.close()
        self._listening.clear()
        for channel in list(self._channels):
            channel.close()
        self._channels.clear()
