"""The peer in the fan-out benchmark: a plain `websockets` server that broadcasts.

It sends every text frame that arrives on `/publish` to all other connections, with the `broadcast`
of the library. Like the bus it runs on uvloop and does not compress.
"""

import asyncio
import sys

from websockets.asyncio.server import ServerConnection, broadcast, serve
from websockets.exceptions import ConnectionClosed

from polybus.bench.brokers import HOST

BACKLOG = 4096


class BroadcastServer:
    """Forwards what publishers send to all listeners; stores and confirms nothing."""

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
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(int(sys.argv[1])))


if __name__ == "__main__":
    main()
