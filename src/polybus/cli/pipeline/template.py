"""The pipeline that `polybus pipeline init` writes: small, and it runs on any bus."""

from __future__ import annotations

import re
from pathlib import Path

from polybus.errors import UsageError

FLOWS = '''"""How much comes in on every topic. Change it to what you need."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()


@dp.table
def messages() -> DataFrame:
    """One row for each message: a streaming table, which only grows."""
    topics = spark.readStream.format("polybus").option("subscribePattern", ".*")
    rows = topics.option("startingOffsets", "earliest").load()
    return rows.select("topic", "offset", "timestamp", F.length("value").alias("bytes"))
'''
TOTALS = """-- Messages and bytes of every topic: a materialized view, made anew when messages come.
CREATE MATERIALIZED VIEW totals AS
SELECT topic, count(*) AS messages, sum(bytes) AS bytes, max(timestamp) AS last
FROM messages
GROUP BY topic
"""
# Spark's own runner needs it, ours takes it: spark-pipelines run --spec …
SPEC = """name: {name}
storage: file://{storage}
libraries:
  - glob:
      include: transformations/**
"""
_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)


def write_template(folder: Path, name: str) -> Path:
    """Write the pipeline's folder and return it.

    Raises:
        UsageError: `pipeline.name`, `pipeline.exists`.
    """
    if not _NAME.fullmatch(name):
        text = f"{name!r} cannot be a pipeline's name: a letter, then letters, digits, _ or -"
        raise UsageError("pipeline.name", text)
    path = folder / name.lower()
    files = path / "transformations"
    try:
        files.mkdir(parents=True)
    except FileExistsError as error:
        raise UsageError("pipeline.exists", f"{path} is there already") from error
    (files / "messages.py").write_text(FLOWS)
    (files / "totals.sql").write_text(TOTALS)
    storage = path.absolute() / "pipeline-storage"
    (path / "spark-pipeline.yml").write_text(SPEC.format(name=path.name, storage=storage))
    return path
