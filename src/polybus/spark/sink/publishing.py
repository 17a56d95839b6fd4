"""Results to topics from `foreachBatch`: exactly once, in any output mode.

    stream.writeStream.outputMode("update").foreachBatch(
        polybus.spark.upsert("totals", producer="totals", key="customer")
    ).start()

Each call is one transaction on the bus with the key (producer, query id, batch id), as in the
sink. It is idempotent: Spark may call it again with the same batch.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polybus.errors import PolybusError, UsageError
from polybus.spark import sink
from polybus.spark.checkpoint import local_checkpoint

OUTSIDE = "publish"
"""The query id of transactions outside of streaming queries."""


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

    The columns are those of the sink: `value`, and optionally `topic`, `key`, `headers`. Batch
    numbers must ascend and may have gaps. A batch that is already published is not computed again.
    Inside `foreachBatch` the query's id belongs to the key, so the bus refuses a query that starts
    from another checkpoint, unless `take_over` is set.

    Raises:
        UsageError: the bus refuses, nothing is published; code and text say why.
        PolybusError: the bus is away.
    """
    query, checkpoint = _query_of(df, batch_id)
    given = {
        "producer": producer,
        "topic": topic,
        "data": data,
        "url": url,
        "token": token,
        "checkpointLocation": checkpoint,
        "takeOver": take_over,
        "polybusQuery": query,
        "polybusBatch": batch_id,
    }
    options = {name: str(value) for name, value in given.items() if value is not None}
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
    """The function for `foreachBatch` that publishes a stream's changes in `outputMode("update")`.

    Each changed row becomes a message, and its key says which row it is: the last message of a key
    is the row's state. Rows with a column `value` are published as they are. Otherwise the value
    is all columns as JSON, and the key consists of the columns named by `key`: the text of one
    column, or several as JSON.
    """
    keys = [key] if isinstance(key, str) else list(key or ())
    where: dict[str, Any] = {"topic": topic, "data": data, "url": url, "token": token}

    def each(df: Any, batch_id: int) -> None:
        rows = _as_messages(df, keys)
        publish(rows, producer=producer, batch_id=batch_id, take_over=take_over, **where)

    return each


def _as_messages(df: Any, keys: Sequence[str]) -> Any:
    if "value" in df.columns:
        return df
    from pyspark.sql import functions as F

    missing = [name for name in keys if name not in df.columns]
    if missing or not keys:
        problem = f"key names column {missing[0]}, which does not exist" if missing else "no key"
        text = f"{problem}; name one or more of the columns {', '.join(df.columns)}"
        raise UsageError("sink.column", text)
    key = F.col(keys[0]).cast("string") if len(keys) == 1 else F.to_json(F.struct(*keys))
    return df.select(key.alias("key"), F.to_json(F.struct("*")).alias("value"))


def _activate(df: Any) -> None:
    """Set the thread's active session, where Spark looks for data sources made in Python."""
    session = df.sparkSession
    java = getattr(session, "_jsparkSession", None)
    if java is not None:
        session._jvm.SparkSession.setActiveSession(java)  # noqa: SLF001


def _is_done(options: sink.SinkOptions) -> bool:
    """Whether the bus has the batch. False if it does not answer: then the commit finds out."""
    with contextlib.suppress(PolybusError):
        last = options.location.call("GET", f"/v1/commits/{options.producer}")
        return bool(last["query"] == options.query and last["batch"] >= options.batch)
    return False


def _query_of(df: Any, batch_id: int) -> tuple[str, Path | None]:
    """The id of the calling query, and its checkpoint if that has the batch on this disk."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        session = df.sparkSession
        query = session.sparkContext.getLocalProperty("sql.streaming.queryId")
        batch = session.sparkContext.getLocalProperty("streaming.sql.batchId")
    except PySparkException:
        # Spark Connect has no context.
        return OUTSIDE, None
    if not query or batch != str(batch_id):
        return query or OUTSIDE, None
    try:
        # Spark's internals: it has no public way, least of all for a cloned session.
        number = session._jvm.java.util.UUID.fromString(query)  # noqa: SLF001
        active = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
        found = local_checkpoint(active.get(number).resolvedCheckpointRoot())
    except (Py4JError, AttributeError, TypeError):
        found = None
    return query, None if found is None else found.path
