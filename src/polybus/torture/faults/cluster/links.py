"""Links between a node and its brokers that can be cut, while clients still reach the node."""

import asyncio

HOST = "127.0.0.1"
READ_BYTES = 1 << 16


class BrokerLink:
    """Forwards connections to a port of its own to another port, until it is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """Return the port."""
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._reset()
        if self._connections:
            await asyncio.wait(self._connections)

    def cut(self) -> None:
        """Nothing passes any more; connections stay open, as in a network that loses packets."""
        self._whole.clear()

    def heal(self, *, resets: bool) -> None:
        """Let what waits pass, or reset the connections: what waits is lost."""
        if resets:
            self._reset()
        self._whole.set()

    def _reset(self) -> None:
        for one in self._connections:
            one.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        try:
            await self._whole.wait()
            far, far_writer = await asyncio.open_connection(HOST, self._target)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._forward(reader, far_writer))
                both.create_task(self._forward(far, writer))
        except* (OSError, asyncio.CancelledError):
            # Either side is gone, or the link was reset.
            pass
        finally:
            self._connections.discard(task)
            for one in writers:
                one.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES):
            await self._whole.wait()
            writer.write(data)
            await writer.drain()
        # The other direction ends, too.
        raise ConnectionResetError
