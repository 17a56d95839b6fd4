"""A queue program, a goMS client and a browser exchange messages through a bus started here.

    python examples/queues/bridge.py

The program uses only queues: it connects to port 1 of "bus" and sends. At that port the bus has a
queue connector for the topic `readings`. A goMS client and a browser therefore receive the messages
of the program and can answer, each in its own protocol.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.request import Request, urlopen

import polybus
from polybus.queues import (
    ConnectListener,
    EventPump,
    MessageListener,
    MessageQueue,
    QueueBroker,
    Registry,
    Task,
    TcpTransport,
)
from polybus.testing import run_bus

TOPIC = "readings"
READINGS = (b"21.5", b"21.7", b"22.0")


class Sensor(ConnectListener, MessageListener):
    """Sends its readings, and ends after it has received the expected number of messages."""

    def __init__(self, pump: EventPump) -> None:
        self._pump = pump

    def connected(self, queue: MessageQueue) -> None:
        queue.set_listener(self)
        for reading in READINGS:
            queue.send(reading)

    def refused(self) -> None:
        print("sensor: there is no bus")
        self._pump.stop()

    def received(self, message: bytes) -> None:
        print(f"sensor hears: {message.decode()}")
        if message == b"enough":
            self._pump.stop()


class Browser:
    """The requests that a page makes with fetch(); here they block in a thread."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"
        session = self._fetch("/v1/sessions", json.dumps({"topics": [TOPIC]}).encode())
        self._poll = f"/msgstream?transport=longpolling&sessionKey={session['sessionKey']}"

    def hear(self, count: int) -> list[object]:
        """Poll until this many messages have arrived; each poll confirms the previous one."""
        heard: list[object] = []
        confirmed = ""
        while len(heard) < count:
            packs = self._fetch(f"{self._poll}&confirmIds={confirmed}")
            heard += [payload for pack in packs.values() for _topic, payload in pack]
            confirmed = ",".join(packs)
        return heard

    def say(self, text: str) -> None:
        self._fetch(f"/v1/topics/{TOPIC}/messages", text.encode(), "text/plain")

    def _fetch(
        self, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        request = Request(self._base + path, data=body, headers={"content-type": kind})
        with urlopen(request) as response:
            # 204: nothing happened for a minute.
            answer: dict[str, Any] = {} if response.status == 204 else json.load(response)
        return answer


def start_sensor(queue_port: int) -> asyncio.Future[None]:
    """Run the queue program on this event loop until it ends."""
    registry = Registry()
    registry.add("bus", "127.0.0.1", {1: queue_port})
    pump = EventPump()
    sensor = QueueBroker("sensor", pump, transport=TcpTransport(registry))
    Task(pump).post(lambda: sensor.connect("bus", 1, Sensor(pump)))
    return pump.run_in(asyncio.get_running_loop())


async def main() -> None:
    connectors = [
        {"protocol": "tcp", "port": 0},
        {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": TOPIC},
    ]
    async with run_bus(connectors=connectors) as bus:
        port, queue_port = (int(address.rpartition(":")[2]) for address in bus.addresses)
        browser = await asyncio.to_thread(Browser, port)
        async with (
            polybus.connect(f"goms://127.0.0.1:{port}") as goms,
            goms.subscribe(TOPIC) as messages,
        ):
            sensor = start_sensor(queue_port)
            for _ in READINGS:
                print(f"goMS hears: {(await anext(messages)).text}")
            for reading in await asyncio.to_thread(browser.hear, len(READINGS)):
                print(f"browser hears: {reading}")
            await goms.publish(TOPIC, "thanks", receipt=True)
            await asyncio.to_thread(browser.say, "enough")
            await sensor


if __name__ == "__main__":
    asyncio.run(main())
