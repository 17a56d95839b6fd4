"""What the fan-out is held against: a plain `websockets` server that broadcasts.

Every text frame that comes on `/publish` goes to all who are connected elsewhere, by the library's
own `broadcast`. It runs on the same event loop as the bus, and without compression as the bus does.
"""

from __future__ import annotations

import asyncio
import sys

from websockets.asyncio.server import ServerConnection, broadcast, serve
from websockets.exceptions import ConnectionClosed

from polybus.bench.brokers import HOST

BACKLOG = 4096


class BroadcastServer:
    """Forwards what publishers say to everyone else; it keeps nothing and confirms nothing."""

    def __init__(self) -> None:
        self._listeners: set[ServerConnection] = set()

    async def serve(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        if connection.request.path == "/publish":
            try:
                async for message in connection:
                    broadcast(self._listeners, message)
            except ConnectionClosed:
                pass
            return
        self._listeners.add(connection)
        try:
            await connection.wait_closed()
        finally:
            self._listeners.discard(connection)


async def run(port: int) -> None:
    server = BroadcastServer()
    async with serve(server.serve, HOST, port, compression=None, backlog=BACKLOG):
        await asyncio.Future()


def main() -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(run(int(sys.argv[1])))
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(int(sys.argv[1])))


if __name__ == "__main__":
    main()
