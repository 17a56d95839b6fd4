"""Small tables that Arrow maintains without Spark: traffic, senders, deliveries and recent ids.

Every batch is added to sums exactly once. Sizes and times are counted in buckets whose bounds grow
by 2 %, so counts of batches can be added and a percentile of the sums is at most 1 % from the true
one. Every integer up to 50 has a bucket of its own; 64 MiB is bucket 911 and a day in microseconds
bucket 1272, so there are never many.

The table `deliveries` has a row per session, from what the bus reports in `$events`: packs sent,
sent again and confirmed, the time from sending to confirmation, and the number that still wait. The
bus reports the mean time of simultaneous confirmations, so the percentiles are those of such means,
weighted by their packs.

A duplicate is a message whose id was seen on the same topic within the watermark before it. Recent
ids are in the table `recent_ids`, with a copy in memory: two 64-bit hashes of topic, epoch and id
(together they do not collide in practice), the time the bus received the message, and its
micro-batch. A batch that runs again after a failure ignores the ids that it stored itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pandas.util import hash_array
from pyspark.sql import DataFrame

from polybus.errors import StorageError
from polybus.lake.compact import tidy
from polybus.lake.table import LakeTable, open_table
from polybus.spark.pipelines.standard.feed import changes

TIME = pa.timestamp("us", "UTC")
CLOSED_ROWS = 20_000
"""A larger file is split, so that batches do not rewrite rows of old times."""
OPEN_S = 7200
GROWTH = 1.02
BUCKETS_MAX = 4096
Ints = npt.NDArray[np.int64]
TABLE = "recent_ids"
FILES_MAX = 64
HASH_KEYS = ("polybus-ids-one!", "polybus-ids-two!")
ID_COLUMNS = ["hash_a", "hash_b", "at"]
IDS_SCHEMA = pa.schema(
    {"hash_a": pa.int64(), "hash_b": pa.int64(), "at": TIME, "batch": pa.int64()}
)
TRAFFIC_KEYS = ("topic", "protocol", "minute")
TRAFFIC_COUNTS = ("messages", "bytes", "late", "duplicates", "quarantined")
QUANTILES = {"size_p50": 0.5, "size_p95": 0.95, "size_p99": 0.99}
SENDER_KEYS = ("topic", "hour", "sender")
SENDERS_MAX = 1000
"""Senders kept per topic and hour: those with the most messages."""
SESSIONS_MAX = 50_000
"""Sessions kept: those with the latest events."""
DELIVERY_COUNTS = ("sent", "messages", "sent_again", "confirmed")
DELIVERY_QUANTILES = {"confirm_ms_p50": 0.5, "confirm_ms_p95": 0.95}
EVENTS_SCHEMA = (
    "STRUCT<events: ARRAY<STRUCT<kind: STRING, time: TIMESTAMP, session: STRING, topic: STRING, "
    "count: BIGINT, messages: BIGINT, waiting: BIGINT, `wait-ms`: DOUBLE>>>"
)
EVENT_KINDS = ("session-opened", "delivered", "repeated", "confirmed", "session-ended")


class Accumulated:
    """Sums by key. If a key is a time, a batch rewrites only the files that have its times.

    `combine` merges all rows of the same keys into one. A batch that runs again adds nothing: the
    table stores the last batch of each writer.
    """

    def __init__(
        self,
        table: LakeTable,
        keys: Sequence[str],
        time: str | None,
        *,
        combine: Callable[[pa.Table], pa.Table],
    ) -> None:
        self.table = table
        self._keys = keys
        self._time = time
        self._combine = combine
        self._cached: dict[str, pa.Table] = {}

    def add(self, rows: pa.Table, *, writer: str, batch_id: int) -> None:
        """Add rows, unless the table has the batch already."""
        last = self.table.last_batch(writer)
        if rows.num_rows == 0 or (last is not None and batch_id <= last):
            return
        ends = {}
        if self._time is not None:
            times_us = pc.min_max(rows[self._time].cast(pa.int64())).as_py()
            ends[self._time] = (times_us["min"], times_us["max"])
        touched = self._files(**ends)
        known = [self._read(path) for path in touched]
        sums = [one.select(rows.schema.names) for one in known]
        combined = self._combine(pa.concat_tables([*sums, rows]))
        parts = self._parts(combined)
        notes = [self.table.write(part) for part in parts]
        feed = changes(pa.concat_tables(known), combined, rows, self._keys) if known else None
        self.table.commit(notes, remove=touched, writer=writer, batch_id=batch_id, feed=feed)
        self._cached = {note.file.path: part for note, part in zip(notes, parts, strict=True)}
        tidy(self.table, merge=False)

    def recent(self, since_us: int) -> pa.Table | None:
        """The rows from a time on; None if there are none."""
        assert self._time is not None
        files = self._files(**{self._time: (since_us, None)})
        if not files:
            return None
        rows = pa.concat_tables([self._read(path) for path in files])
        return rows.filter(pc.greater_equal(rows[self._time], pa.scalar(since_us, TIME)))

    def _files(self, **ranges: tuple[int | None, int | None]) -> list[str]:
        found = self.table.files(**ranges)
        return [path.relative_to(self.table.path).as_posix() for path in found]

    def _read(self, path: str) -> pa.Table:
        found = self._cached.get(path)
        if found is not None:
            return found
        try:
            return pq.read_table(self.table.path / path, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise StorageError("lake.damaged", f"table {self.table.name}: {error}") from error

    def _parts(self, rows: pa.Table) -> list[pa.Table]:
        if self._time is None or rows.num_rows <= CLOSED_ROWS:
            return [rows]
        newest_us = pc.max(rows[self._time]).cast(pa.int64()).as_py()
        is_open = pc.greater(rows[self._time], pa.scalar(newest_us - OPEN_S * 1_000_000, TIME))
        parts = [rows.filter(pc.invert(is_open)), rows.filter(is_open)]
        return [part for part in parts if part.num_rows]


def buckets_of(values: Ints) -> Ints:
    # Slightly less, so that a value on a bound does not depend on the rounding of logarithms.
    steps = np.ceil(np.log(np.maximum(values, 1)) / math.log(GROWTH) - 1e-9) + 1
    return np.where(values <= 0, 0, np.minimum(steps, BUCKETS_MAX - 1)).astype(np.int64)


def values_of(buckets: Ints) -> Ints:
    """The value that represents each bucket: the one closest to all values in it."""
    middle = 2.0 * GROWTH ** (buckets - 1.0) / (1.0 + GROWTH)
    return np.where(buckets == 0, 0, np.maximum(np.rint(middle), 1)).astype(np.int64)


def as_lists(values: pa.Array | pa.ChunkedArray) -> pa.ListArray:
    """Each value as a list of one, each null as an empty list."""
    flat = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    offsets = np.concatenate([[0], np.cumsum(np.asarray(flat.is_valid()).astype(np.int64))])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat.drop_null())


class Groups:
    """Rows grouped by the values of some columns; groups are in the order of their keys."""

    def __init__(self, rows: pa.Table, keys: Sequence[str]) -> None:
        self._rows = rows.combine_chunks()
        self.ids: Ints = np.zeros(rows.num_rows, dtype=np.int64)
        for key in keys:
            ranks = pc.rank(self._rows[key], tiebreaker="dense").to_numpy().astype(np.int64)
            # Of the rows in the same group so far, those with the same value of this key.
            pairs = self.ids * (rows.num_rows + 1) + ranks
            self.ids = np.unique(pairs, return_inverse=True)[1].astype(np.int64)

    def aggregate(self, how: Mapping[str, str]) -> dict[str, pa.ChunkedArray]:
        """Column → one value per group: its `sum`, `min`, `max`, or `first` or `last` non-null."""
        numbered = self._rows.append_column("group", pa.array(self.ids))
        # Threads would lose the order of the rows.
        grouped = numbered.group_by("group", use_threads=False).aggregate(list(how.items()))
        grouped = grouped.sort_by("group")
        return {name: grouped[f"{name}_{kind}"] for name, kind in how.items()}

    def histogram(
        self, buckets: str, counts: str, quantiles: Mapping[str, float]
    ) -> dict[str, pa.Array]:
        """Column → the sum of each group's lists of buckets and counts, and its percentiles.

        A percentile is null if the histogram is empty.
        """
        lists = self._rows[buckets].combine_chunks()
        owners = self.ids[pc.list_parent_indices(lists).to_numpy()]
        keyed = owners * BUCKETS_MAX + pc.list_flatten(lists).to_numpy()
        weights = pc.list_flatten(self._rows[counts].combine_chunks()).to_numpy()
        unique, place = np.unique(keyed, return_inverse=True)
        added = np.bincount(place, weights, len(unique)).astype(np.int64)
        # The histogram of group i is `[starts[i]:starts[i + 1]]`.
        group_count = int(self.ids.max(initial=-1)) + 1
        starts = np.searchsorted(unique // BUCKETS_MAX, np.arange(group_count + 1))
        found = unique % BUCKETS_MAX
        running = np.concatenate([[0], np.cumsum(added)])
        before = running[starts[:-1]]
        total = running[starts[1:]] - before
        offsets = pa.array(starts, pa.int32())
        columns = {
            buckets: pa.ListArray.from_arrays(offsets, pa.array(found, pa.int32())),
            counts: pa.ListArray.from_arrays(offsets, pa.array(added, pa.int64())),
        }
        for name, quantile in quantiles.items():
            wanted = before + np.maximum(np.ceil(quantile * total), 1)
            places = np.searchsorted(running[1:], wanted, side="left")
            columns[name] = pa.array(values_of(np.append(found, 0)[places]), mask=total == 0)
        return columns


def traffic_table(data: Path) -> Accumulated:
    table = open_table(data, "traffic", is_fed=True)
    return Accumulated(table, TRAFFIC_KEYS, "minute", combine=combine_traffic)


def senders_table(data: Path) -> Accumulated:
    table = open_table(data, "top_senders", is_fed=True)
    return Accumulated(table, SENDER_KEYS, "hour", combine=combine_senders)


def deliveries_table(data: Path) -> Accumulated:
    table = open_table(data, "deliveries", is_fed=True)
    return Accumulated(table, ("session",), None, combine=combine_deliveries)


def facts_of(
    rows: pa.Table, *, duplicate: npt.NDArray[np.bool_] | None = None, quarantined: bool = False
) -> pa.Table:
    """The facts to count: one row per message."""
    no = np.zeros(rows.num_rows, dtype=bool)
    late = rows["late"] if "late" in rows.column_names else pa.array(no)
    return pa.table(
        {
            "topic": rows["topic"],
            "protocol": pc.fill_null(rows["protocol"], ""),
            "sender": pc.fill_null(rows["sender"], ""),
            "minute": pc.floor_temporal(rows["timestamp"], unit="minute"),
            "messages": pa.array(np.ones(rows.num_rows, dtype=np.int64)),
            "bytes": rows["bytes"].cast(pa.int64()),
            "late": late.cast(pa.int64()),
            "duplicates": pa.array(no if duplicate is None else duplicate).cast(pa.int64()),
            "quarantined": pa.array(no | quarantined).cast(pa.int64()),
        }
    )


def traffic_of(facts: pa.Table, batch_id: int) -> pa.Table:
    """Rows of `traffic`, one per key and size bucket; `combine_traffic` merges them."""
    buckets = pa.array(buckets_of(facts["bytes"].to_numpy()), pa.int32())
    groups = facts.append_column("bucket", buckets).group_by([*TRAFFIC_KEYS, "bucket"])
    added = groups.aggregate([(name, "sum") for name in TRAFFIC_COUNTS])
    columns = {name: added[name] for name in TRAFFIC_KEYS}
    columns |= {name: added[f"{name}_sum"] for name in TRAFFIC_COUNTS}
    columns["size_buckets"] = as_lists(added["bucket"])
    columns["size_counts"] = as_lists(added["messages_sum"])
    columns["batch"] = pa.array(np.full(added.num_rows, batch_id, dtype=np.int64))
    return pa.table(columns)


def combine_traffic(rows: pa.Table) -> pa.Table:
    """One row per topic, protocol and minute, with percentiles of the sizes."""
    groups = Groups(rows, TRAFFIC_KEYS)
    sums = dict.fromkeys(TRAFFIC_COUNTS, "sum") | {"batch": "max"}
    columns = groups.aggregate(dict.fromkeys(TRAFFIC_KEYS, "first") | sums)
    columns |= groups.histogram("size_buckets", "size_counts", QUANTILES)
    return pa.table(columns).select([*rows.column_names, *QUANTILES])


def senders_of(facts: pa.Table) -> pa.Table:
    hour = pc.floor_temporal(facts["minute"], unit="hour")
    return facts.select(["topic", "sender", "messages", "bytes"]).add_column(1, "hour", hour)


def combine_senders(rows: pa.Table) -> pa.Table:
    """One row per topic, hour and sender; the SENDERS_MAX busiest of each topic and hour."""
    columns = Groups(rows, SENDER_KEYS).aggregate(
        dict.fromkeys(SENDER_KEYS, "first") | {"messages": "sum", "bytes": "sum"}
    )
    order = [("topic", "ascending"), ("hour", "ascending"), ("messages", "descending")]
    added = pa.table(columns).sort_by([*order, ("sender", "ascending")])
    of_topic = Groups(added, ("topic", "hour"))
    _, starts = np.unique(of_topic.ids, return_index=True)
    rank = np.arange(added.num_rows) - starts[of_topic.ids]
    return added.filter(pa.array(rank < SENDERS_MAX))


def events_of(frame: DataFrame) -> pa.Table:
    """The events about sessions in messages of `$events`, in order."""
    events = frame.selectExpr(
        "offset",
        f"POSEXPLODE(FROM_JSON(CAST(value AS STRING), '{EVENTS_SCHEMA}').events) AS (at, event)",
    ).selectExpr("offset", "at", "event.*")
    kinds = ", ".join(f"'{kind}'" for kind in EVENT_KINDS)
    found = events.where(f"session IS NOT NULL AND kind IN ({kinds})").toArrow()
    return found.sort_by([("offset", "ascending"), ("at", "ascending")])


def deliveries_of(events: pa.Table) -> pa.Table:
    """Rows of `deliveries`, one per event; `combine_deliveries` merges them."""
    kind = events["kind"]
    none = pa.nulls(events.num_rows, pa.int64())
    count = pc.fill_null(events["count"], 0)

    def of(name: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
        return pc.if_else(pc.equal(kind, name), values, 0)

    is_timed = pc.and_(pc.equal(kind, "confirmed"), pc.is_valid(events["wait-ms"]))
    wait_us = pc.fill_null(pc.multiply(events["wait-ms"], 1000), 0).to_numpy().astype(np.int64)
    bucket = pc.if_else(is_timed, pa.array(buckets_of(wait_us), pa.int32()), None)
    columns = {
        "session": events["session"],
        "first_seen": events["time"],
        "last_seen": events["time"],
        "sent": of("delivered", count),
        "messages": of("delivered", pc.fill_null(events["messages"], 0)),
        "sent_again": of("repeated", count),
        "confirmed": of("confirmed", count),
        # Null if the event does not have it; the last value counts.
        "waiting": events["waiting"],
        "is_open": pc.not_equal(kind, "session-ended"),
        "wait_buckets": as_lists(bucket),
        "wait_counts": as_lists(pc.if_else(is_timed, count, none)),
    }
    return pa.table(columns)


def combine_deliveries(rows: pa.Table) -> pa.Table:
    """One row per session."""
    groups = Groups(rows, ("session",))
    columns = groups.aggregate(
        {"session": "first", "first_seen": "min", "last_seen": "max"}
        | dict.fromkeys(DELIVERY_COUNTS, "sum")
        | {"waiting": "last", "is_open": "last"}
    )
    columns |= groups.histogram("wait_buckets", "wait_counts", DELIVERY_QUANTILES)
    for name in DELIVERY_QUANTILES:
        columns[name] = pc.divide(columns[name].cast(pa.float64()), 1000.0)
    combined = pa.table(columns)
    if combined.num_rows > SESSIONS_MAX:
        order = [("last_seen", "descending"), ("session", "ascending")]
        combined = combined.sort_by(order).slice(0, SESSIONS_MAX)
    return combined


class RecentIds:
    """The recent ids. For one thread, that of the flow that writes them."""

    def __init__(self, data: Path, writer: str) -> None:
        self._table: LakeTable = open_table(data, TABLE)
        self._writer = writer
        self._rows = IDS_SCHEMA.empty_table()
        if self._table.exists:
            self._rows = self._table.read().select(IDS_SCHEMA.names).cast(IDS_SCHEMA)

    @staticmethod
    def of(messages: pa.Table) -> pa.Table:
        """The ids of messages that have one, in the same order."""
        parts = [messages["topic"], messages["epoch"].cast(pa.string()), messages["message_id"]]
        # Neither topic nor epoch contains a line break, so different ids stay different.
        joined = pc.binary_join_element_wise(*parts, "\n").to_numpy(zero_copy_only=False)
        hashes = [hash_array(joined, hash_key=key, categorize=False) for key in HASH_KEYS]
        return pa.table(
            {
                "hash_a": pa.array(hashes[0].view(np.int64)),
                "hash_b": pa.array(hashes[1].view(np.int64)),
                "at": messages["timestamp"],
                "offset": messages["offset"],
            }
        )

    def duplicates(
        self, fresh: pa.Table, batch_id: int, *, watermark_s: float
    ) -> npt.NDArray[np.bool_]:
        """A flag for each id of a batch."""
        near = self._rows.filter(
            pc.and_(
                pc.is_in(self._rows["hash_a"], value_set=pc.unique(fresh["hash_a"])),
                pc.not_equal(self._rows["batch"], batch_id),
            )
        )
        known = near.num_rows
        joined = pa.concat_tables([near.select(ID_COLUMNS), fresh.select(ID_COLUMNS)])
        offsets = np.concatenate([np.full(known, -1), fresh["offset"].to_numpy()])
        hash_a, hash_b = joined["hash_a"].to_numpy(), joined["hash_b"].to_numpy()
        at_us = joined["at"].cast(pa.int64()).to_numpy()
        # Of equal ids at equal times the first in the log is the original.
        order = np.lexsort((offsets, at_us, hash_b, hash_a))
        same = (np.diff(hash_a[order]) == 0) & (np.diff(hash_b[order]) == 0)
        soon = np.diff(at_us[order]) <= watermark_s * 1e6
        flags = np.zeros(len(order), dtype=bool)
        flags[order[1:]] = same & soon
        return flags[known:]

    def remember(self, fresh: pa.Table, batch_id: int, *, watermark_s: float, ids_max: int) -> None:
        """Store a batch's ids and forget those older than the watermark."""
        last = self._table.last_batch(self._writer)
        if last is not None and batch_id <= last:
            return
        batch = pa.array(np.full(fresh.num_rows, batch_id, dtype=np.int64))
        rows = fresh.select(ID_COLUMNS).append_column("batch", batch).cast(IDS_SCHEMA)
        everything = pa.concat_tables([self._rows, rows])
        newest_us = pc.max(everything["at"]).cast(pa.int64()).as_py()
        oldest = pa.scalar(int(newest_us - watermark_s * 1e6), TIME)
        everything = everything.filter(pc.greater_equal(everything["at"], oldest))
        self._rows = everything.slice(max(0, everything.num_rows - ids_max)).combine_chunks()
        state = self._table.state
        is_rewritten = len(state.files) >= FILES_MAX
        note = self._table.write(self._rows if is_rewritten else rows)
        replaced = list(state.files) if is_rewritten else []
        self._table.commit([note], remove=replaced, writer=self._writer, batch_id=batch_id)
        tidy(self._table, merge=False)
