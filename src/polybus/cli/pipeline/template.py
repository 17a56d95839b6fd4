"""The small pipeline that `polybus pipeline init` writes; it runs on any bus."""

import re
from pathlib import Path

from polybus.errors import UsageError

FLOWS = '''"""Counts the messages of every topic. Change it as you need."""

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
TOTALS = """-- Messages and bytes per topic: a materialized view, replaced when messages arrive.
CREATE MATERIALIZED VIEW totals AS
SELECT topic, count(*) AS messages, sum(bytes) AS bytes, max(timestamp) AS last
FROM messages
GROUP BY topic
"""
# Required by Spark's own runner (spark-pipelines run --spec …), and used by ours too.
SPEC = """name: {name}
storage: file://{storage}
libraries:
  - glob:
      include: transformations/**
"""
_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)


def write_template(folder: Path, name: str) -> Path:
    """Create the pipeline's folder and return it.

    Raises:
        UsageError: `pipeline.name`, `pipeline.exists`.
    """
    if not _NAME.fullmatch(name):
        text = f"{name!r} is not a valid name: use a letter, then letters, digits, _ and -"
        raise UsageError("pipeline.name", text)
    path = folder / name.lower()
    files = path / "transformations"
    try:
        files.mkdir(parents=True)
    except FileExistsError as error:
        raise UsageError("pipeline.exists", f"{path} exists already; use another name") from error
    (files / "messages.py").write_text(FLOWS)
    (files / "totals.sql").write_text(TOTALS)
    storage = path.absolute() / "pipeline-storage"
    (path / "spark-pipeline.yml").write_text(SPEC.format(name=path.name, storage=storage))
    return path
