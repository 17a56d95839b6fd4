"""`format("polybus")`: the class that Spark looks up. Readers and writers are in other modules.

Spark starts a process to look it up, and another to ask for its columns, before the first query can
begin. So this module imports nothing else, and no module that the second needs imports pyarrow.
"""

from typing import Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType


class PolybusDataSource(DataSource):
    """Topics as batches and streams, and results back to topics."""

    @classmethod
    def name(cls) -> str:
        return "polybus"

    def schema(self) -> StructType:
        from polybus.spark.source.options import given_columns, spark_schema

        names = {name.lower() for name in self.options}
        if not names & {"subscribe", "subscribepattern"}:
            # Spark also asks for the schema of a sink, whose options have other names.
            return spark_schema()
        # Check now and not when the query runs: the mistake is on this line of the user's code.
        return spark_schema(given_columns(self.options))

    def reader(self, schema: StructType) -> Any:
        from polybus.spark.source.options import parse
        from polybus.spark.source.readers import batch_reader

        return batch_reader(parse(self.options, streaming=False))

    def streamReader(self, schema: StructType) -> Any:
        from polybus.spark.source.options import parse
        from polybus.spark.source.readers import PolybusStreamReader

        return PolybusStreamReader(parse(self.options, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from polybus.spark.sink import PolybusWriter

        return PolybusWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from polybus.spark.sink import PolybusStreamWriter

        return PolybusStreamWriter(self.options, schema)
