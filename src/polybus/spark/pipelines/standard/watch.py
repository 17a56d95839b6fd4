"""The flow `watch`: publishes statistics and alerts from the tables to `$stats` and `$alerts`.

An alert compares a topic's rate with its own last hour. A *spike* is a minute with at least
`alert-factor` times the usual rate of the topic (the larger of median and mean per minute of its
last hour; its first minute was a partial one and does not count) and at least `alert-messages-min`
messages. The alert is raised as soon as the count is reached, before the minute is over. A
*silence* is a topic whose usual rate is at least `alert-messages-min` and that has had no message
for `alert-silence-s`. Rates come from the table `traffic` and earlier alerts from the table
`alerts`: both survive restarts.

It checks the table `traffic` when that has a new batch, and five times a second. It has no
streaming query of its own: a topic that falls silent causes no micro-batch. A check that finds
something is a numbered tick. The order of its writes:

1. alerts go into the table `alerts`, with the number of the tick;
2. standard-watch.json: the number, and the traffic it publishes, as not published;
3. both are published in one commit of the bus, which has the tick's number as its batch;
4. standard-watch.json: the tick is published.

After a crash following 1, the next check is a tick of the same number: the table ignores its
alerts, and those of the first attempt are published. After 2 or 3, the stored tick is published
again; the bus does each (producer, query, batch) once.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from polybus import names
from polybus.client.http.blocking import ANSWER_TIMEOUT_S
from polybus.config import Pipeline
from polybus.errors import PolybusError, StorageError
from polybus.lake import settings as pipeline_settings
from polybus.lake.compact import tidy
from polybus.lake.table import open_table
from polybus.log import checked_json, layout
from polybus.log.disk import replace_file
from polybus.log.opening import open_reader
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.flows import FlowContext
from polybus.spark.pipelines.standard.expected import COUNTS, KEYS, expectations_table
from polybus.spark.pipelines.standard.gold import QUANTILES, TIME, TRAFFIC_COUNTS, traffic_table
from polybus.spark.sink.any_node import commit_files, files_in
from polybus.spark.sink.staging import SinkColumns, stage

MINUTE_US = 60_000_000
HOUR_MINUTES = 60
WINDOW_MINUTES = 2 * HOUR_MINUTES
JUDGED_MINUTES = 2
"""The current minute and the one before it: the pipeline may lag by some seconds."""
Kind = Literal["spike", "silence"]


@dataclass(frozen=True)
class Alert:
    """One finding about a topic and a minute: the columns of the table `alerts`."""

    kind: Kind
    topic: str
    minute: int
    """In microseconds since 1970."""
    messages: int
    expected: float
    text: str


class Rates:
    """Messages per topic and minute of the last hours."""

    def __init__(self, traffic: pa.Table, now_us: int) -> None:
        """Takes rows of `traffic`: topic, minute, messages. Future minutes are ignored."""
        self._last_minute = now_us // MINUTE_US
        topics = traffic["topic"].combine_chunks().dictionary_encode()
        self.topics: list[str] = topics.dictionary.to_pylist()
        minutes = traffic["minute"].cast(pa.int64()).to_numpy() // MINUTE_US
        columns = minutes - (self._last_minute - WINDOW_MINUTES + 1)
        wanted = (columns >= 0) & (columns < WINDOW_MINUTES)
        self._counts = np.zeros((len(self.topics), WINDOW_MINUTES), dtype=np.int64)
        rows = topics.indices.to_numpy()[wanted]
        np.add.at(self._counts, (rows, columns[wanted]), traffic["messages"].to_numpy()[wanted])
        known = self._counts > 0
        self._first = np.where(known.any(axis=1), known.argmax(axis=1), WINDOW_MINUTES)
        self._last = WINDOW_MINUTES - 1 - known[:, ::-1].argmax(axis=1)

    def spikes(self, settings: Pipeline) -> Iterator[Alert]:
        for column in range(WINDOW_MINUTES - JUDGED_MINUTES, WINDOW_MINUTES):
            usual = self._usual(np.full(len(self.topics), column))
            least = np.maximum(settings.alert_factor * usual, settings.alert_messages_min)
            old = (column - self._first) * 60.0 >= settings.alert_history_s
            old &= column - self._first > 1
            # The history counts whole minutes; a requirement below a second means no requirement.
            old |= settings.alert_history_s < 1.0
            for row in np.flatnonzero(old & (self._counts[:, column] >= least)):
                yield self._alert("spike", int(row), column, usual[row])

    def silences(self, settings: Pipeline, now_us: int) -> Iterator[Alert]:
        usual = self._usual(self._last)
        since_us = (self._last + 1 + self._last_minute - WINDOW_MINUTES + 1) * MINUTE_US
        silent = (now_us - since_us) / 1e6 >= settings.alert_silence_s
        old = (self._last - self._first) * 60.0 >= settings.alert_history_s
        for row in np.flatnonzero(silent & old & (usual >= settings.alert_messages_min)):
            yield self._alert("silence", int(row), int(self._last[row]) + 1, usual[row])

    def _usual(self, before: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The usual rate of each topic in the hour before a column; 0 if unknown.

        The first minute of a topic does not count: it has only a part of a minute's messages.
        """
        columns = np.arange(WINDOW_MINUTES)[None, :]
        first = np.maximum(self._first + 1, before - HOUR_MINUTES)[:, None]
        inside = (columns >= first) & (columns < before[:, None])
        some = inside.any(axis=1)
        hour = np.where(inside, self._counts, np.nan)[some]
        found = np.zeros(len(self.topics))
        found[some] = np.maximum(np.nanmedian(hour, axis=1), np.nanmean(hour, axis=1))
        return found

    def _alert(self, kind: Kind, row: int, column: int, expected: float) -> Alert:
        topic = self.topics[row]
        minute = int((self._last_minute - WINDOW_MINUTES + 1 + column) * MINUTE_US)
        messages = int(self._counts[row, column]) if column < WINDOW_MINUTES else 0
        if kind == "spike":
            text = f"{topic} has {messages} messages in a minute; it usually has {expected:.0f}"
        else:
            text = f"{topic} is silent; it usually has {expected:.0f} messages a minute"
        return Alert(kind, topic, minute, messages, round(float(expected), 3), text)


def find_alerts(
    traffic: pa.Table, now_us: int, settings: Pipeline, raised_us: Mapping[tuple[str, str], int]
) -> list[Alert]:
    """The alerts to raise now; `raised_us` has when each topic last had an alert of each kind."""
    rates = Rates(traffic, now_us)
    pause_us = int(settings.alert_pause_s * 1e6)
    found: dict[tuple[str, str], Alert] = {}
    for alert in (*rates.spikes(settings), *rates.silences(settings, now_us)):
        last = raised_us.get((alert.topic, alert.kind))
        # Until there are messages again, it is the same silence.
        is_other = last is None or last < alert.minute
        if alert.kind == "spike":
            is_other = last is None or now_us - last >= pause_us
        if is_other:
            found[alert.topic, alert.kind] = alert
    return list(found.values())


STATS = "$stats"
ALERTS = "$alerts"
PRODUCER = "standard.watch"
STATE_FILE = "standard-watch.json"
SILENCE_EVERY_S = 5.0
WINDOW_US = WINDOW_MINUTES * MINUTE_US
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
        self._expectations = expectations_table(data)
        self._alerts = open_table(data, "alerts")
        self._last_alerts: dict[tuple[str, str], int] | None = None
        self._seen_version = -1
        self._silence_due_us = 0

    def tick(self, context: FlowContext) -> None:
        """Check once, and publish new findings. Raises PolybusError if the bus is unreachable."""
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

    def _find(self, recent: pa.Table, now_us: int, settings: Pipeline) -> list[Alert]:
        found = find_alerts(recent, now_us, settings, self._alert_times())
        return [one for one in found if one.kind == "spike" or self._is_silent(one.topic, now_us)]

    def _is_silent(self, topic: str, now_us: int) -> bool:
        """Whether the log has no new messages either: the pipeline may just lag."""
        since_us = now_us - JUDGED_MINUTES * MINUTE_US
        try:
            reader = open_reader(self._data)
            return reader.offset_at(topic, since_us) >= reader.bounds(topic).stop
        except PolybusError:
            return False

    def _store(self, found: list[Alert], now_us: int, tick: int) -> None:
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
        traffic = ["topic", "protocol", "minute", *TRAFFIC_COUNTS, *QUANTILES]
        counts = [*KEYS, "consequence", *COUNTS]
        found = []
        for table, columns in ((self._traffic, traffic), (self._expectations, counts)):
            recent = table.recent(self._clock_us() - WINDOW_US)
            if recent is None:
                continue
            # A row that a later batch has changed belongs to a later tick.
            is_after = pc.greater(recent["batch"], state.stats_after)
            is_due = pc.and_(is_after, pc.less_equal(recent["batch"], state.stats_upto))
            fresh = recent.filter(is_due).select(columns)
            found += self._messages(STATS, fresh)
        return found

    def _alert_messages(self, tick: int) -> list[dict[str, str]]:
        if self._alerts.last_batch(PRODUCER) != tick:
            return []
        rows = self._alerts.read()
        rows = rows.filter(pc.equal(rows["tick"], tick)).drop_columns(["tick"])
        return self._messages(ALERTS, rows)

    def _messages(self, system: str, rows: pa.Table) -> list[dict[str, str]]:
        """A message for each row, in the system topic of the account that owns the row's topic."""
        found = []
        for row in rows.to_pylist():
            owner = layout.owner_of(self._data, row["topic"])
            topic = names.full(owner, system)
            # The bus creates those of an account with it, or at its next start.
            if owner == names.ACCOUNT or layout.topic_folder(self._data, topic).is_dir():
                found.append(_message(topic, row))
        return found

    def _read_state(self) -> WatchState:
        try:
            content = self._path.read_bytes()
            return checked_json.decode(content, WatchState, self._path, accept_unchecked=True)
        except (FileNotFoundError, StorageError):
            last = self._alerts.last_batch(PRODUCER)
            state = WatchState(query=str(uuid.uuid4()), tick=-1 if last is None else last)
            # Before the first alert is stored, which would otherwise count as published.
            self._write_state(state)
            return state

    def _write_state(self, state: WatchState) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, checked_json.encode(state))


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
    staged = files_in([stage(iter(rows.to_batches()), columns, bus, (PRODUCER, query), batch_id)])
    body = {
        "producer": PRODUCER,
        "query": query,
        "batch": batch_id,
        "files": [one.name for one in staged],
        "gaps": True,
        # Only one pipeline runs on a data folder: another query is a restart of this one.
        "take-over": True,
    }
    commit_files(bus, body, staged, patience_s=0.0, timeout_s=ANSWER_TIMEOUT_S)
