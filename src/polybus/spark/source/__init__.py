"""`format("polybus")`: the entry that Spark looks for; readers and writers come from elsewhere."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from polybus.spark.source import options as parsing
from polybus.spark.source.schema import spark_schema


class PolybusDataSource(DataSource):
    """Topics of polybus as batches and streams, and results back to topics."""

    @classmethod
    def name(cls) -> str:
        return "polybus"

    def schema(self) -> StructType:
        given = {name.lower(): value for name, value in self.options.items()}
        if "subscribe" in given or "subscribepattern" in given:
            # Now, and not when the query runs: the mistake is on this line of the user's code.
            parsing.checked(self.options)
        text = given.get("columns")
        return spark_schema(parsing.columns_of({} if text is None else {"columns": text}))

    def reader(self, schema: StructType) -> Any:
        from polybus.spark.source.batch_reader import batch_reader

        return batch_reader(parsing.parse(self.options, streaming=False))

    def streamReader(self, schema: StructType) -> Any:
        from polybus.spark.source.stream_reader import PolybusStreamReader

        return PolybusStreamReader(parsing.parse(self.options, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from polybus.spark.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from polybus.spark.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)
