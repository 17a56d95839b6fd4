"""The format `polybus-table`: a lake table as it is when a batch of a stream begins.

Spark's own Parquet reader lists a table's files once, when a stream starts, so a stream that is
joined with a table would never see later rows. This source reads the newest version for each batch.
It is for such joins only: everything else reads tables natively.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

FORMAT = "polybus-table"


class LakeTableSource(DataSource):
    """Options: `path`, the table's folder. The schema is required."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def reader(self, schema: Any) -> DataSourceReader:
        from pyspark.sql.pandas.types import to_arrow_schema

        return LakeTableReader(self.options["path"], to_arrow_schema(schema, timezone="UTC"))


class LakeTableReader(DataSourceReader):
    """Reads the newest version in one task: tables that streams are joined with are small."""

    def __init__(self, path: str, schema: pa.Schema) -> None:
        self._path = path
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from polybus.lake.table import LakeTable

        table = LakeTable(Path(self._path))
        if table.exists:
            for batch in table.read().to_batches():
                yield _shaped(batch, self._schema)


def _shaped(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with exactly these columns; missing columns are null."""
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
