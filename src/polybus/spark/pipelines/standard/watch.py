"""The flow `watch`: publishes statistics and alerts from the tables to `$stats` and `$alerts`.

It looks at the table `traffic` five times a second. It has no streaming query of its own: a topic
that falls silent causes no micro-batch. A look that finds something is a numbered tick. The order
of its writes:

1. alerts go into the table `alerts`, with the number of the tick;
2. standard-watch.json: the number, and the traffic it publishes, as not published;
3. both are published in one commit of the bus, which has the tick's number as its batch;
4. standard-watch.json: the tick is published.

After a crash following 1, the next look is a tick of the same number: the table ignores alerts
that it finds, and those of the first try are published. After 2 or 3, the stored tick is published
again; the bus does each (producer, query, batch) once.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
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
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.flows import FlowContext
from polybus.spark.pipelines.standard import alerts
from polybus.spark.pipelines.standard.accumulated import TIME
from polybus.spark.pipelines.standard.gold import QUANTILES, TRAFFIC_COUNTS, traffic_table
from polybus.spark.sink.staging import SinkColumns, stage

STATS = "$stats"
ALERTS = "$alerts"
PRODUCER = "standard.watch"
STATE_FILE = "standard-watch.json"
SILENCE_EVERY_S = 5.0
WINDOW_US = alerts.WINDOW_MINUTES * alerts.MINUTE_US
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
MESSAGE_SCHEMA = pa.schema([("topic", pa.string()), ("key", pa.string()), ("value", pa.string())])


class WatchState(msgspec.Struct, frozen=True):
    """The last tick: its number, the batches of `traffic` it publishes, whether it is published."""

    query: str
    tick: int = -1
    stats_after: int = -1
    stats_upto: int = -1
    published: bool = True


class Watch:
    """Lives as long as the driver; `tick` is called repeatedly, by one thread."""

    def __init__(
        self, data: Path, *, clock_us: Callable[[], int] = lambda: time.time_ns() // 1000
    ) -> None:
        self._data = data
        self._clock_us = clock_us
        self._path = data / "pipeline" / STATE_FILE
        self._traffic = traffic_table(data)
        self._alerts = open_table(data, "alerts")
        self._last_alerts: dict[tuple[str, str], int] | None = None
        self._seen_version = -1
        self._silence_due_us = 0

    def tick(self, context: FlowContext) -> None:
        """Look once, and publish what is new. Raises PolybusError if the bus is unreachable."""
        state = self._read_state()
        if not state.published:
            self._publish(state, context.bus)
        now_us = self._clock_us()
        version = self._traffic.table.version
        if version == self._seen_version and now_us < self._silence_due_us:
            return
        self._silence_due_us = now_us + int(SILENCE_EVERY_S * 1e6)
        recent = self._traffic.recent(now_us - WINDOW_US)
        if recent is not None and recent.num_rows:
            self._look(recent, now_us, state, context.bus)
        self._seen_version = version

    def _look(self, recent: pa.Table, now_us: int, state: WatchState, bus: BusLocation) -> None:
        settings = pipeline_settings.read(self._data).pipeline
        found = self._find(recent, now_us, settings) if settings.alerts else []
        upto = max(state.stats_upto, int(pc.max(recent["batch"]).as_py()))
        has_stats = settings.stats and upto > state.stats_upto
        last = self._alerts.last_batch(PRODUCER)
        was_interrupted = last is not None and last > state.tick
        if not found and not has_stats and not was_interrupted:
            return
        number = state.tick + 1
        if found:
            self._store(found, now_us, number)
        after = state.stats_upto if has_stats else upto
        state = WatchState(state.query, number, after, upto, published=False)
        self._write_state(state)
        self._publish(state, bus)

    def _find(self, recent: pa.Table, now_us: int, settings: Pipeline) -> list[alerts.Alert]:
        found = alerts.find(recent, now_us, settings, self._alert_times())
        return [one for one in found if one.kind == "spike" or self._is_silent(one.topic, now_us)]

    def _is_silent(self, topic: str, now_us: int) -> bool:
        """Whether the log has nothing new either: the pipeline may only be behind."""
        since_us = now_us - alerts.JUDGED_MINUTES * alerts.MINUTE_US
        try:
            reader = LogReader(self._data)
            return reader.offset_at(topic, since_us) >= reader.bounds(topic).stop
        except PolybusError:
            return False

    def _store(self, found: list[alerts.Alert], now_us: int, tick: int) -> None:
        rows = [asdict(one) | {"time": now_us, "tick": tick} for one in found]
        table = pa.Table.from_pylist(rows, schema=ALERT_SCHEMA)
        self._alerts.append(table, writer=PRODUCER, batch_id=tick)
        tidy(self._alerts)
        self._last_alerts = None

    def _alert_times(self) -> dict[tuple[str, str], int]:
        """When each topic last had an alert of each kind, in microseconds."""
        if self._last_alerts is None:
            rows = self._alerts.read() if self._alerts.exists else ALERT_SCHEMA.empty_table()
            last = rows.group_by(["topic", "kind"]).aggregate([("time", "max")])
            keys = zip(last["topic"].to_pylist(), last["kind"].to_pylist(), strict=True)
            times_us = last["time_max"].cast(pa.int64()).to_pylist()
            self._last_alerts = dict(zip(keys, times_us, strict=True))
        return self._last_alerts

    def _publish(self, state: WatchState, bus: BusLocation) -> None:
        rows = [*self._stats_messages(state), *self._alert_messages(state.tick)]
        table = pa.Table.from_pylist(rows, schema=MESSAGE_SCHEMA)
        publish(table, bus, query=state.query, batch_id=state.tick)
        self._write_state(msgspec.structs.replace(state, published=True))

    def _stats_messages(self, state: WatchState) -> list[dict[str, str]]:
        if state.stats_upto <= state.stats_after:
            return []
        recent = self._traffic.recent(self._clock_us() - WINDOW_US)
        if recent is None:
            return []
        # A row that a later batch has changed belongs to a later tick.
        is_after = pc.greater(recent["batch"], state.stats_after)
        fresh = recent.filter(pc.and_(is_after, pc.less_equal(recent["batch"], state.stats_upto)))
        columns = ["topic", "protocol", "minute", *TRAFFIC_COUNTS, *QUANTILES]
        return [_message(STATS, row) for row in fresh.select(columns).to_pylist()]

    def _alert_messages(self, tick: int) -> list[dict[str, str]]:
        if self._alerts.last_batch(PRODUCER) != tick:
            return []
        rows = self._alerts.read()
        rows = rows.filter(pc.equal(rows["tick"], tick)).drop_columns(["tick"])
        return [_message(ALERTS, row) for row in rows.to_pylist()]

    def _read_state(self) -> WatchState:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=WatchState)
        except (FileNotFoundError, msgspec.DecodeError):
            last = self._alerts.last_batch(PRODUCER)
            state = WatchState(query=str(uuid.uuid4()), tick=-1 if last is None else last)
            # Before the first alert is stored, which would otherwise count as published.
            self._write_state(state)
            return state

    def _write_state(self, state: WatchState) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, msgspec.json.encode(state))


def _message(topic: str, row: dict[str, Any]) -> dict[str, str]:
    for name, value in row.items():
        if isinstance(value, datetime):
            row[name] = value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return {"topic": topic, "key": row["topic"], "value": msgspec.json.encode(row).decode()}


def publish(rows: pa.Table, bus: BusLocation, *, query: str, batch_id: int) -> None:
    """Publish rows (MESSAGE_SCHEMA) in one commit, as the sink does, but without a Spark job.

    Raises:
        PolybusError: `client.unreachable`; publishing again is safe.
    """
    bus.address()  # fails before anything is staged
    columns = SinkColumns(topic=None, has_key=True, has_headers=False)
    file = stage(iter(rows.to_batches()), columns, bus, PRODUCER, batch_id)
    body = {
        "producer": PRODUCER,
        "query": query,
        "batch": batch_id,
        "files": [] if file is None else [file],
        "gaps": True,
        # Only one pipeline runs on a data folder: another query is a new life of this one.
        "take-over": True,
    }
    bus.call("POST", "/v1/commits", body)
