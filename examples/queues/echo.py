"""An echo server and several clients, in one process or over TCP.

python examples/queues/echo.py            in process, through ring buffers
python examples/queues/echo.py --tcp      over loopback sockets
"""

from __future__ import annotations

import sys

from polybus.queues import (
    AcceptListener,
    ConnectListener,
    EventPump,
    MessageListener,
    MessageQueue,
    QueueBroker,
    Registry,
    Task,
    TcpTransport,
)

PORT = 7
CLIENT_COUNT = 3
WORDS = (b"hello", b"", b"x" * 2_000_000, b"goodbye")


class EchoServer(AcceptListener):
    """Creates a listener for each client."""

    def accepted(self, queue: MessageQueue) -> None:
        queue.set_listener(Echo(queue))


class Echo(MessageListener):
    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue

    def received(self, message: bytes) -> None:
        self._queue.send(message)


class EchoClient(ConnectListener, MessageListener):
    """Sends all words at once, and disconnects after all have come back in order."""

    def __init__(self, name: str, done: list[str], pump: EventPump) -> None:
        self._name = name
        self._done = done
        self._pump = pump
        self._heard: list[bytes] = []

    def connected(self, queue: MessageQueue) -> None:
        self._queue = queue
        queue.set_listener(self)
        for word in WORDS:
            queue.send(word)

    def refused(self) -> None:
        print(f"{self._name}: nobody there")
        self._pump.stop()

    def received(self, message: bytes) -> None:
        self._heard.append(message)
        if len(self._heard) == len(WORDS):
            self._queue.close()

    def closed(self) -> None:
        in_order = tuple(self._heard) == WORDS
        self._done.append(f"{self._name}: {len(self._heard)} echoes, in order: {in_order}")
        if len(self._done) == CLIENT_COUNT:
            self._pump.stop()


def main(arguments: list[str]) -> None:
    pump = EventPump()
    transport = None
    if "--tcp" in arguments:
        registry = Registry()
        registry.add("server", any_port=True)
        transport = TcpTransport(registry)
    server = QueueBroker("server", pump, transport=transport)
    done: list[str] = []

    def start() -> None:
        server.bind(PORT, EchoServer())
        for number in range(1, CLIENT_COUNT + 1):
            client = QueueBroker(f"client {number}", pump, transport=transport)
            client.connect("server", PORT, EchoClient(client.name, done, pump))

    Task(pump).post(start)
    pump.run()  # last: no event runs before this call; it returns when a client calls stop
    print("\n".join(sorted(done)))


if __name__ == "__main__":
    main(sys.argv[1:])
