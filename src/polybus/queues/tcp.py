"""The TCP transport: brokers in other processes and on other machines, found by a registry."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from polybus.batch import Buffer
from polybus.errors import UsageError
from polybus.queues.channel import Attempt, Binding, Channel, ChannelState, QueueLimits
from polybus.queues.pump import EventPump, Task
from polybus.queues.registry import Registry

BACKLOG = 1024
ACCEPTS_PER_TURN_MAX = 64
ACCEPT_PAUSE_S = 1.0
RECV_BYTES_MAX = 1 << 20
DRAIN_BYTES = 1 << 16
RETRY_S = 0.02
SocketAddress = tuple[Any, ...]

logger = logging.getLogger("polybus.queues")


class TcpChannel(Channel):
    """Reads and writes when the loop reports that the socket is ready."""

    def __init__(
        self, transport: "TcpTransport", task: Task, limits: QueueLimits, sock: socket.socket
    ) -> None:
        super().__init__(transport.pump, task, limits)
        self._socket = sock
        self._transport = transport
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
        scratch = self._transport.scratch
        try:
            count = self._socket.recv_into(scratch, min(size, RECV_BYTES_MAX))
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError:
            # A reset ends the stream too: there is nothing more to read.
            return None
        return scratch[:count] if count else None

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
        self._unwatch()
        lingers = self._state is ChannelState.DISCONNECTED
        self._transport.release(self, self._socket, self._limits.linger_s if lingers else None)

    def _unwatch(self) -> None:
        self._pump.loop.remove_reader(self._socket)
        self._pump.loop.remove_writer(self._socket)
        self._watches_reads = self._watches_writes = False

    def close(self) -> None:
        """Close the socket at once: the pump has stopped."""
        self._unwatch()
        self._socket.close()


class TcpTransport:
    """The listening sockets, channels and connects in progress of the brokers of one pump."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._names: set[str] = set()
        self.pump = EventPump()  # replaced by the pump of the first broker
        self._listening: dict[tuple[str, int], tuple[socket.socket, Binding]] = {}
        self._channels: set[TcpChannel] = set()
        self._lingering: dict[socket.socket, asyncio.TimerHandle] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        # If the accepting end is in this process too, it may see the connection first. Then its
        # notifications wait here, by our address, until `connected` was called.
        self._afterwards: dict[SocketAddress, list[Callable[[], object]]] = {}
        self.scratch = memoryview(bytearray(RECV_BYTES_MAX))
        """The read buffer of all channels: allocating one for each read costs more than the read
        itself (page faults). Nothing refers to it after the read event."""

    def join(self, name: str, pump: EventPump) -> None:
        if name in self._names:
            raise UsageError("queue.name-taken", f"a broker named {name!r} already exists")
        if self._names and pump is not self.pump:
            raise UsageError("queue.pump-other", "all brokers of a transport must share one pump")
        if not self._names:
            self.pump = pump
            pump.at_stop(self.close)
        self._names.add(name)

    # Accepting

    def bind(self, name: str, port: int, binding: Binding) -> bool:
        """As in LocalTransport; also false if another program uses the TCP port.

        Raises:
            UsageError: `queue.name-unknown`, or `queue.bind-failed` if this machine cannot listen
                on the address.
        """
        if (name, port) in self._listening:
            return False
        address = self._registry.address(name, port, binds=True)
        if address is None:
            text = f"the registry has no address for port {port} of {name!r}; add it first"
            raise UsageError("queue.name-unknown", text)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            sock = socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            text = f"cannot listen on {address[0]} port {address[1]}: {error.strerror}"
            raise UsageError("queue.bind-failed", text) from error
        sock.setblocking(False)
        self._registry.bound(name, port, sock.getsockname()[1])
        self._listening[name, port] = (sock, binding)
        self._watch(sock, binding)
        return True

    def unbind(self, name: str, port: int) -> bool:
        listening = self._listening.pop((name, port), None)
        if listening is None:
            return False
        sock, binding = listening
        self.pump.loop.remove_reader(sock)
        # Peers whose handshake is complete believe they are connected, so they are accepted.
        while self._accept(sock, binding):
            pass
        sock.close()
        self._registry.bound(name, port, None)
        return True

    def _watch(self, sock: socket.socket, binding: Binding) -> None:
        if sock.fileno() >= 0:
            ready = partial(self._accept_ready, sock, binding)
            enter = partial(self.pump.enter, binding.task, ready)
            self.pump.loop.add_reader(sock, enter)

    def _accept_ready(self, sock: socket.socket, binding: Binding) -> None:
        try:
            for _ in range(ACCEPTS_PER_TURN_MAX):
                if not self._accept(sock, binding):
                    return
        except OSError as error:
            # Most likely out of file descriptors; without a pause the loop would spin.
            logger.warning("cannot accept, paused for %s s: %s", ACCEPT_PAUSE_S, error)
            self.pump.loop.remove_reader(sock)
            self.pump.loop.call_later(ACCEPT_PAUSE_S, self._watch, sock, binding)

    def _accept(self, sock: socket.socket, binding: Binding) -> bool:
        """Accept one connection; false if none waits."""
        try:
            accepted, peer = sock.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionAbortedError:
            return True
        channel = self._channel(accepted, binding.task, binding.limits)
        if channel is not None:
            event = partial(binding.accepted, channel)
            notify = partial(self.pump.soon, binding.task, event)
            if peer in self._afterwards:
                self._afterwards[peer].append(notify)
            else:
                notify()
        return True

    # Connecting

    def connect(self, name: str, port: int, attempt: Attempt) -> bool:
        if name not in self._registry:
            self.pump.soon(attempt.task, attempt.refused)
            return False
        connecting = self.pump.loop.create_task(self._connect(name, port, attempt))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)
        return True

    async def _connect(self, name: str, port: int, attempt: Attempt) -> None:
        deadline_s = self.pump.loop.time() + attempt.timeout_s
        while True:
            address = self._registry.address(name, port)
            sock = address and await self._dial(address, attempt.limits.dial_timeout_s)
            if sock is not None:
                break
            left_s = deadline_s - self.pump.loop.time()
            if left_s <= 0:
                self.pump.enter(attempt.task, attempt.refused)
                return
            await asyncio.sleep(min(RETRY_S, left_s))
        self.pump.enter(attempt.task, partial(self._connected, sock, attempt))

    def _connected(self, sock: socket.socket, attempt: Attempt) -> None:
        afterwards = self._afterwards.pop(sock.getsockname(), [])
        try:
            channel = self._channel(sock, attempt.task, attempt.limits)
            if channel is None:
                attempt.refused()
            else:
                attempt.connected(channel)
        finally:
            for notify in afterwards:
                notify()

    async def _dial(self, address: tuple[str, int], timeout_s: float) -> socket.socket | None:
        """A connected socket, or None."""
        with contextlib.suppress(OSError):
            found = await self.pump.loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
            for family, _, _, _, target in found:
                sock = socket.socket(family, socket.SOCK_STREAM)
                if await self._reach(sock, target, timeout_s):
                    return sock
        return None

    async def _reach(self, sock: socket.socket, target: SocketAddress, timeout_s: float) -> bool:
        """Connect the socket; close it on failure."""
        ours: SocketAddress = ()
        reached = False
        try:
            sock.setblocking(False)
            if sock.connect_ex(target) not in (0, errno.EINPROGRESS):
                return False
            ours = sock.getsockname()
            self._afterwards[ours] = []
            writable = asyncio.Event()
            self.pump.loop.add_writer(sock, writable.set)
            async with asyncio.timeout(timeout_s):
                await writable.wait()
            # A socket that connects to a free port of its own machine can reach itself.
            refused = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or ours == target
            reached = not refused
            return reached
        except TimeoutError:
            return False
        finally:
            self.pump.loop.remove_writer(sock)
            if not reached:
                sock.close()
                for notify in self._afterwards.pop(ours, []):
                    notify()

    # Channels

    def _channel(self, sock: socket.socket, task: Task, limits: QueueLimits) -> TcpChannel | None:
        """A channel on a connected socket; at connections_max, close the socket and return None."""
        if len(self._channels) >= limits.connections_max:
            sock.close()
            return None
        sock.setblocking(False)
        # The pump already writes all messages of a turn at once, so Nagle's delay has no benefit.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = TcpChannel(self, task, limits, sock)
        self._channels.add(channel)
        return channel

    def release(self, channel: TcpChannel, sock: socket.socket, linger_s: float | None) -> None:
        """Close a channel's socket; with `linger_s`, wait until the other end has read it all."""
        self._channels.discard(channel)
        try:
            if linger_s is not None:
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            linger_s = None
        if linger_s is None:
            sock.close()
            return
        # Closing a socket with unread bytes resets it, and the other end loses what is on its way.
        # So incoming bytes are read and dropped until the other end has closed too.
        loop = self.pump.loop
        self._lingering[sock] = loop.call_later(linger_s, self._end_lingering, sock)
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
        self.pump.loop.remove_reader(sock)
        sock.close()

    def close(self) -> None:
        """Close every socket: the pump has stopped."""
        for connecting in self._connecting:
            connecting.cancel()
        for sock in list(self._lingering):
            self._end_lingering(sock)
        for sock, _ in self._listening.values():
            self.pump.loop.remove_reader(sock)
            sock.close()
        self._listening.clear()
        for channel in list(self._channels):
            channel.close()
        self._channels.clear()
