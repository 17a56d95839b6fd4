"""The standard flows: `watch`, and `decode`, one query over all topics that feeds every table.

`decode` adds each micro-batch to every table exactly once. The order of writes for batch N, whose
plan is synced first:

    standard-settings.json (if the settings changed) → standard-aside.json (if decoding raised)
    → standard-stopped.json (if a topic must be left out) → silver → silver_<topic> …
    → quarantine → recent_ids → expectations → traffic → top_senders
    → standard-stopped.json (if a stopped topic continues) → deliveries

Spark runs a batch again after a failure, with the same messages, and it then passes through the
same order. Every table stores the last batch of its writer in the same commit as the rows and
ignores a batch that it has, so any prefix of the order is completed and nothing is added twice.
The writer's name contains the id of the checkpoint: a new checkpoint, which counts batches from 0
again, is another writer.

If a topic's schema changes between two runs of a batch, a message that the first run put into
silver must not go to quarantine in the second. So new settings are stored before the first batch
that uses them, and a batch that an earlier process began gets the stored ones. The source cuts
values over a limit that is fixed when the query starts (`cut_over`), so the stored limit of values
is never larger.

The cost of a batch is mostly its number of Spark jobs, so most batches have one: it decodes the
messages and writes them as files of silver that are not yet part of the table; those of a small
batch (planned.py) are collected and written here, because Spark's own writer takes longer to set up
than to decode them. Only if these have
fewer rows than the plan, the missing messages go to quarantine in a second job. Duplicates and
figures are computed from the files by Arrow.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from polybus.errors import StorageError, UsageError
from polybus.lake import settings as pipeline_settings
from polybus.lake.files import NewFile, new_path, note_of, write_file
from polybus.lake.settings import PipelineSettings
from polybus.lake.standard_tables import EXPECTATIONS, TABLES
from polybus.lake.stopped import read as read_stopped
from polybus.lake.stopped import still_stopped
from polybus.lake.table import LakeTable, open_table
from polybus.log import checked_json
from polybus.log.disk import replace_file
from polybus.spark.causes import brief_errors
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.expectations import CheckedRows, Expectation, ExpectationCount, added
from polybus.spark.internals import INTERPRETED, ReusedPlan, is_connect
from polybus.spark.pipelines.flows import FlowContext, FlowProgress, PipelineFlow
from polybus.spark.pipelines.standard import decode, gold, poison
from polybus.spark.pipelines.standard.expected import (
    expectations,
    expectations_table,
    problem_with,
    rows_of,
)
from polybus.spark.pipelines.standard.planned import EVENTS, BatchPlans, PlannedRows
from polybus.spark.pipelines.standard.poison import PoisonMessages
from polybus.spark.pipelines.standard.stops import Stops, among, broken
from polybus.spark.pipelines.standard.typed import PREFIX, TypedTables, typed_tables
from polybus.spark.pipelines.standard.watch import Watch
from polybus.spark.source.options import COLUMNS, VALUE_BYTES, VALUE_BYTES_MAX
from polybus.spark.tables import commit_staged, stage, stage_small

GROUP = "standard"
LOOK_EVERY_S = 0.2
# All user topics, and the system topics in which the bus reports deliveries, one of each account.
PATTERN = r"\$events|(?!\$)(?!.*/\$(alerts|stats)$).*"
_ADVICE = (
    "restore the checkpoint and the tables from one backup, or run polybus tables drop silver "
    f"--rebuild: {', '.join(TABLES)}, {EXPECTATIONS} and {PREFIX}TOPIC are then built again from "
    "the log"
)
_DAMAGED_ADVICE = (
    "if the batch is in silver already, all topics wait for it: restore the file from a backup, or "
    "delete the topic, and the pipeline continues by itself"
)
OF_EVENTS = f"topic = '{EVENTS}' OR ENDSWITH(topic, '/{EVENTS}')"
SETTINGS_FILE = "standard-settings.json"
FACT_COLUMNS = ["topic", "epoch", "offset", "timestamp", "protocol", "sender"]


class StandardBatches:
    """The function for `foreachBatch`. One object lives as long as its query.

    Args:
        begun: the batch that an earlier process began and did not finish, if there is one.
        cut_over: the source cuts larger values.
        figures: gets how often each batch was read, and what is wrong with settings of topics.
    """

    def __init__(
        self,
        data: Path,
        writer: str,
        checkpoint: Checkpoint | None = None,
        begun: int | None = None,
        cut_over: int = VALUE_BYTES_MAX,
        figures: FlowProgress | None = None,
    ) -> None:
        self._arguments = (data, writer, checkpoint, begun, cut_over)
        self._figures = figures or FlowProgress()
        self.on_traffic: Callable[[], None] = lambda: None
        """Called when `traffic` has a batch; not over Spark Connect, where this is elsewhere."""
        self.plans = BatchPlans(data, checkpoint)
        self._settings = _stored_settings(data)
        self._given: PipelineSettings | None = None
        self._typed = TypedTables(data, writer, self._figures.warn)
        self._stops = Stops(data, writer)
        self._decoded: tuple[PipelineSettings, list[str]] | None = None
        self._analysed: dict[str, ReusedPlan] = {}
        self._expected: list[Expectation] = []
        self._counts: list[ExpectationCount] = []
        self._stage_rows = stage
        self._is_compiled = True
        self._compiling: dict[str, str] = {}
        self._silver = open_table(data, "silver")
        self._quarantine = open_table(data, "quarantine")
        self._traffic = gold.traffic_table(data)
        self._senders = gold.senders_table(data)
        self._deliveries = gold.deliveries_table(data)
        self._expectations = expectations_table(data)
        self._ids = gold.RecentIds(data, writer)

    def __reduce__(self) -> tuple[Any, ...]:
        """Spark Connect sends it to the server, which creates its own there."""
        return StandardBatches, self._arguments

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        with brief_errors():
            self._add(frame, batch_id)

    def _add(self, frame: DataFrame, batch_id: int) -> None:
        writer, plan = self._arguments[1], self.plans.synced(batch_id)
        settings = self._settings_of(batch_id)
        self._compile(frame.sparkSession, is_on=not plan.is_small)
        if plan.is_one_task:
            frame = self._done("coalesce", frame, lambda rows: rows.coalesce(1))
        scans = 0
        if plan.messages != 0:
            scans += self._add_messages(frame, batch_id, plan, settings)
        if plan.events != 0 and settings.pipeline.deliveries:
            events = gold.events_of(frame.where(OF_EVENTS))
            self._deliveries.add(gold.deliveries_of(events), writer=writer, batch_id=batch_id)
            scans += 1
        self._figures.scanned(batch_id, scans)

    def _compile(self, spark: SparkSession, *, is_on: bool) -> None:
        """Let Spark compile its expressions for a large batch, and interpret them for a small one.

        The session is the query's own. To generate the code takes longer than to decode a few
        messages, and to compile it, once, takes seconds.
        """
        if is_on == self._is_compiled:
            return
        for name, value in INTERPRETED.items():
            known = self._compiling.setdefault(name, str(spark.conf.get(name)))
            spark.conf.set(name, known if is_on else value)
        self._is_compiled = is_on

    def _done(self, what: str, frame: DataFrame, do: Callable[[DataFrame], DataFrame]) -> DataFrame:
        """The result of `do` for a batch; Spark analyses its plan only for the first batch."""
        if is_connect(frame.sparkSession):
            return do(frame)
        known = self._analysed.get(what)
        done = None if known is None else known.onto(frame)
        if done is None:
            done = do(frame)
            self._analysed[what] = ReusedPlan(frame, done)
        return done

    def make_typed(self, spark: SparkSession) -> None:
        """Make tables of topics that have rows in silver, before the first batch comes."""
        data, writer, *_ = self._arguments
        last = self._silver.last_batch(writer)
        if last is not None:
            topics = self._typed.accepted(pipeline_settings.read(data)).topics
            due = self._typed.missing(spark, self._silver, topics)
            self._typed.add(spark, self._silver, (), due, last)

    def _settings_of(self, batch_id: int) -> PipelineSettings:
        """The settings of the bus's file, unless an earlier process began the batch.

        Raises:
            StorageError: `pipeline.settings`, the bus's settings file cannot be read.
        """
        data, _, _, begun, cut_over = self._arguments
        if self._settings is not None and batch_id == begun:
            return _with_limit(self._settings, cut_over)
        given = pipeline_settings.read(data)
        if given == self._given and self._settings is not None:
            return self._settings
        newest = _with_limit(self._typed.accepted(given), cut_over)
        self._given = given
        if newest != self._settings:
            path = data / "pipeline" / SETTINGS_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, checked_json.encode(newest))
            self._settings = newest
        return newest

    def _add_messages(
        self, frame: DataFrame, batch_id: int, plan: PlannedRows, settings: PipelineSettings
    ) -> int:
        """Decode, store and count; returns how often this read the batch."""
        is_new = self._decoded is None or self._decoded[0] != settings
        if is_new:
            self._prepare(frame, settings)
        raw = self._done("messages", frame, lambda rows: rows.where(f"NOT ({OF_EVENTS})"))
        limit = settings.pipeline.value_bytes_max
        if stopped := self._stops.of_batch(batch_id):
            raw = raw.where(f"NOT {among(stopped)}")
        self._stage_rows = stage_small if plan.is_small else stage
        good, bad, kept = self._stage(raw, batch_id, limit)
        if reasons := self._broken(batch_id):
            self._discard([*good, *bad])
            self._stops.add(raw, reasons, settings, batch_id)
            good, bad, kept = self._stage(raw.where(f"NOT {among(reasons)}"), batch_id, limit)
        facts = read_facts(self._silver, good, "bytes", "late", "message_id")
        has_id = pc.is_valid(facts["message_id"])
        is_duplicate = np.zeros(facts.num_rows, dtype=bool)
        with_id, watermark_s = facts.filter(has_id), settings.pipeline.watermark_s
        if with_id.num_rows:
            ids = self._ids.of(with_id)
            flags = self._ids.duplicates(ids, batch_id, watermark_s=watermark_s)
            is_duplicate[np.flatnonzero(has_id)] = flags
        unique = without(self._silver, good, is_duplicate)
        writer = self._arguments[1]
        topics = set(facts["topic"].unique().to_pylist())
        typed = [one for one in settings.topics if one.schema and one.name in topics]
        files = [note.file.path for note in unique if note.file.rows]

        def add_typed() -> None:
            spark = frame.sparkSession
            others = [one for one in settings.topics if one.name not in topics]
            due = self._typed.missing(spark, self._silver, others) if is_new else []
            self._typed.add(spark, self._silver, files, [*typed, *due], batch_id)

        commit_staged(
            self._silver,
            unique,
            writer=writer,
            batch_id=batch_id,
            then=add_typed if typed or is_new else None,
        )
        parts = [gold.facts_of(facts, duplicate=is_duplicate)]
        if plan.messages is None or plan.messages > facts.num_rows:
            parts.append(self._add_quarantined(kept, bad, batch_id, limit))
        if with_id.num_rows:
            ids_max = settings.pipeline.ids_max
            self._ids.remember(ids, batch_id, watermark_s=watermark_s, ids_max=ids_max)
        self._expectations.add(rows_of(self._counts, batch_id), writer=writer, batch_id=batch_id)
        counted = pa.concat_tables(parts)
        if settings.pipeline.gold:
            traffic = gold.traffic_of(counted, batch_id)
            self._traffic.add(traffic, writer=writer, batch_id=batch_id)
            self.on_traffic()
            self._senders.add(gold.senders_of(counted), writer=writer, batch_id=batch_id)
        self._stops.remove(counted["topic"].unique().to_pylist(), batch_id)
        self._figures.expected(self._counts)
        return len(parts)

    def _prepare(self, frame: DataFrame, settings: PipelineSettings) -> None:
        """Build the expressions of new settings."""
        self._expected = []
        given = expectations(settings)
        decoded = frame.selectExpr("*", *decode.columns(settings)) if given else frame
        for one in given:
            problem = problem_with(one, decoded)
            self._figures.warn(f"{one.topic}: {one.name}", problem)
            if problem is None:
                self._expected.append(one)
        self._decoded = settings, decode.columns(settings, self._expected)
        self._analysed.pop("decode", None)

    def _broken(self, batch_id: int) -> dict[str, str]:
        """The topics of a batch that violate expectations, unless silver has the batch."""
        has_batch = self._silver.has_batch(self._arguments[1], batch_id)
        return {} if has_batch else broken(self._counts)

    def _discard(self, staged: list[NewFile]) -> None:
        for note in staged:
            (self._silver.path / note.file.path).unlink(missing_ok=True)
            (self._quarantine.path / note.file.path).unlink(missing_ok=True)

    def _decode(self, raw: DataFrame) -> DataFrame:
        assert self._decoded is not None
        return raw.selectExpr("*", *self._decoded[1])

    def _stage(
        self, raw: DataFrame, batch_id: int, limit: int
    ) -> tuple[list[NewFile], list[NewFile], DataFrame]:
        """Write messages to files of silver, and those that make it raise to files of quarantine.

        Returns both, and all messages but those that raise.
        """
        data, writer = self._arguments[:2]

        def stage_good(part: DataFrame) -> list[NewFile]:
            if not self._expected:
                rows = self._done("decode", part, lambda one: _good(self._decode(one)))
                return self._stage_rows(rows, self._silver, (), json=("payload",))
            checked = CheckedRows(self._decode(part), self._expected)
            rows = _good(checked.rows)
            notes = self._stage_rows(rows, self._silver, (), json=("payload",))
            added(self._counts, checked.counts())
            return notes

        self._counts = []

        left_out = self._set_aside(batch_id)
        is_stored = bool(left_out.ranges)
        if not is_stored:
            try:
                return stage_good(raw), [], raw
            except Exception as error:
                # Rows that the batch has added to silver stay there, so it can no longer change.
                has_batch = self._silver.last_batch(writer) == batch_id
                if has_batch or poison.is_of_surroundings(error):
                    raise
            good, found = poison.stage_apart(raw, stage_good)
            left_out = PoisonMessages(writer, batch_id, found)
        else:
            good = stage_good(raw.where(f"NOT ({left_out.condition})"))
        if not left_out.ranges:
            return good, [], raw
        unread = raw.where(left_out.condition)
        unread = unread.selectExpr("*", decode.BYTES, f"{left_out.reason} AS reason")
        bad = stage(unread.selectExpr(*decode.quarantined(limit)), self._quarantine, ())
        if not is_stored:
            left_out.save(data)
        return good, bad, raw.where(f"NOT ({left_out.condition})")

    def _set_aside(self, batch_id: int) -> PoisonMessages:
        """The messages that the batch set aside before. Raises StorageError if that is unknown."""
        data, writer, *_ = self._arguments
        try:
            return poison.stored(data, writer, batch_id)
        except StorageError:
            if self._silver.last_batch(writer) == batch_id:
                raise
            return PoisonMessages(writer, batch_id)

    def _add_quarantined(
        self, raw: DataFrame, notes: list[NewFile], batch_id: int, limit: int
    ) -> pa.Table:
        """Store messages that cannot be decoded in quarantine; returns their facts."""
        bad = self._decode(raw).where("reason IS NOT NULL")
        bad = bad.selectExpr(*decode.quarantined(limit))
        notes = [*notes, *stage(bad, self._quarantine, ())]
        facts = read_facts(self._quarantine, notes, "bytes")
        commit_staged(self._quarantine, notes, writer=self._arguments[1], batch_id=batch_id)
        return gold.facts_of(facts, quarantined=True)


def _good(decoded: DataFrame) -> DataFrame:
    return decoded.where("reason IS NULL").selectExpr(*decode.SILVER)


def _stored_settings(data: Path) -> PipelineSettings | None:
    path = data / "pipeline" / SETTINGS_FILE
    try:
        return checked_json.decode(path.read_bytes(), PipelineSettings, path, accept_unchecked=True)
    except (FileNotFoundError, StorageError):
        return None


def _with_limit(settings: PipelineSettings, cut_over: int) -> PipelineSettings:
    limit = min(settings.pipeline.value_bytes_max, cut_over)
    pipeline = msgspec.structs.replace(settings.pipeline, value_bytes_max=limit)
    return msgspec.structs.replace(settings, pipeline=pipeline)


def cut_limit(data: Path, begun: int | None) -> int:
    """The size over which the source cuts values: no batch of the query decodes a larger one."""
    limit = pipeline_settings.read(data).pipeline.value_bytes_max
    stored = _stored_settings(data)
    if begun is not None and stored is not None:
        limit = max(limit, stored.pipeline.value_bytes_max)
    return min(limit, VALUE_BYTES_MAX)


def read_facts(table: LakeTable, notes: Sequence[NewFile], *more: str) -> pa.Table:
    """FACT_COLUMNS and more of files that are not yet part of the table."""
    columns = [*FACT_COLUMNS, *more]
    found = [pq.read_table(table.path / note.file.path, columns=columns) for note in notes]
    return pa.concat_tables(found)


def without(
    table: LakeTable, notes: Sequence[NewFile], is_duplicate: npt.NDArray[np.bool_]
) -> list[NewFile]:
    """Write the files again without duplicates; the flags are those of all files in order."""
    kept = []
    first = 0
    for note in notes:
        flags = is_duplicate[first : first + note.file.rows]
        first += note.file.rows
        if flags.any():
            old, path = table.path / note.file.path, new_path()
            schema = pq.read_schema(old)
            write_file(table.path / path, schema, _filtered(old, schema, ~flags))
            old.unlink()
            note = note_of(table.path, path, note.fields)
        kept.append(note)
    return kept


def _filtered(
    path: Path, schema: pa.Schema, keep: npt.NDArray[np.bool_]
) -> Iterator[pa.RecordBatch]:
    first = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches():
            mask = pa.array(keep[first : first + batch.num_rows])
            first += batch.num_rows
            yield pa.RecordBatch.from_arrays(batch.filter(mask).columns, schema=schema)


def flows(data: Path) -> list[PipelineFlow]:
    """The flows of the standard pipeline for the bus of a data folder."""
    has_traffic = threading.Event()
    # Internal tables of the pipeline are not outputs.
    shown = [name for name in TABLES if name != "recent_ids"]
    return [
        PipelineFlow(
            GROUP,
            "decode",
            partial(start_decode, on_traffic=has_traffic.set),
            # A batch over a file that was damaged after its plan runs again without the topic.
            retried=("log.damaged", "log.frozen"),
            retried_advice=_DAMAGED_ADVICE,
            outputs=tuple(f"table:{name}" for name in (*shown, EXPECTATIONS, f"{PREFIX}*")),
        ),
        PipelineFlow(
            GROUP,
            "watch",
            Watch(data).tick,
            repeat_s=LOOK_EVERY_S,
            news=has_traffic,
            inputs=("table:traffic",),
            outputs=("table:alerts", "topic:$alerts", "topic:$stats"),
        ),
    ]


def start_decode(context: FlowContext, *, on_traffic: Callable[[], None] = lambda: None) -> Any:
    """Start one query over all topics, from its checkpoint or from the beginning of the log.

    `on_traffic` is called when a batch is in `traffic`.

    Raises:
        UsageError: `pipeline.checkpoint`, the tables were filled from another checkpoint.
    """
    data, checkpoint = context.bus.data, Checkpoint(context.checkpoint)
    writer = writer_of(checkpoint)
    check_tables(data, writer, checkpoint)
    if is_connect(context.spark):
        context.figures.rows = None  # the number of reads of a batch is not reported
    begun = checkpoint.unfinished_batch()
    cut_over = cut_limit(data, begun)
    stops = Stops(data, writer)
    stops.forget_others()
    if begun is not None and not open_table(data, "silver").has_batch(writer, begun):
        stops.add_damaged(context.bus, checkpoint, begun)
    context.figures.held(stopped=still_stopped(data, read_stopped(data)))
    batches = StandardBatches(data, writer, checkpoint, begun, cut_over, context.figures)
    batches.on_traffic = on_traffic
    if begun is None and not is_connect(context.spark):
        batches.make_typed(context.spark)
    options = {
        "subscribePattern": PATTERN,
        "startingOffsets": "earliest",
        "groupId": GROUP,
        "maxOffsetsPerTrigger": str(pipeline_settings.read(data).pipeline.batch_rows_max),
        # A topic that is deleted, recreated or damaged must not end the pipeline of all others.
        "failOnDataLoss": "false",
        "failOnDamage": "false",
        "stoppedIn": str(data),
        "failOnLargeValue": "false",
        "maxValueBytes": str(cut_over),
        "columns": ",".join((*COLUMNS, VALUE_BYTES)),
        **context.bus.options(),
    }
    return (
        context.spark.readStream.format("polybus")
        .options(**options)
        .load()
        .writeStream.queryName(f"{GROUP}.decode")
        .option("checkpointLocation", str(context.checkpoint))
        .trigger(**context.trigger)
        .foreachBatch(batches)
        .start()
    )


def writer_of(checkpoint: Checkpoint) -> str:
    """The name under which the tables know the batches: each checkpoint has another."""
    try:
        return f"{GROUP}.decode:{checkpoint.create_query_id()}"
    except ValueError as error:
        raise UsageError("pipeline.checkpoint", f"{error}; {_ADVICE}") from error


def check_tables(data: Path, writer: str, checkpoint: Checkpoint) -> None:
    """Refuse tables that another checkpoint filled, and others that are ahead of silver.

    They would get every message twice, and silver would lack messages: every batch is in silver
    before it is in any of these.
    """
    standard = {name: open_table(data, name) for name in (*TABLES, EXPECTATIONS)}
    for table in (*standard.values(), *typed_tables(data)):
        writers = table.writers()
        if any(one.startswith(f"{GROUP}.decode:") and one != writer for one in writers):
            text = f"table {table.name} was filled from another checkpoint than {checkpoint.path}"
            raise UsageError("pipeline.checkpoint", f"{text}; {_ADVICE}")
    last = standard["silver"].last_batch(writer)
    for name in ("quarantine", "traffic", "top_senders", "recent_ids", EXPECTATIONS):
        batch = standard[name].last_batch(writer)
        if batch is not None and (last is None or batch > last):
            text = f"table silver lacks batch {batch} of {checkpoint.path}, which {name} has"
            raise UsageError("pipeline.checkpoint", f"{text}; {_ADVICE}")
