"""The class of our sessions: PySpark's, whose `read` leaves the history of topics to Spark.

Spark has no hook in Python that replaces what a source reads, and `format("polybus")` in a session
without this class reads everything through the source: the same rows, more slowly.
"""

from typing import Any

from pyspark.sql import DataFrame, DataFrameReader, SparkSession

from polybus.spark import history
from polybus.spark.internals import session_of, turned_into


class TopicReader(DataFrameReader):
    """A reader that remembers its options, which Spark keeps in Java."""

    def __init__(self, spark: SparkSession) -> None:
        super().__init__(spark)
        self._is_of_topics = False
        self._given: dict[str, str] = {}

    def format(self, source: str) -> "TopicReader":
        self._is_of_topics = source.lower() == history.SOURCE
        super().format(source)
        return self

    def option(self, key: str, value: Any) -> "TopicReader":
        if value is not None:
            self._given[key] = str(value).lower() if isinstance(value, bool) else str(value)
        super().option(key, value)
        return self

    def options(self, **options: Any) -> "TopicReader":
        for name, value in options.items():
            self.option(name, value)
        return self

    def load(
        self, path: Any = None, format: str | None = None, schema: Any = None, **options: Any
    ) -> DataFrame:
        if format is not None:
            self.format(format)
        self.options(**options)
        if self._is_of_topics and path is None and schema is None:
            found = history.load(session_of(self), self._given)
            if found is not None:
                return found
        return super().load(path, schema=schema)


class TopicSession(SparkSession):
    """A session with its own JVM."""

    @property
    def read(self) -> TopicReader:
        return TopicReader(self)


def as_topic_session(spark: SparkSession) -> TopicSession:
    """Make a session one of ours."""
    found: TopicSession = turned_into(spark, TopicSession)
    return found
