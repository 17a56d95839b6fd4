"""What the Spark tests share: a real bus in a process of its own, driven without asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from polybus.client import connect

READY_TIMEOUT_S = 60.0
NO_SETTINGS: Mapping[str, Any] = {}


class RunningBus:
    """`polybus serve` on a free loopback port, the same port again after `restart`.

    Attributes:
        data: the data folder.
        port: the port of all stream protocols and of HTTP.
    """

    def __init__(self, folder: Path, topics: Sequence[Any], settings: Mapping[str, Any]) -> None:
        self.data = folder / "data"
        self.port = 0
        self._topics = list(topics)
        self._settings = dict(settings)
        self._config = folder / "bus.json"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the bus does not run"
        return self._process.pid

    def start(self) -> None:
        assert self._process is None, "the bus is already running"
        self._config.write_text(json.dumps({"topics": self._topics} | self._settings))
        command = [sys.executable, "-m", "polybus.cli", "serve"]
        command += ["--config", str(self._config), "--data", str(self.data)]
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port)], stdout=subprocess.PIPE, env=environment()
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        found = re.search(r"ready.*tcp://127\.0\.0\.1:(\d+)", line)
        assert found, f"no ready line: {line!r}"
        self.port = int(found[1])

    def publish(
        self,
        topic: str,
        values: Sequence[bytes | str],
        *,
        headers: Mapping[str, bytes | str] | None = None,
        scheme: str = "boson",
    ) -> None:
        """Publish in order; when this returns all of it is durable."""

        async def send() -> None:
            async with connect(f"{scheme}://127.0.0.1:{self.port}") as client:
                await client.publish_many(topic, values, headers=headers, receipt=True)

        asyncio.run(send())

    def stop(self) -> None:
        """End it cleanly."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash does."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        if self._process is not None:
            self.stop()
        self.start()

    def reconfigure(self, **settings: Any) -> None:
        """Restart with other settings, in kebab-case."""
        self._settings |= settings
        self.restart()

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        assert process is not None, "the bus does not run"
        process.send_signal(number)
        code = process.wait(30)
        assert process.stdout is not None
        process.stdout.close()
        assert code == (0 if number == signal.SIGTERM else -number)

    def close(self) -> None:
        if self._process is not None:
            self.stop()


@contextlib.contextmanager
def running_bus(
    folder: Path, topics: Sequence[Any] = (), settings: Mapping[str, Any] = NO_SETTINGS
) -> Iterator[RunningBus]:
    """A bus for the time of a block; `settings` are those of a config file, in kebab-case."""
    bus = RunningBus(folder, topics, settings)
    bus.start()
    try:
        yield bus
    finally:
        bus.close()


def environment(**extra: str) -> dict[str, str]:
    """The environment without settings of ours."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("POLYBUS_")}
    return clean | extra


def eventually(condition: Callable[[], Any], *, timeout_s: float = 60.0) -> Any:
    """Wait until the condition is true and return what it gave; fail when the time is up."""
    deadline = monotonic() + timeout_s
    while not (result := condition()):
        assert monotonic() < deadline, f"not true within {timeout_s} s"
        sleep(0.05)
    return result
