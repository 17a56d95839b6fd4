"""Gold: traffic per topic, protocol and minute, and its senders, added up batch by batch."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from polybus.lake.table import open_table
from polybus.spark.pipelines.standard.accumulated import Accumulated
from polybus.spark.pipelines.standard.histograms import Groups, as_lists, buckets_of

TRAFFIC_KEYS = ("topic", "protocol", "minute")
TRAFFIC_COUNTS = ("messages", "bytes", "late", "duplicates", "quarantined")
QUANTILES = {"size_p50": 0.5, "size_p95": 0.95, "size_p99": 0.99}
SENDER_KEYS = ("topic", "hour", "sender")
SENDERS_MAX = 1000
"""Senders kept per topic and hour: those with the most messages."""


def traffic_table(data: Path) -> Accumulated:
    return Accumulated(open_table(data, "traffic"), "minute", combine=combine_traffic)


def senders_table(data: Path) -> Accumulated:
    return Accumulated(open_table(data, "top_senders"), "hour", combine=combine_senders)


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
    for name in QUANTILES:
        columns[name] = pa.nulls(added.num_rows, pa.int64())
    return pa.table(columns)


def combine_traffic(rows: pa.Table) -> pa.Table:
    """One row per topic, protocol and minute, with percentiles of the sizes."""
    groups = Groups(rows, TRAFFIC_KEYS)
    columns = groups.aggregate(
        dict.fromkeys(TRAFFIC_KEYS, "first") | dict.fromkeys(TRAFFIC_COUNTS, "sum")
    )
    sizes = groups.histogram("size_buckets", "size_counts")
    columns["size_buckets"], columns["size_counts"] = sizes.lists()
    columns |= groups.aggregate({"batch": "max"})
    columns |= {name: sizes.percentile(quantile) for name, quantile in QUANTILES.items()}
    return pa.table(columns)


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
