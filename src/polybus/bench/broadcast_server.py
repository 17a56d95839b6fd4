"""The peer in the fan-out benchmark: a plain `websockets` server that broadcasts.

It sends every text frame that arrives on `/publish` to all other connections, with the `broadcast`
of the library. Like the bus it runs on uvloop and does not compress.
"""

import asyncio
import contextlib
import sys

from websockets.asyncio.server import ServerConnection, broadcast, serve
from websockets.exceptions import ConnectionClosed

from polybus.bench.brokers import HOST

BACKLOG = 4096


async def run(port: int) -> None:
    listeners: set[ServerConnection] = set()

    async def handle(connection: ServerConnection) -> None:
        assert connection.request is not None
        if connection.request.path == "/publish":
            with contextlib.suppress(ConnectionClosed):
                async for message in connection:
                    broadcast(listeners, message)
            return
        listeners.add(connection)
        try:
            await connection.wait_closed()
        finally:
            listeners.discard(connection)

    async with serve(handle, HOST, port, compression=None, backlog=BACKLOG):
        await asyncio.Future()


if __name__ == "__main__":
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(int(sys.argv[1])))
