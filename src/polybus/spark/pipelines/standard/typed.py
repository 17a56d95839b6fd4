"""The tables `silver_<topic>`: a topic's messages in the columns of its declared schema.

A batch adds its rows of each such topic after it has added them to silver, in a Spark job and a
commit per topic, exactly once, as to every table (standard/batches.py). A table that does not exist
yet is made from all rows of the topic in silver that match the schema: when the pipeline starts,
with the first batch that has new settings, or with the topic's first message.

A table may refuse the rows of a batch, for example if another program has changed its columns. The
other topics must not wait for that, so the settings of the table then record that it has missed
rows (`polybus.missed`). The next batch that it accepts adds all missing rows of silver, and the
same commit removes the setting. If another writer changes the table concurrently, nothing is
missed: the batch runs again.

The settings of a table have its schema and a schema version, from 1 on. A new schema is accepted if
readers can follow it (lake/evolution.py), with the next batch of the topic; wider types rewrite the
table, in one commit. Otherwise the topic keeps the schema that its table has, also for quarantine,
and the flow shows why.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from polybus.config import DeclaredTopic
from polybus.errors import BusyError, PolybusError, StorageError, UsageError
from polybus.lake.evolution import evolved, refused
from polybus.lake.fields import TableFields, checked_fields, parsed_fields
from polybus.lake.settings import PipelineSettings
from polybus.lake.standard_tables import typed_names
from polybus.lake.table import LakeTable, TableChange, open_table
from polybus.lake.typed import (
    ABOUT,
    MESSAGE_COLUMNS,
    MISSED,
    SCHEMA,
    SCHEMA_VERSION,
    TABLE_PREFIX,
)
from polybus.spark.declared_fields import field_of, literal, schema_fields
from polybus.spark.pipelines.standard.decode import broken_fields
from polybus.spark.tables import commit_staged, read, stage

PREFIX = TABLE_PREFIX
Warn = Callable[[str, str | None], None]
"""Called with a topic and its problem, or None."""


def typed_tables(data: Path) -> list[LakeTable]:
    """The tables of topics with a schema."""
    return [open_table(data, name) for name in typed_names(data)]


class TypedTables:
    """The typed tables of a data folder, for the writer of silver. Lives as long as its query."""

    def __init__(self, data: Path, writer: str, warn: Warn) -> None:
        self._data = data
        self._writer = writer
        self._warn = warn
        self._tables: dict[str, LakeTable] = {}

    def table(self, topic: str) -> LakeTable:
        return self._tables.setdefault(topic, open_table(self._data, PREFIX + topic))

    def accepted(self, settings: PipelineSettings) -> PipelineSettings:
        """The settings, with the old schema of each topic whose new one is refused."""
        topics = [self._accepted(one) if one.schema else one for one in settings.topics]
        return msgspec.structs.replace(settings, topics=tuple(topics))

    def _accepted(self, topic: DeclaredTopic) -> DeclaredTopic:
        assert topic.schema is not None
        table = self.table(topic.name)
        known = table.settings.get(SCHEMA)
        self._warn(topic.name, None)
        try:
            fields = columns_of(table.name, topic.name, topic.schema)
            if table.exists and known is None:
                raise refused(table.name, "it is not a table of the standard pipeline")
            if known is not None:
                evolved(table.name, declared(table), fields)
        except UsageError as error:
            if error.code == "pipeline.schema":
                raise
            self._warn(topic.name, str(error))
            return msgspec.structs.replace(topic, schema=known) if known else topic
        return topic

    def add(
        self,
        spark: SparkSession,
        silver: LakeTable,
        files: Sequence[str],
        topics: Collection[DeclaredTopic],
        batch_id: int,
    ) -> None:
        """Add the rows of a batch, which are in these files of silver, to the tables of topics."""
        rows: DataFrame | None = None
        for topic in topics:
            table = self.table(topic.name)
            is_whole = table.exists and not table.settings.get(MISSED)
            has_rows = bool(files) or not is_whole
            if topic.schema is None or not has_rows or table.has_batch(self._writer, batch_id):
                continue
            try:
                settings = self._prepare(spark, table, topic.name, topic.schema)
                if is_whole:
                    rows = read(spark, silver, files=files) if rows is None else rows
                    found = rows.where(f"topic = {literal(topic.name)}")
                else:
                    found = lacking(spark, silver, table, topic.name, topic.schema)
                    settings = settings | ({MISSED: ""} if table.exists else {})
                notes = stage(found.selectExpr(*selected(topic.name, topic.schema)), table, ())
                commit_staged(
                    table, notes, writer=self._writer, batch_id=batch_id, settings=settings
                )
            except (StorageError, BusyError):
                raise
            except PolybusError as error:
                # The messages are in silver; the other topics must not wait for this one.
                self._warn(topic.name, str(error))
                if is_whole and SCHEMA in table.settings:
                    table.change(TableChange(settings={MISSED: str(batch_id)}))

    def missing(
        self, spark: SparkSession, silver: LakeTable, topics: Collection[DeclaredTopic]
    ) -> list[DeclaredTopic]:
        """The topics with a schema that have rows in silver and no table, or not all rows."""
        due = []
        for topic in topics:
            if topic.schema is not None:
                table = self.table(topic.name)
                due += [] if table.exists and not table.settings.get(MISSED) else [topic]
        if not due or not silver.exists:
            return []
        among = ", ".join(literal(topic.name) for topic in due)
        found = read(spark, silver).select("topic").where(f"topic IN ({among})").distinct()
        names = {row[0] for row in found.collect()}
        return [topic for topic in due if topic.name in names]

    def _prepare(
        self, spark: SparkSession, table: LakeTable, topic: str, schema: str
    ) -> dict[str, str]:
        """Give the table the columns of a new schema; the settings for its next commit."""
        known = table.settings.get(SCHEMA)
        if table.exists and known is None:
            raise refused(table.name, "it is not a table of the standard pipeline")
        version = int(table.settings.get(SCHEMA_VERSION, "0"))
        if known == schema:
            return {}
        settings = {SCHEMA: schema, SCHEMA_VERSION: str(version + 1)}
        if not table.exists:
            return settings
        state, known_fields = table.state, declared(table)
        fields = evolved(table.name, known_fields, columns_of(table.name, topic, schema))
        wide = [new for new, old in zip(fields, known_fields, strict=False) if new != old]
        if wide:
            types = T.StructType.fromJson({"type": "struct", "fields": wide})
            casts = {one.name: F.col(f"`{one.name}`").cast(one.dataType) for one in types}
            notes = stage(read(spark, table).withColumns(casts), table, ())
            replaced = list(state.files)
            table.change(TableChange(notes, replaced, based_on=state.version, settings=settings))
        return settings


def lacking(
    spark: SparkSession, silver: LakeTable, table: LakeTable, topic: str, schema: str
) -> DataFrame:
    """The rows of silver that match the schema of a topic's table, and that it does not have."""
    found = read(spark, silver).where(f"topic = {literal(topic)} AND {matches(topic, schema)}")
    if not table.exists:
        return found
    places = read(spark, table).selectExpr(f"{ABOUT}.epoch", f"{ABOUT}.offset")
    return found.join(places, ["epoch", "offset"], "left_anti")


def matches(topic: str, schema: str) -> str:
    """The condition that a message of silver is an object that matches the schema."""
    broken = broken_fields(topic, schema, "SCHEMA_OF_VARIANT(payload) LIKE 'OBJECT%'")
    return f"payload IS NOT NULL AND {broken} = ''"


def selected(topic: str, schema: str) -> list[str]:
    """The columns of the table, as expressions over silver."""
    about = ", ".join(f"`{name}`" for name in MESSAGE_COLUMNS)
    columns = [
        f"{field_of(name, kind)} AS `{name}`" for name, kind, _ in schema_fields(topic, schema)
    ]
    return [*columns, f"STRUCT({about}) AS {ABOUT}"]


def columns_of(table: str, topic: str, schema: str) -> TableFields:
    """The columns that a schema gives a table.

    Raises:
        UsageError: `pipeline.schema`; `lake.schema`, a table cannot have such a column.
    """
    if any(name.lower() == ABOUT for name, _, _ in schema_fields(topic, schema)):
        raise UsageError("lake.schema", f"table {table}: the column {ABOUT} is reserved")
    return checked_fields(table, parsed_fields(T.StructType.fromDDL(schema).json()))


def declared(table: LakeTable) -> TableFields:
    """The columns of a typed table that its schema has."""
    return tuple(field for field in table.state.fields if field["name"] != ABOUT)
