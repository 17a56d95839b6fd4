"""What the tests of several nodes share: nodes in this process and as processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from polybus.edges.node import Node
from polybus.testing import run_bus
from polybus.testing.kafka import KafkaBrokers

sys.path.insert(0, str(Path(__file__).parents[1] / "edges"))

from certificate_kit import Authority

ONE_BROKER = {"replicas": 1, "insync-min": 1}
prefixes = itertools.count()
SECURE = """\
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL
listener.name.secure.ssl.keystore.type=PEM
listener.name.secure.ssl.keystore.location={store}
listener.name.secure.sasl.enabled.mechanisms=PLAIN
listener.name.secure.plain.sasl.jaas.config=\\
 org.apache.kafka.common.security.plain.PlainLoginModule required user_bus="secret";
"""
RUN = """
import asyncio, json, os, signal, sys
from polybus.testing import run_bus

async def main():
    settings = json.loads(sys.argv[1])
    async with run_bus(**settings) as node:
        print(node.tcp_port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def until(is_reached: Callable[[], bool], timeout_s: float = 30.0) -> float:
    """Wait for something that other processes do; return how long it took."""
    began_s = time.monotonic()
    while not is_reached():
        assert time.monotonic() - began_s < timeout_s, "it did not happen in time"
        asyncio.run(asyncio.sleep(0.02))
    return time.monotonic() - began_s


def secure_brokers(folder: Path, count: int) -> KafkaBrokers:
    """Brokers with a listener for TLS and logins too."""
    authority = Authority(folder, "authority")
    store = folder / "broker.pem"
    store.write_bytes(b"".join(one.read_bytes() for one in reversed(authority.sign("broker"))))
    (folder / "password").write_text("secret\n")
    return KafkaBrokers(folder, count=count, secure=SECURE.format(store=store), is_brief=True)


@contextlib.contextmanager
def running(brokers: KafkaBrokers) -> Iterator[KafkaBrokers]:
    """Start brokers, and end them afterwards."""
    try:
        brokers.start()
        yield brokers
    finally:
        brokers.stop()


@contextlib.asynccontextmanager
async def nodes(
    brokers: KafkaBrokers, prefix: str, *topics: str, count: int = 2, **settings: Any
) -> AsyncIterator[list[Node]]:
    async with contextlib.AsyncExitStack() as stack:
        cluster = {"prefix": prefix, **ONE_BROKER}
        yield [
            await stack.enter_async_context(
                run_bus(*topics, log=brokers.url, cluster=cluster, **settings)
            )
            for _ in range(count)
        ]


class KilledNode:
    """A node as a process of its own, which a test kills.

    `patch` is Python that runs before it starts; `die` kills the process there.
    """

    def __init__(self, brokers: KafkaBrokers, prefix: str, data: Path, patch: str = "") -> None:
        cluster = {"prefix": prefix, **ONE_BROKER}
        self._settings = {"log": brokers.url, "cluster": cluster, "data": str(data)}
        self._script = f"{RUN}\n{patch}\nasyncio.run(main())"
        self.data = data

    async def __aenter__(self) -> KilledNode:
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", self._script, json.dumps(self._settings)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        self.url = f"http://127.0.0.1:{int(line)}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()


def url(node: Node) -> str:
    return f"http://127.0.0.1:{node.tcp_port}"


class Browser:
    """A msgstream client: polls any node, and remembers what it was shown."""

    def __init__(self, http: httpx.AsyncClient, key: str) -> None:
        self._http = http
        self.key = key
        self.packs: dict[int, Any] = {}

    async def poll(self, node: str, *confirmed: int, hangs: bool = True) -> dict[int, Any]:
        transport = "longpolling" if hangs else "shortpolling"
        wanted = {"transport": transport, "sessionKey": self.key}
        if confirmed:
            wanted["confirmIds"] = ",".join(map(str, confirmed))
        answer = await self._http.get(f"{node}/msgstream", params=wanted, timeout=60)
        if answer.status_code == 204:
            return {}
        assert answer.status_code == 200, answer.text
        found = {int(number): pack for number, pack in answer.json().items()}
        for number, pack in found.items():
            # A number never changes its meaning.
            assert self.packs.setdefault(number, pack) == pack
        return found

    @property
    def texts(self) -> list[str]:
        return [str(text) for _, pack in sorted(self.packs.items()) for _, text in pack]


async def open_session(http: httpx.AsyncClient, node: str, *topics: str, **body: Any) -> Browser:
    answer = await http.post(f"{node}/v1/sessions", json={"topics": list(topics), **body})
    assert answer.status_code == 201, answer.text
    return Browser(http, answer.json()["sessionKey"])


async def publish(http: httpx.AsyncClient, node: str, topic: str, *texts: str) -> None:
    for text in texts:
        answer = await http.post(f"{node}/v1/topics/{topic}/messages", content=text)
        assert answer.status_code == 200, answer.text


async def eventually(is_reached: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    """Wait for something that no event announces."""
    async with asyncio.timeout(timeout_s):
        while not await is_reached():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
