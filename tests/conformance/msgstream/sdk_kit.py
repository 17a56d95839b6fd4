"""mage-sdk-js under Node, and a real bus to stop and kill beside it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 20.0
READY = re.compile(r"ready.*?tcp://127\.0\.0\.1:(\d+)")


def install_sdk() -> None:
    """Fetch the packages of the lock file, unless they are there."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        text = "Node.js and npm are missing; on Debian: apt-get install nodejs npm"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)
    lock = HERE / "package-lock.json"
    installed = HERE / "node_modules" / ".package-lock.json"
    if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return
    command = ["npm", "ci", "--ignore-scripts", "--no-fund", "--no-audit"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    installed.touch()


class Bus:
    """`polybus serve` in a process of its own, always on the same port and data."""

    def __init__(self, data: Path, *topics: str) -> None:
        self._data = data
        self._topics = topics
        self.port = 0
        self.process: asyncio.subprocess.Process | None = None
        # Each request on a connection of its own: the bus may have been away since the last.
        once = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S, limits=once)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        command = [sys.executable, "-m", "polybus.cli", "serve", "--data", str(self._data)]
        command += ["--port", str(self.port)]
        for topic in self._topics:
            command += ["--topic", topic]
        clean = {name: text for name, text in os.environ.items() if not name.startswith("POLYBUS_")}
        self.process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env=clean
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), TIMEOUT_S)
        found = READY.search(line.decode())
        assert found, f"no ready line: {line!r}"
        self.port = int(found[1])

    async def stop(self, how: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        await asyncio.wait_for(self.process.wait(), TIMEOUT_S)

    async def close(self) -> None:
        await self._client.aclose()

    async def request(self, method: str, path: str, **how: Any) -> httpx.Response:
        answer = await self._client.request(method, self.url + path, **how)
        assert answer.is_success, answer.text
        return answer

    async def open_session(self, *topics: str) -> str:
        answer = await self.request("POST", "/v1/sessions", json={"topics": topics})
        return str(answer.json()["sessionKey"])

    async def publish(self, topic: str, *values: Any) -> None:
        for value in values:
            await self.request("POST", f"/v1/topics/{topic}/messages", json=value)

    async def post(self, key: str, *messages: Any) -> None:
        await self.request("POST", f"/v1/sessions/{key}/packs", json=messages)

    async def confirmed(self) -> None:
        """Wait until no session keeps a pack that it was sent.

        The figures tell, because a poll to find out would take the session from its client.
        """
        async with asyncio.timeout(TIMEOUT_S):
            figures = ""
            while "\npolybus_session_packs 0\n" not in figures:
                figures = (await self.request("GET", "/metrics")).text


@asynccontextmanager
async def running_bus(data: Path, *topics: str) -> AsyncIterator[Bus]:
    bus = Bus(data, *topics)
    try:
        await bus.start()
        yield bus
    finally:
        if bus.process is not None:
            with suppress(ProcessLookupError):
                bus.process.kill()
            await bus.process.wait()
        await bus.close()


class Sdk:
    """One Node process with the SDK in it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(json.loads(line))
            self._news.set()

    @property
    def deliveries(self) -> list[dict[str, Any]]:
        """What came over the wire: packs by id, an object for each answer or frame."""
        return [line["delivery"] for line in self.lines if "delivery" in line]

    @property
    def pack_ids(self) -> list[int]:
        return [int(name) for packs in self.deliveries for name in packs]

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the SDK emitted, in order."""
        return [line for line in self.lines if "event" in line]

    def data_of(self, event: str) -> list[Any]:
        return [line["data"] for line in self.events if line["event"] == event]

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for lines until the condition holds."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pytest.fail(f"it did not come; there were {self.lines}")

    async def close(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading


@asynccontextmanager
async def sdk(
    bus: Bus, key: str, transport: str, *events: str, hold: bool = False
) -> AsyncIterator[Sdk]:
    """A started client; with `hold` it confirms nothing."""
    process = await asyncio.create_subprocess_exec(
        *("node", str(HERE / "client.js"), f"{bus.url}/msgstream", key, transport, *events),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    client = Sdk(process)
    if hold:
        client.tell("hold")
    client.tell("start")
    try:
        yield client
    finally:
        await client.close()
