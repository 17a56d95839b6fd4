"""A real bus in its own process and folder, which can be ended in every way."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from polybus.client.http.connection import HttpConnection
from polybus.client.options import ClientOptions, Credentials, parse
from polybus.errors import PolybusError
from polybus.log.verify.verify import VerifyReport
from polybus.services.checking import verify
from polybus.torture.bus.handover_forker import is_forker
from polybus.torture.bus.warm import WarmProcess

TOPICS = ("alpha", "beta", "queue")
START_S_MAX = 30.0
GROWTH_BYTES_MAX = 64 << 20
# A bus gives free memory back every few seconds.
SETTLE_S_MAX = 8.0
SETTINGS: dict[str, Any] = {
    "topics": list(TOPICS[:2]),
    "connectors": [
        {"protocol": "tcp", "port": 0},
        {"protocol": "udp", "port": 0, "speaks": "goms"},
        {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": TOPICS[2]},
    ],
    # Small, so that segments roll, hand-overs run and transactions have parts all the time.
    "journal": {"segment-bytes-max": 1 << 16, "segment-age-s": 0.5, "handover-interval-s": 0.1},
    "limits": {"transaction-part-bytes": 1 << 12},
    "msgstream": {"heartbeat-s": 1},
}
NOT_SERVED = "?"
"""The first character of a text that says why a payload is missing."""
_READY = re.compile(r"ready: tcp://127\.0\.0\.1:(\d+) udp://127\.0\.0\.1:(\d+) tcp://\S+:(\d+) ")


class BusChild:
    """One bus after the other on `folder`/data; their log lines go to `folder`/bus.log."""

    def __init__(
        self,
        folder: Path,
        *,
        handovers: bool = True,
        settings: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """`settings` and `environment` are added to those of every bus."""
        self.folder = folder
        self.environment = environment or {}
        self.data = folder / "data"
        self.process: subprocess.Popen[bytes] | WarmProcess | None = None
        self._orphans: list[int] = []
        self.port = self.udp_port = self.queue_port = 0
        self._ready_bytes = self._grown_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "bus.json"
        chosen = SETTINGS | {"data": str(self.data)} | (settings or {})
        if not handovers:
            chosen["journal"] = SETTINGS["journal"] | {"handover-interval-s": 3600}
        self._config.write_text(json.dumps(chosen))
        self._log = folder / "bus.log"

    @property
    def log_text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def spawn(self, *, warm: bool = True) -> None:
        """Start a bus without waiting for it; a warm one has already imported everything."""
        if warm:
            self.process = WarmProcess(self._config, self._log, self.environment)
            return
        kept = {name: text for name, text in os.environ.items() if not name.startswith("POLYBUS_")}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "polybus.cli", "serve", "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=kept | {"PYTHONFAULTHANDLER": "1"} | self.environment,
            )

    async def start(self, *, warm: bool = True) -> bool:
        """Start a bus; return whether it is ready. If not, it has ended."""
        self.spawn(warm=warm)
        return await self.ready()

    async def ready(self) -> bool:
        """Wait for the bus that was spawned."""
        assert self.process is not None and self.process.stdout is not None
        read = asyncio.to_thread(self.process.stdout.readline)
        with contextlib.suppress(TimeoutError):
            found = _READY.search((await asyncio.wait_for(read, START_S_MAX)).decode())
            if found is not None:
                self.port, self.udp_port, self.queue_port = map(int, found.groups())
                self.measure_memory()
                return True
        self.kill()
        return False

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone; its hand-over may take some milliseconds more."""
        if self.process is not None:
            self._orphans = self.children()
            self.process.kill()
            self._reap()

    def kill_all(self) -> None:
        """kill -9 of the bus and of its hand-over."""
        if self.process is not None:
            ids = self.children()
            self.kill()
            for one in ids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
        self.await_orphans()

    def await_orphans(self) -> None:
        """Wait until the hand-over of a killed bus has noticed its end. Raises TimeoutError."""
        until_s = time.monotonic() + START_S_MAX
        while any(map(_is_running, self._orphans)):
            if time.monotonic() > until_s:
                raise TimeoutError("a hand-over did not end with its bus")
            time.sleep(0.01)

    async def stop(self) -> int:
        """SIGTERM; the exit code, or -9 if it had to be killed."""
        assert self.process is not None
        await self.settle()
        self.process.terminate()
        try:
            code = await asyncio.to_thread(self.process.wait, START_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = -signal.SIGKILL
        self._reap()
        return code

    def _reap(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        self.process.wait()
        self.process.stdout.close()
        self.process = None

    def children(self) -> list[int]:
        """The ids of the bus's own child processes: hand-overs."""
        assert self.process is not None
        ids: set[int] = set()
        # A thread may end meanwhile, and so may the bus, with its folder.
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    ids.update(int(one) for one in path.read_text().split())
        return sorted(one for one in ids if not is_forker(one))

    def memory_bytes(self) -> int:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        # Without pages of files, which the kernel can reclaim.
        found = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status)
        return sum(map(int, found)) << 10

    def measure_memory(self) -> None:
        """Measure the memory; growth counts from here."""
        self._ready_bytes = self.memory_bytes()

    def grown_bytes(self) -> int:
        """How much the bus has grown since it was ready or measured; the last value if it is
        stopped.
        """
        if self.process is not None and self._ready_bytes:
            with contextlib.suppress(OSError):
                self._grown_bytes = self.memory_bytes() - self._ready_bytes
        return self._grown_bytes

    async def settle(self) -> None:
        """Wait until the bus has returned its memory, for as long as that may take."""
        for _ in range(round(SETTLE_S_MAX / 0.1)):
            if self.process is None or self.grown_bytes() <= GROWTH_BYTES_MAX:
                break
            await asyncio.sleep(0.1)

    def descriptor_count(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def options(self, scheme: str = "http") -> ClientOptions:
        port = self.queue_port if scheme == "queue" else self.port
        address = parse(f"{scheme}://127.0.0.1:{port}")
        return ClientOptions(address=address, reconnect=False, connect_timeout_s=5.0)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One HTTP call on its own connection; bytes are sent unchanged. Raises PolybusError."""
        async with self.connected() as connection:
            return await ask_on(connection, method, path, body)

    @contextlib.asynccontextmanager
    async def connected(
        self, credentials: Credentials | None = None
    ) -> AsyncIterator[HttpConnection]:
        """A connection for many calls: a new one for each would cost more than most of them."""
        options = self.options()
        if credentials is not None:
            address = dataclasses.replace(options.address, credentials=credentials)
            options = dataclasses.replace(options, address=address)
        connection = HttpConnection(options)
        try:
            yield connection
        finally:
            connection.close()

    async def messages(self, topic: str, offset: int = 0) -> tuple[int, list[tuple[int, str]]]:
        """The epoch of a topic, and offset and text of its messages. Raises PolybusError."""
        found: list[tuple[int, str]] = []
        async with self.connected() as connection:
            while True:
                path = f"/v1/topics/{topic}/messages?offset={offset}&limit=20000"
                answer = await ask_on(connection, "GET", path)
                some = answer["messages"]
                found += [(one["offset"], await _text_of(connection, one)) for one in some]
                if not some:
                    return answer["epoch"], found
                offset = answer["next"]

    async def verified(self) -> VerifyReport | str:
        """The report of `polybus verify` for the stopped bus; a text if it fails."""
        try:
            await asyncio.to_thread(self.await_orphans)
            return await asyncio.to_thread(verify, self.data)
        except Exception as error:
            # Any exception is a finding.
            return f"verify raised {type(error).__name__}: {error}"


async def ask_on(connection: HttpConnection, method: str, path: str, body: Any = None) -> Any:
    """One HTTP call; bytes are sent unchanged. Raises PolybusError."""
    content = b"" if body is None else body
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    answer = await connection.request(method, path, content, timeout_s=20.0)
    return msgspec.json.decode(answer) if answer[:1] in (b"{", b"[") else answer


async def _text_of(connection: HttpConnection, message: dict[str, Any]) -> str:
    """The text of a message; for a blob that is not served, the reason and its id."""
    reference = message.get("reference")
    if reference is None:
        return str(message.get("text", "?"))
    try:
        content: bytes = await ask_on(connection, "GET", f"/v1/blobs/{reference['id']}")
    except PolybusError as error:
        return f"{NOT_SERVED}{error.code} {reference['id']}"
    return content.decode(errors="replace")


def _is_running(number: int) -> bool:
    """Whether a process has not ended. A zombie has; its new parent may reap it much later."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    # Its name may have any characters.
    return stat.rpartition(") ")[2][:1] not in "ZX"


def shown(error: PolybusError) -> str:
    return f"{error.code}: {error.text}"
