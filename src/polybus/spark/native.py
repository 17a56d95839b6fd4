"""Spark's own Parquet reader on a list of files: what tables and history are read with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import types as spark_types
from pyspark.sql.pandas.types import from_arrow_type

from polybus.lake.files import SPARK_TYPE
from polybus.lake.table import LakeTable, unknown_table
from polybus.lake.versions import decode_schema

_SETTINGS = {
    # INT96, the default, has no statistics: nothing could be skipped by time.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Shredding gives a VARIANT column another type in each file, and only Spark understands it.
    "spark.sql.variant.writeShredding.enabled": "false",
    # We name every file: a job to list them would cost more than the query.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    # Columns in folder names have the type that the table says.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
}


def prepare(spark: SparkSession) -> None:
    """Set what our tables need of a session, whoever made it."""
    for name, value in _SETTINGS.items():
        if spark.conf.get(name) != value:
            spark.conf.set(name, value)


def read_files(
    spark: SparkSession, schema: spark_types.StructType, base: Path, paths: list[Path]
) -> DataFrame:
    """These files as one DataFrame; columns in the names of folders below `base` count."""
    prepare(spark)
    reader: DataFrameReader = spark.read.schema(schema)
    # Not a pattern: a folder's name may have brackets.
    reader = reader.option("basePath", str(base)).option("__globPaths__", "false")
    # Ours have checksums in every page; a flipped bit must not come out as another value.
    reader = reader.option("parquet.page.verify-checksum.enabled", "true")
    return reader.parquet(*[str(path) for path in paths])


def read(spark: SparkSession, table: LakeTable) -> DataFrame:
    """The table as it is now, by Spark's own Parquet reader: a snapshot that does not move.

    Raises:
        UsageError: `lake.unknown`, the table has no version yet.
    """
    state = table.state
    if state.schema is None:
        raise unknown_table(table.name)
    schema = spark_schema(decode_schema(state.schema))
    if not state.files:
        return spark.createDataFrame([], schema)
    return read_files(spark, schema, table.path, [table.path / path for path in state.files])


def spark_schema(schema: pa.Schema) -> spark_types.StructType:
    """A table's columns as Spark knows them."""
    return spark_types.StructType(
        [spark_types.StructField(field.name, _spark_type(field), True) for field in schema]
    )


def _spark_type(field: Any) -> spark_types.DataType:
    named = (field.metadata or {}).get(SPARK_TYPE)
    if named is None:
        return from_arrow_type(field.type)
    parsed = spark_types.StructType.fromJson(
        {
            "type": "struct",
            "fields": [
                {"name": field.name, "type": json.loads(named), "nullable": True, "metadata": {}}
            ],
        }
    )
    return parsed.fields[0].dataType


def arrow_type(kind: spark_types.DataType) -> pa.DataType:
    """The type of a partition's column in a table: text, unless it is one of these."""
    known: dict[type[spark_types.DataType], pa.DataType] = {
        spark_types.DateType: pa.date32(),
        spark_types.IntegerType: pa.int32(),
        spark_types.LongType: pa.int64(),
    }
    return known.get(type(kind), pa.string())
