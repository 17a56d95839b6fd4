"""Gold: traffic per topic, protocol and minute, its senders, and deliveries, batch by batch.

The table `deliveries` has a row per session, from what the bus reports in `$events`: packs sent,
sent again and confirmed, the time from sending to confirmation, and the number that still wait. The
bus reports the mean time of simultaneous confirmations, so the percentiles are those of such means,
weighted by their packs; a histogram keeps them within 1 %.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from polybus.lake.table import open_table
from polybus.spark.pipelines.standard.accumulated import Accumulated, Groups, as_lists, buckets_of

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


def traffic_table(data: Path) -> Accumulated:
    return Accumulated(open_table(data, "traffic"), "minute", combine=combine_traffic)


def senders_table(data: Path) -> Accumulated:
    return Accumulated(open_table(data, "top_senders"), "hour", combine=combine_senders)


def deliveries_table(data: Path) -> Accumulated:
    return Accumulated(open_table(data, "deliveries"), None, combine=combine_deliveries)


def facts_of(
    rows: pa.Table, *, duplicate: npt.NDArray[np.bool_] | None = None, quarantined: bool = False
) -> pa.Table:
    """What is counted: one row per message."""
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
        # Null if the event does not say; the last one that does counts.
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
