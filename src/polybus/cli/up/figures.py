"""The figures that `polybus up` shows: topics and their rates, flows, rows of tables, alerts."""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polybus.client import connect
from polybus.client.http.blocking import request_json
from polybus.errors import PolybusError

ALERTS_KEPT = 5
ALERT_CHARS_MAX = 200
ANSWER_TIMEOUT_S = 5.0
RETRY_S = 1.0
# Bookkeeping of the pipeline and of `polybus replay`, not results.
INTERNAL_TABLES = ("replayed",)
RATES = (("messages-in", "rate-per-s"), ("bytes-in", "bytes-rate-per-s"))


class Figures:
    """Everything that is displayed, of the bus at a port and its data folder.

    `topics` are as the bus lists them, and their rates; `flows` are the pipeline's own figures.
    """

    def __init__(self, port: int = 0, data: Path = Path()) -> None:
        self.topics: dict[str, dict[str, Any]] = {}
        self.flows: list[dict[str, Any]] = []
        self.tables: dict[str, int] = {}
        self.alerts: deque[str] = deque(maxlen=ALERTS_KEPT)
        self.alert_count = 0
        self._port = port
        self.data = data
        self._began_s = time.monotonic()
        self._updated_s = 0.0
        self._tables: dict[Path, Any] = {}
        self._rows_before: dict[str, int] | None = None

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def messages_in(self) -> int:
        return sum(one["messages-in"] for one in self.topics.values())

    @property
    def rate_per_s(self) -> float:
        return float(sum(one["rate-per-s"] for one in self.topics.values()))

    @property
    def bytes_per_s(self) -> float:
        return float(sum(one.get("bytes-rate-per-s", 0.0) for one in self.topics.values()))

    @property
    def lag(self) -> int | None:
        """Messages that flows have yet to read; None while that is unknown."""
        lags = [flow["lag"] for flow in self.flows if flow.get("lag") is not None]
        is_early = any(flow.get("state") == "starting" for flow in self.flows)
        return None if not lags or is_early else sum(lags)

    @property
    def has_new_rows(self) -> bool:
        """Whether a table has rows that it did not have at the first update."""
        before = self._rows_before or {}
        return any(rows > before.get(name, 0) for name, rows in self.tables.items())

    async def update(self) -> None:
        """Read new figures; while the bus does not answer, the old ones stay."""
        with contextlib.suppress(PolybusError, OSError):
            self._count(await asyncio.to_thread(self._topics))
        self.tables = await asyncio.to_thread(self._table_rows)
        if self._rows_before is None:
            self._rows_before = self.tables

    def _topics(self) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self._port}"
        answer = request_json(url, "GET", "/v1/topics?system=true", timeout_s=ANSWER_TIMEOUT_S)
        found: list[dict[str, Any]] = answer["topics"]
        return found

    def _count(self, found: list[dict[str, Any]]) -> None:
        now_s = time.monotonic()
        seconds = now_s - self._updated_s if self._updated_s else 0.0
        before, self.topics = self.topics, {}
        for one in found:
            if one["messages-in"] or one["messages-out"]:
                known = before.get(one["name"], {})
                for counter, rate in RATES:
                    # The counters of a restarted bus begin at 0.
                    new = max(0, one.get(counter, 0) - known.get(counter, 0))
                    one[rate] = new / seconds if seconds else 0.0
                self.topics[one["name"]] = one
        self._updated_s = now_s

    def _table_rows(self) -> dict[str, int]:
        """The rows of each table that can be read."""
        rows: dict[str, int] = {}
        folder = self.data / "tables"
        if not folder.is_dir() or find_spec("deltalake") is None:
            return rows
        from polybus.lake.table import LakeTable

        for path in sorted(folder.iterdir()):
            table = self._tables.setdefault(path, LakeTable(path))
            with contextlib.suppress(PolybusError, OSError):
                if table.name not in INTERNAL_TABLES and table.exists:
                    rows[table.name] = table.rows
        return rows

    async def follow_alerts(self) -> None:
        """Add each alert as it arrives, until cancelled."""
        while True:
            try:
                async with connect(f"boson://127.0.0.1:{self._port}") as client:
                    async for message in client.subscribe("$alerts"):
                        self.alert_count += 1
                        self.alerts.append(alert_text(message.value))
            except PolybusError:
                # The bus is restarting, or its version has no alerts.
                await asyncio.sleep(RETRY_S)


def alert_text(value: bytes) -> str:
    """An alert as one printable line."""
    try:
        alert = json.loads(value)
    except ValueError:
        alert = None
    if not isinstance(alert, dict):
        return repr(value[:100])
    text = alert.get("text")
    shown = text if isinstance(text, str) else json.dumps(alert)
    return "".join(char if char.isprintable() else "?" for char in shown)[:ALERT_CHARS_MAX]


def is_running(flow: Mapping[str, Any]) -> bool:
    """A flow that waits for its next trigger without an error counts as running."""
    waiting = flow.get("state") == "waiting" and not flow.get("error")
    return waiting or flow.get("state") == "running"
