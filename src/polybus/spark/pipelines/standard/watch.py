"""The flow `watch`: what the tables say back to topics, `$stats` and `$alerts`.

It looks at `traffic` five times a second, and has no streaming query of its own: a topic that falls
silent gives no micro-batch that could notice. A look that finds something is a numbered tick:

1. alerts go into the table `alerts`, under the tick's number;
2. the tick's number and the traffic it will publish are written down;
3. both are published in one commit that has the tick's number;
4. the tick is written down as published.

After a crash the tick that was written down is published again; the bus knows whether it was.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from polybus.config import Pipeline
from polybus.errors import PolybusError
from polybus.lake import settings as pipeline_settings
from polybus.lake.compact import tidy
from polybus.lake.table import open_table
from polybus.log.disk import replace_file
from polybus.log.reading.reader import LogReader
from polybus.spark.pipelines.flows import FlowContext
from polybus.spark.pipelines.standard import alerts, outbox
from polybus.spark.pipelines.standard.gold import QUANTILES, TRAFFIC_COUNTS, traffic_table
from polybus.spark.where import Where

STATS = "$stats"
ALERTS = "$alerts"
PRODUCER = "standard.watch"
STATE = "standard-watch.json"
SILENCE_EVERY_S = 5.0
TIME = pa.timestamp("us", "UTC")
ALERT_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("topic", pa.string()),
        ("minute", TIME),
        ("messages", pa.int64()),
        ("expected", pa.float64()),
        ("text", pa.string()),
        ("time", TIME),
        ("tick", pa.int64()),
    ]
)


class State(msgspec.Struct, frozen=True):
    """The last tick: its number, the batches of `traffic` it tells of, whether it is out."""

    query: str
    tick: int = -1
    stats_after: int = -1
    stats_upto: int = -1
    published: bool = True


class Watch:
    """Lives as long as the driver; `tick` is called again and again, never twice at once."""

    def __init__(
        self, data: Path, *, clock_us: Callable[[], int] = lambda: time.time_ns() // 1000
    ) -> None:
        self._data = data
        self._clock_us = clock_us
        self._path = data / "pipeline" / STATE
        self._traffic = traffic_table(data)
        self._alerts = open_table(data, "alerts")
        self._told: dict[tuple[str, str], int] | None = None
        self._seen = -1
        self._silence_due_us = 0

    def tick(self, context: FlowContext) -> None:
        """Look once, and publish what is new. Raises PolybusError when the bus is away."""
        where = (
            Where(data=self._data)
            if context.url is None
            else Where(url=context.url, token=context.token)
        )
        state = self._state()
        if not state.published:
            self._publish(state, where)
        now_us = self._clock_us()
        version = self._traffic.table.version
        if version == self._seen and now_us < self._silence_due_us:
            return
        self._silence_due_us = now_us + int(SILENCE_EVERY_S * 1e6)
        recent = self._traffic.recent(now_us - alerts.WINDOW_MINUTES * alerts.MINUTE_US)
        if recent is not None and recent.num_rows:
            self._look(recent, now_us, state, where)
        self._seen = version

    def _look(self, recent: pa.Table, now_us: int, state: State, where: Where) -> None:
        settings = pipeline_settings.read(self._data).pipeline
        found = self._find(recent, now_us, settings) if settings.alerts else []
        upto = max(state.stats_upto, int(pc.max(recent["batch"]).as_py()))
        has_stats = settings.stats and upto > state.stats_upto
        if not found and not has_stats:
            return
        number = state.tick + 1
        if found:
            self._keep(found, now_us, number)
        after = state.stats_upto if has_stats else upto
        state = State(state.query, number, after, upto, published=False)
        self._save(state)
        self._publish(state, where)

    def _find(self, recent: pa.Table, now_us: int, settings: Pipeline) -> list[alerts.Alert]:
        found = alerts.find(recent, now_us, settings, self._last_told())
        return [one for one in found if one.kind == "spike" or self._is_silent(one.topic, now_us)]

    def _is_silent(self, topic: str, now_us: int) -> bool:
        """Whether the log itself has nothing new: the pipeline may only be behind."""
        try:
            reader = LogReader(self._data)
            stop = reader.bounds(topic).stop
            return (
                reader.offset_at(topic, now_us - alerts.JUDGED_MINUTES * alerts.MINUTE_US) >= stop
            )
        except PolybusError:
            return False

    def _keep(self, found: list[alerts.Alert], now_us: int, tick: int) -> None:
        rows = [
            {
                "kind": one.kind,
                "topic": one.topic,
                "minute": one.minute_us,
                "messages": one.messages,
                "expected": round(one.expected, 3),
                "text": one.text,
                "time": now_us,
                "tick": tick,
            }
            for one in found
        ]
        self._alerts.append(
            pa.Table.from_pylist(rows, schema=ALERT_SCHEMA), writer=PRODUCER, batch_id=tick
        )
        tidy(self._alerts)
        self._told = None

    def _last_told(self) -> dict[tuple[str, str], int]:
        if self._told is None:
            self._told = {}
            if self._alerts.exists:
                rows = self._alerts.read()
                times = rows["time"].cast(pa.int64()).to_pylist()
                keys = zip(rows["topic"].to_pylist(), rows["kind"].to_pylist(), strict=True)
                for key, at_us in zip(keys, times, strict=True):
                    self._told[key] = max(at_us, self._told.get(key, 0))
        return self._told

    def _publish(self, state: State, where: Where) -> None:
        rows = [*self._stats_rows(state), *self._alert_rows(state.tick)]
        table = pa.Table.from_pylist(rows, schema=outbox.SCHEMA)
        outbox.send(table, where, producer=PRODUCER, query=state.query, batch_id=state.tick)
        self._save(msgspec.structs.replace(state, published=True))

    def _stats_rows(self, state: State) -> list[dict[str, str]]:
        since_us = self._clock_us() - alerts.WINDOW_MINUTES * alerts.MINUTE_US
        recent = self._traffic.recent(since_us) if state.stats_upto > state.stats_after else None
        if recent is None:
            return []
        # A row that has moved on by now belongs to a later tick.
        fresh = recent.filter(
            pc.and_(
                pc.greater(recent["batch"], state.stats_after),
                pc.less_equal(recent["batch"], state.stats_upto),
            )
        )
        columns = ["topic", "protocol", "minute", *TRAFFIC_COUNTS, *QUANTILES]
        return [_message(STATS, row["topic"], row) for row in fresh.select(columns).to_pylist()]

    def _alert_rows(self, tick: int) -> list[dict[str, str]]:
        if self._alerts.last_batch(PRODUCER) != tick:
            return []
        rows = self._alerts.read()
        rows = rows.filter(pc.equal(rows["tick"], tick)).drop_columns(["tick"])
        return [_message(ALERTS, row["topic"], row) for row in rows.to_pylist()]

    def _state(self) -> State:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=State)
        except (FileNotFoundError, msgspec.DecodeError):
            last = self._alerts.last_batch(PRODUCER)
            return State(query=str(uuid.uuid4()), tick=-1 if last is None else last)

    def _save(self, state: State) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, msgspec.json.encode(state))


def _message(topic: str, key: str, row: dict[str, Any]) -> dict[str, str]:
    for name, value in row.items():
        if isinstance(value, datetime):
            row[name] = value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return {"topic": topic, "key": key, "value": msgspec.json.encode(row).decode()}
