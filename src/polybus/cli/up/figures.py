"""The live figures of `polybus up`: from the HTTP API of the bus, the pipeline and the tables."""

import asyncio
import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polybus.client import connect
from polybus.client.http.blocking import request_json
from polybus.errors import PolybusError

ALERTS_SHOWN = 5
ALERT_CHARS_MAX = 200
ANSWER_TIMEOUT_S = 5.0
RETRY_S = 1.0


@dataclass(slots=True)
class TopicFigures:
    """Messages of one topic since the bus started; the rate is that of the last interval."""

    messages_in: int = 0
    messages_out: int = 0
    published_on: list[str] = field(default_factory=list)
    rate_per_s: float = 0.0


@dataclass(slots=True)
class Figures:
    """Everything that is displayed. `flows` are the pipeline's own figures."""

    topics: dict[str, TopicFigures] = field(default_factory=dict)
    flows: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, int] = field(default_factory=dict)
    alerts: deque[str] = field(default_factory=lambda: deque(maxlen=ALERTS_SHOWN))
    alert_count: int = 0

    @property
    def messages_in(self) -> int:
        return sum(one.messages_in for one in self.topics.values())

    @property
    def rate_per_s(self) -> float:
        return sum(one.rate_per_s for one in self.topics.values())


class Watcher:
    """Updates the figures of a bus and its data folder."""

    def __init__(self, figures: Figures, *, port: int, data: Path) -> None:
        self.figures = figures
        self._port = port
        self._data = data
        self._updated_s = 0.0
        self._tables: dict[Path, Any] = {}

    async def update(self) -> None:
        """Read new figures; while the bus does not answer, the old ones stay."""
        with contextlib.suppress(PolybusError, OSError):
            self._count(await asyncio.to_thread(self._topics))
        self.figures.tables = await asyncio.to_thread(self._table_rows)

    def _topics(self) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self._port}"
        answer = request_json(url, "GET", "/v1/topics?system=true", timeout_s=ANSWER_TIMEOUT_S)
        found: list[dict[str, Any]] = answer["topics"]
        return found

    def _count(self, found: list[dict[str, Any]]) -> None:
        now_s = time.monotonic()
        seconds = now_s - self._updated_s if self._updated_s else 0.0
        topics: dict[str, TopicFigures] = {}
        for one in found:
            name, messages_in, messages_out = one["name"], one["messages-in"], one["messages-out"]
            if messages_in or messages_out:
                before = self.figures.topics.get(name, TopicFigures()).messages_in
                # The counters of a restarted bus begin at 0.
                rate = max(0, messages_in - before) / seconds if seconds else 0.0
                topics[name] = TopicFigures(messages_in, messages_out, one["published-on"], rate)
        self.figures.topics = topics
        self._updated_s = now_s

    def _table_rows(self) -> dict[str, int]:
        """The rows of each table that can be read."""
        from polybus.lake.table import LakeTable

        rows = {}
        folder = self._data / "tables"
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            table = self._tables.setdefault(path, LakeTable(path))
            with contextlib.suppress(PolybusError, OSError):
                if table.exists:
                    rows[table.name] = table.rows
        return rows

    async def follow_alerts(self) -> None:
        """Add each alert as it arrives, until cancelled."""
        while True:
            try:
                async with connect(f"boson://127.0.0.1:{self._port}") as client:
                    async for message in client.subscribe("$alerts"):
                        self.figures.alert_count += 1
                        self.figures.alerts.append(alert_text(message.value))
            except PolybusError:
                # The bus is restarting, or its version has no alerts.
                await asyncio.sleep(RETRY_S)


def alert_text(value: bytes) -> str:
    """Any alert as one printable line."""
    try:
        alert = json.loads(value)
    except ValueError:
        alert = None
    if not isinstance(alert, dict):
        return repr(value[:100])
    text = alert.get("text")
    shown = text if isinstance(text, str) else json.dumps(alert)
    return "".join(char if char.isprintable() else "?" for char in shown)[:ALERT_CHARS_MAX]
