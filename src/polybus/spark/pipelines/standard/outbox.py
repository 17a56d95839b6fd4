"""Small results to system topics, exactly once: staged by Arrow, committed by the bus.

The same transaction as the sink's, without a Spark job for a handful of rows. The bus does each
(producer, query, batch) once, so sending again after a failure is safe.
"""

from __future__ import annotations

import pyarrow as pa

from polybus.client.http.blocking import request_json
from polybus.spark.sink.columns import SinkColumns
from polybus.spark.sink.staging import stage, token_of, url_of
from polybus.spark.where import Where

SCHEMA = pa.schema([("topic", pa.string()), ("key", pa.string()), ("value", pa.string())])
COLUMNS = SinkColumns(topic=None, has_key=True, has_headers=False)


def send(rows: pa.Table, where: Where, *, producer: str, query: str, batch_id: int) -> None:
    """Publish rows (SCHEMA) in one commit.

    Raises:
        PolybusError: `client.unreachable`, the bus is away; it may be sent again.
    """
    url = url_of(where)
    file, _ = stage(iter(rows.to_batches()), COLUMNS, where, producer, batch_id)
    body = {
        "producer": producer,
        "query": query,
        "batch": batch_id,
        "files": [] if file is None else [file],
        "gaps": True,
        # Only one pipeline runs on a data folder: another query is a new life of this one.
        "take-over": True,
    }
    request_json(url, "POST", "/v1/commits", body, token=token_of(where))
