"""Smaller jobs of a query process: histograms, tables, dead letters and figures of `$metrics`."""

import contextlib
import math
from collections import Counter
from collections.abc import Generator
from datetime import UTC, datetime
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from polybus.errors import UsageError
from polybus.lake.table import LakeTable, open_table, table_names
from polybus.lake.values import plain
from polybus.services.events import UNDELIVERED, UndeliveredRange
from polybus.services.queries.engine import RestrictedEngine
from polybus.services.queries.jobs import (
    HistogramJob,
    HistoryJob,
    LettersJob,
    RangesJob,
    UndeliveredJob,
    UndeliveredRow,
    Visibility,
)
from polybus.services.queries.ranges import RangePage, page_of
from polybus.structs import convert, decode

METRICS_TOPIC = "$metrics"
SECONDS_US = 1_000_000
LETTER_BYTES_MAX = 64 << 10
"""Bytes of a dead letter's value in a list; the log has all."""
STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


class EventsMessage(msgspec.Struct):
    """A message of `$events`."""

    events: list[dict[str, Any]] = []


class FiguresMessage(msgspec.Struct):
    """A message of `$metrics`."""

    time: float
    series: dict[str, float | None] = {}
    topics: dict[str, float | None] = {}
    groups: dict[str, float | None] = {}
    group_lag_s: dict[str, float | None] = msgspec.field(name="group-lag-s", default_factory=dict)


def histogram(data: Path, job: HistogramJob) -> dict[str, Any]:
    """Counts and first offsets in bins of a round length."""
    quoted = '"' + job.topic.replace('"', '""') + '"'
    with RestrictedEngine(data, Visibility({job.topic: job.topic})) as engine:
        start_us, stop_us = job.start_us, job.stop_us
        if stop_us <= start_us:
            query = f"SELECT min(epoch_us(timestamp)), max(epoch_us(timestamp)) FROM {quoted}"
            low, high = engine.query(query).fetchone()
            start_us, stop_us = low or 0, (high or 0) + 1
        wanted_s = (stop_us - start_us) / SECONDS_US / job.bins
        bin_s = next((one for one in STEPS_S if one >= wanted_s), None)
        bin_s = bin_s or math.ceil(wanted_s / 86400) * 86400
        bin_us = bin_s * SECONDS_US
        first = start_us // bin_us
        count = (max(start_us, stop_us - 1) // bin_us) - first + 1
        query = (
            f'SELECT epoch_us(timestamp) // {bin_us} - {first}, count(*), min("offset") '
            f"FROM {quoted} WHERE epoch_us(timestamp) >= {start_us} "
            f"AND epoch_us(timestamp) < {stop_us} GROUP BY 1"
        )
        found = {int(at): (many, offset) for at, many, offset in engine.query(query).fetchall()}
    begin_us = first * bin_us
    return {
        "from": _iso(begin_us),
        "to": _iso(begin_us + count * bin_us),
        "bin-s": bin_s,
        "counts": [found.get(at, (0, None))[0] for at in range(count)],
        "offsets": [found.get(at, (0, None))[1] for at in range(count)],
    }


def _iso(time_us: int) -> str:
    at = datetime.fromtimestamp(time_us / SECONDS_US, UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def tables(data: Path, name: str) -> dict[str, Any]:
    """All tables, or one. Raises UsageError `lake.unknown`."""
    names = table_names(data)
    if name:
        if name not in names:
            raise UsageError("lake.unknown", f"there is no table {name[:80]}")
        names = [name]
    return {"tables": [_table(name, open_table(data, name)) for name in names]}


def _table(name: str, table: LakeTable) -> dict[str, Any]:
    state = table.state
    files = state.files.values()
    log = table.path / "_delta_log"
    newest = max((one.stat().st_mtime for one in log.glob("*.json")), default=0.0)
    return {
        "name": name,
        "rows": sum(one.rows for one in files),
        "files": len(state.files),
        "bytes": sum(one.bytes for one in files),
        "version": state.version,
        "updated": _iso(int(newest * SECONDS_US)) if newest else None,
        "columns": [{"name": one["name"], "type": _type(one["type"])} for one in state.fields],
    }


def _type(kind: Any) -> str:
    return kind if isinstance(kind, str) else str(kind.get("type", kind))


def letters(data: Path, job: LettersJob) -> dict[str, Any]:
    """Dead letters, newest first, and their number by topic and reason."""
    table = open_table(data, "quarantine")
    if not table.exists:
        return {"letters": [], "total": 0, "next": None, "by": []}
    rows: pa.Table = table.read()
    # Only displayed rows become whole Python objects: values may be many and large.
    small = ("topic", "epoch", "offset", "reason", "cut")
    about = rows.select([one for one in small if one in rows.column_names]).to_pylist()
    done = {}
    replayed = open_table(data, "replayed")
    if replayed.exists:
        for row in replayed.read().to_pylist():
            done[(row["topic"], row["epoch"], row["offset"])] = row["replayed_at"]
    ids = set(job.ids)
    values = rows.column("value")
    wanted = [
        index
        for index in reversed(range(len(about)))
        if _is_wanted(about[index], job)
        and (not ids or _name(about[index]) in ids)
        and (not job.text or _has_text(values[index].as_py(), job.text))
    ]
    matching = [about[index] for index in wanted]
    waiting = [row for row in matching if _identity(row) not in done and not row.get("cut")]
    by = Counter((row["topic"], row["reason"]) for row in waiting)
    following = job.first + job.limit
    page = rows.take(pa.array(wanted[job.first : following], pa.int64())).to_pylist()
    return {
        "letters": [_letter(row, done.get(_identity(row)), job.is_whole) for row in page],
        "total": len(waiting),
        "next": following if following < len(wanted) else None,
        "by": [
            {"topic": topic, "reason": reason, "count": count}
            for (topic, reason), count in by.most_common(job.pairs_max)
        ],
    }


def _identity(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["topic"], row["epoch"], row["offset"]


def _name(row: dict[str, Any]) -> str:
    return ":".join(map(str, _identity(row)))


def _is_wanted(row: dict[str, Any], job: LettersJob) -> bool:
    if job.topic and row["topic"] != job.topic:
        return False
    return not job.reason or job.reason.lower() in (row["reason"] or "").lower()


def _has_text(value: bytes | None, text: str) -> bool:
    return text.encode().lower() in (value or b"").lower()


def _letter(row: dict[str, Any], replayed_at: datetime | None, is_whole: bool) -> dict[str, Any]:
    value = row.get("value") or b""
    shown = plain(value if is_whole else value[:LETTER_BYTES_MAX])
    content = {"text": shown} if isinstance(shown, str) else shown
    topic, epoch, offset = _identity(row)
    return {
        "id": _name(row),
        **{"topic": topic, "epoch": epoch, "offset": offset},
        "timestamp": plain(row.get("timestamp")),
        "reason": row.get("reason") or "",
        "protocol": row.get("protocol") or "",
        "sender": row.get("sender") or "",
        "key": plain(row.get("key")),
        "headers": plain(row.get("headers") or {}) or {},
        "size": len(value),
        "cut": bool(row.get("cut")),
        "replayed": plain(replayed_at),
        **content,
    }


def undelivered(data: Path, job: UndeliveredJob) -> dict[str, Any]:
    """Undelivered messages, newest first."""
    found: list[dict[str, Any]] = []
    following = job.first + job.limit
    for topic in job.events:
        with contextlib.closing(_missed(data, topic, job)) as rows:
            found += islice(rows, following + 1)
    found.sort(key=itemgetter("time"), reverse=True)
    page = found[job.first : following]
    return {"undelivered": page, "next": following if following < len(found) else None}


def undelivered_ranges(data: Path, job: RangesJob) -> RangePage:
    """A page of the ranges of undelivered messages."""
    rows = (row for topic in job.events for row in _missed(data, topic, job))
    fields = itemgetter(*UndeliveredRange._fields)
    after = None if job.after is None else UndeliveredRange(*job.after)
    return page_of((UndeliveredRange(*fields(row)) for row in rows), after, job.limit)


def _missed(
    data: Path, topic: str, job: UndeliveredJob | RangesJob
) -> Generator[dict[str, Any], None, None]:
    """The matching events of a topic, newest first."""
    quoted = '"' + topic.replace('"', '""') + '"'
    query = (
        f"SELECT text(value) FROM {quoted} WHERE contains(text(value), '\"{UNDELIVERED}\"') "
        'ORDER BY "offset" DESC'
    )
    with RestrictedEngine(data, Visibility({topic: topic})) as engine:
        _, batches = engine.stream(query)
        texts = (text for batch in batches for text in batch.column(0).to_pylist())
        for text in texts:
            yield from (one for one in reversed(_undelivered_in(text)) if _is_missed(one, job))


def _is_missed(row: dict[str, Any], job: UndeliveredJob | RangesJob) -> bool:
    if job.topic not in ("", row["topic"]) or job.reason.lower() not in row["reason"].lower():
        return False
    return any(job.text.lower() in row[name].lower() for name in ("topic", "to"))


def _undelivered_in(text: str | None) -> list[dict[str, Any]]:
    """The undelivered events of a message; none if invalid: administrators may write there."""
    try:
        message = decode(text or "", EventsMessage)
        events = [one for one in message.events if one.get("kind") == UNDELIVERED]
        return [msgspec.to_builtins(convert(one, UndeliveredRow)) for one in events]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def history(data: Path, job: HistoryJob) -> dict[str, Any]:
    """The means of the bus's figures in steps, from the messages of `$metrics`."""
    since_us = int(job.since_s * SECONDS_US)
    query = (
        f'SELECT text(value) FROM "{METRICS_TOPIC}" WHERE epoch_us(timestamp) >= {since_us} '
        'ORDER BY "offset"'
    )
    steps: dict[str, dict[float, dict[str, list[float]]]] = {
        "series": {},
        "topics": {},
        "groups": {},
        "group-lag-s": {},
    }
    with RestrictedEngine(data, Visibility({METRICS_TOPIC: METRICS_TOPIC})) as engine:
        _, batches = engine.stream(query)
        for batch in batches:
            for text in batch.column(0).to_pylist():
                message = _figures(text)
                if message is None:
                    continue
                at = message.time // job.step_s * job.step_s
                for kind, by_step in steps.items():
                    named = by_step.setdefault(at, {})
                    for name, value in getattr(message, kind.replace("-", "_")).items():
                        if value is not None:
                            named.setdefault(name, []).append(value)
    times = sorted(steps["series"])
    answer: dict[str, Any] = {"step-s": job.step_s, "times": times}
    for kind, by_step in steps.items():
        series = {name for named in by_step.values() for name in named}
        answer[kind] = {
            name: [_mean(by_step.get(at, {}).get(name, [])) for at in times]
            for name in sorted(series)
        }
    return answer | {"slow-step-s": job.step_s, "slow-times": times}


def _figures(text: str | None) -> FiguresMessage | None:
    """A message of `$metrics`; None if it is invalid: administrators may write there."""
    try:
        return decode(text or "", FiguresMessage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None
