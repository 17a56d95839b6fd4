"""What the client's tests share: every scheme, and a proxy that can break connections."""

from __future__ import annotations

import asyncio
from random import Random

import polybus
from polybus.client import Message, Subscription
from polybus.edges.node import Node
from polybus.testing import run_bus

SCHEMES = ("boson", "boson+properties", "goms")


def url_of(scheme: str, port: int) -> str:
    return f"{scheme}://127.0.0.1:{port}"


async def take(subscription: Subscription, count: int) -> list[Message]:
    """The next messages, within a time limit."""
    messages = []
    async with asyncio.timeout(10):
        async for message in subscription:
            messages.append(message)
            if len(messages) == count:
                break
    return messages


async def held_packs(node: Node, count: int) -> None:
    """Wait until the sessions of a bus hold this number of packs together."""

    def held() -> int:
        return sum(session.pack_count for session in node.services.inboxes.sessions())

    async with asyncio.timeout(10):
        while held() != count:  # noqa: ASYNC110  the bus has no event for it
            await asyncio.sleep(0.005)


async def taken_while_it_breaks(
    scheme: str, count: int, *, pause_s: float, intact_s: tuple[float, float]
) -> list[Message]:
    """This number of messages, on a connection that breaks again and again.

    A publisher pauses after every 50; the connection is left intact for any time in the range.
    """
    draw = Random(7)

    async def publish_all(url: str) -> None:
        async with polybus.connect(url) as c:
            for first in range(0, count, 50):
                await c.publish_many("news", [str(n) for n in range(first, first + 50)])
                await asyncio.sleep(pause_s)

    async def break_again_and_again(proxy: Proxy) -> None:
        while True:
            await asyncio.sleep(draw.uniform(*intact_s))
            proxy.cut()
            proxy.restore()

    async with run_bus("news") as bus, Proxy(bus.tcp_port) as proxy:
        async with polybus.connect(url_of(scheme, proxy.port)) as reader:
            async with reader.subscribe("news") as subscription:
                publishing = asyncio.create_task(publish_all(url_of("boson", bus.tcp_port)))
                breaking = asyncio.create_task(break_again_and_again(proxy))
                messages = await take(subscription, count)
                breaking.cancel()
                await publishing
        assert proxy.connections_count > 5
    return messages


class Proxy:
    """Forwards TCP connections to a port until it has to break them."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.connections_count = 0
        self._server: asyncio.Server
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusing = False

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        """Break all connections and refuse new ones until `restore`."""
        self._refusing = True
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def restore(self) -> None:
        self._refusing = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        self.connections_count += 1
        there, back = await asyncio.open_connection("127.0.0.1", self.target_port)
        self._writers += (writer, back)
        for source, target in ((reader, back), (there, writer)):
            task = asyncio.create_task(_forward(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
        target.write_eof()
    except (ConnectionError, OSError):
        target.transport.abort()
