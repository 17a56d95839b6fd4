"""The table `deliveries`: what the bus reports in `$events` about each session.

One row per session: packs sent, sent again and confirmed, the time from sending to confirmation,
and the number that still wait. The bus reports the mean time of simultaneous confirmations, so the
percentiles are those of such means, weighted by their packs; a histogram keeps them within 1 %.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from polybus.lake.table import open_table
from polybus.spark.pipelines.standard.accumulated import Accumulated
from polybus.spark.pipelines.standard.histograms import Groups, as_lists, buckets_of

SESSIONS_MAX = 50_000
"""Sessions kept: those with the latest events."""
COUNTS = ("sent", "messages", "sent_again", "confirmed")
QUANTILES = {"confirm_ms_p50": 0.5, "confirm_ms_p95": 0.95}
SCHEMA = (
    "STRUCT<events: ARRAY<STRUCT<kind: STRING, time: TIMESTAMP, session: STRING, topic: STRING, "
    "count: BIGINT, messages: BIGINT, waiting: BIGINT, `wait-ms`: DOUBLE>>>"
)
KINDS = ("session-opened", "delivered", "repeated", "confirmed", "session-ended")


def deliveries_table(data: Path) -> Accumulated:
    return Accumulated(open_table(data, "deliveries"), None, combine=combine_deliveries)


def events_of(frame: DataFrame) -> pa.Table:
    """The events about sessions in messages of `$events`, in order."""
    events = frame.selectExpr(
        "offset", f"POSEXPLODE(FROM_JSON(CAST(value AS STRING), '{SCHEMA}').events) AS (at, event)"
    ).selectExpr("offset", "at", "event.*")
    kinds = ", ".join(f"'{kind}'" for kind in KINDS)
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
    for name in QUANTILES:
        columns[name] = pa.nulls(events.num_rows, pa.float64())
    return pa.table(columns)


def combine_deliveries(rows: pa.Table) -> pa.Table:
    """One row per session."""
    groups = Groups(rows, ("session",))
    columns = groups.aggregate(
        {"session": "first", "first_seen": "min", "last_seen": "max"}
        | dict.fromkeys(COUNTS, "sum")
        | {"waiting": "last", "is_open": "last"}
    )
    waits = groups.histogram("wait_buckets", "wait_counts")
    columns["wait_buckets"], columns["wait_counts"] = waits.lists()
    for name, quantile in QUANTILES.items():
        columns[name] = pc.divide(waits.percentile(quantile).cast(pa.float64()), 1000.0)
    combined = pa.table(columns)
    if combined.num_rows > SESSIONS_MAX:
        order = [("last_seen", "descending"), ("session", "ascending")]
        combined = combined.sort_by(order).slice(0, SESSIONS_MAX)
    return combined
