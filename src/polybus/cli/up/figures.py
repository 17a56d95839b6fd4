"""The live figures of `polybus up`: what the bus, the pipeline and the tables say of themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polybus.client import connect
from polybus.errors import PolybusError

ALERTS_SHOWN = 5
METRICS_TIMEOUT_S = 5.0
RETRY_S = 1.0
SAMPLE = re.compile(r'polybus_messages_(in|out)_total\{protocol="(.*)",topic="(.*)"\} (\d+)')


@dataclass(slots=True)
class TopicFigures:
    """Messages of one topic since the bus started; the rate is that of the last look."""

    messages_in: int = 0
    messages_out: int = 0
    protocols: set[str] = field(default_factory=set)
    rate_per_s: float = 0.0


@dataclass(slots=True)
class Figures:
    """All that is shown; filled by a `Watcher` and by what the driver says."""

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
    """Looks at a bus and its data folder again and again."""

    def __init__(self, figures: Figures, *, port: int, data: Path) -> None:
        self.figures = figures
        self._port = port
        self._data = data
        self._seen_s = 0.0
        self._tables: dict[Path, Any] = {}

    async def look(self) -> None:
        """Take new figures; a bus that does not answer just now leaves the old ones."""
        with contextlib.suppress(OSError):
            text = await asyncio.to_thread(self._metrics)
            self._count(text)
        self.figures.tables = await asyncio.to_thread(self._table_rows)

    def _metrics(self) -> str:
        url = f"http://127.0.0.1:{self._port}/metrics"
        with urllib.request.urlopen(url, timeout=METRICS_TIMEOUT_S) as answer:
            content: bytes = answer.read()
        return content.decode()

    def _count(self, text: str) -> None:
        now_s = time.monotonic()
        before = {name: one.messages_in for name, one in self.figures.topics.items()}
        topics: dict[str, TopicFigures] = {}
        for direction, protocol, name, count in SAMPLE.findall(text):
            topic = topics.setdefault(name, TopicFigures())
            if direction == "in":
                topic.messages_in += int(count)
                topic.protocols.add(protocol)
            else:
                topic.messages_out += int(count)
        for name, topic in topics.items():
            # After a restart of the bus its counters begin anew.
            new = max(0, topic.messages_in - before.get(name, 0))
            topic.rate_per_s = new / (now_s - self._seen_s) if self._seen_s else 0.0
        self.figures.topics = topics
        self._seen_s = now_s

    def _table_rows(self) -> dict[str, int]:
        """Rows of each table; a table that is damaged is left to those who read it."""
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
        """Take each alert as it comes, until cancelled."""
        while True:
            try:
                async with connect(f"boson://127.0.0.1:{self._port}") as client:
                    async for message in client.subscribe("$alerts"):
                        self.figures.alert_count += 1
                        self.figures.alerts.append(alert_text(message.value))
            except PolybusError:
                # The bus is just starting again, or is an older one without alerts.
                await asyncio.sleep(RETRY_S)


def alert_text(value: bytes) -> str:
    """An alert on one line, whatever is in it."""
    try:
        alert = json.loads(value)
    except ValueError:
        alert = None
    if not isinstance(alert, dict):
        return repr(value[:100])
    text = alert.get("text")
    shown = text if isinstance(text, str) else json.dumps(alert)
    return "".join(char if char.isprintable() else "?" for char in shown)[:200]
