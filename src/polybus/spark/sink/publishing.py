"""Results to topics from `foreachBatch`: exactly once, in any output mode.

    stream.writeStream.outputMode("update").foreachBatch(
        polybus.spark.upsert("totals", producer="totals", key="customer")
    ).start()

Each call is one transaction on the bus, known by (producer, query id, batch id), like one of the
sink: Spark may call again with the same batch as often as it likes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polybus.client.http.blocking import request_json
from polybus.errors import PolybusError, UsageError
from polybus.spark import sink
from polybus.spark.sink.staging import token_of, url_of

OUTSIDE = "publish"
"""The query of transactions that no streaming query makes."""


def publish(  # noqa: PLR0913 - all but the first named by the caller
    df: Any,
    *,
    producer: str,
    batch_id: int,
    topic: str | None = None,
    data: Path | None = None,
    url: str | None = None,
    token: str | None = None,
    take_over: bool = False,
) -> None:
    """Publish the rows of a DataFrame in one commit, exactly once per (producer, batch_id).

    The columns are those of the sink: `value`, and if wanted `topic`, `key`, `headers`. Batches
    may be left out, but their numbers ascend; one that was published is not even computed again.
    Inside `foreachBatch` the query's id belongs to the key, so a query that begins anew from
    another checkpoint is refused until it says `take_over`.

    Raises:
        UsageError: the bus refuses, nothing is published; the code and text say why.
        PolybusError: the bus is away.
    """
    query, checkpoint = _query_of(df, batch_id)
    given = {"producer": producer, "topic": topic, "url": url, "token": token}
    options = {name: value for name, value in given.items() if value is not None}
    if data is not None:
        options["data"] = str(data)
    if checkpoint is not None:
        options["checkpointLocation"] = checkpoint
    options |= {
        "takeOver": str(take_over).lower(),
        "polybusQuery": query,
        "polybusBatch": str(batch_id),
        "polybusGaps": "true",
    }
    if not _is_done(sink.parse(options)):
        _activate(df)
        df.write.format("polybus").mode("append").options(**options).save()


def upsert(  # noqa: PLR0913 - all but the first named by the caller
    topic: str,
    *,
    producer: str,
    key: str | Sequence[str] | None = None,
    data: Path | None = None,
    url: str | None = None,
    token: str | None = None,
    take_over: bool = False,
) -> Callable[[Any, int], None]:
    """What `foreachBatch` takes to publish a stream's changes, for `outputMode("update")`.

    Each row that changed becomes a message whose key says which row it is: the last message of a
    key is its state. Rows that have a column `value` are published as they are. Of others the
    value is all columns as JSON, and the key the columns named by `key`: the text of one, or JSON
    of several.
    """
    keys = [key] if isinstance(key, str) else list(key or ())

    def each(df: Any, batch_id: int) -> None:
        publish(
            _as_messages(df, keys),
            producer=producer,
            batch_id=batch_id,
            topic=topic,
            data=data,
            url=url,
            token=token,
            take_over=take_over,
        )

    return each


def _as_messages(df: Any, keys: Sequence[str]) -> Any:
    if "value" in df.columns:
        return df
    from pyspark.sql import functions as F

    missing = [name for name in keys if name not in df.columns]
    if missing or not keys:
        given = ", ".join(df.columns)
        wanted = f"key names column {missing[0]}" if missing else "key must name columns"
        raise UsageError("sink.column", f"{wanted}, and those there are are {given}")
    one = F.col(keys[0]).cast("string")
    chosen = one if len(keys) == 1 else F.to_json(F.struct(*keys))
    return df.select(chosen.alias("key"), F.to_json(F.struct("*")).alias("value"))


def _activate(df: Any) -> None:
    """Let a thread that has used no session yet find our data source: Spark asks the active one."""
    session = df.sparkSession
    java = getattr(session, "_jsparkSession", None)
    if java is not None:
        session._jvm.SparkSession.setActiveSession(java)  # noqa: SLF001


def _is_done(options: sink.SinkOptions) -> bool:
    """Whether the bus has the batch; if it cannot be asked, the commit will tell."""
    with contextlib.suppress(PolybusError):
        path = f"/v1/commits/{options.producer}"
        last = request_json(url_of(options.where), "GET", path, token=token_of(options.where))
        return bool(last["query"] == options.query and last["batch"] >= options.batch)
    return False


def _query_of(df: Any, batch_id: int) -> tuple[str, str | None]:
    """The id of the query that calls, and its checkpoint's location if that has the batch."""
    from pyspark.errors import PySparkException

    try:
        session = df.sparkSession
        query = session.sparkContext.getLocalProperty("sql.streaming.queryId")
        batch = session.sparkContext.getLocalProperty("streaming.sql.batchId")
    except PySparkException:
        # Spark Connect shows no context.
        return OUTSIDE, None
    if not query:
        return OUTSIDE, None
    return query, _checkpoint_of(session, query) if batch == str(batch_id) else None


def _checkpoint_of(session: Any, query: str) -> str | None:
    """Spark has no public way to tell, least of all to the clone of a session that is used here."""
    from py4j.protocol import Py4JError

    try:
        number = session._jvm.java.util.UUID.fromString(query)  # noqa: SLF001
        active = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
        return str(active.get(number).resolvedCheckpointRoot())
    except (Py4JError, AttributeError, TypeError):
        return None
