"""/v1/sql, /v1/tables, search, histogram and export: what a query process answers.

Administrators query everything; others the topics that they may read, without what is masked, and
tables only if they see the whole bus and nothing is masked, because tables have all topics.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import datetime
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
from starlette.responses import Response

from polybus.edges.http.api.messages import ARROW, StoredMessage, stored_messages
from polybus.edges.http.api.topics import SLICE_TOPICS
from polybus.edges.http.calls import JSON, OCTETS, OFFSET_MAX, Call, Viewer
from polybus.edges.http.downloads import DownloadResponse, disconnected
from polybus.errors import PeerError, UsageError
from polybus.log.columns import SCHEMA, batch_of
from polybus.services.queries.jobs import (
    NOTE,
    Form,
    HistogramJob,
    Job,
    SearchJob,
    SqlJob,
    TablesJob,
    Visibility,
    check_condition,
    path_steps,
)
from polybus.structs import decode

NAMES_MAX = 2000
STOP_RETRY_S = 0.1
MEDIA: dict[str, Form] = {
    ARROW: "arrow",
    "text/csv": "csv",
    "application/x-ndjson": "jsonl",
    "application/vnd.apache.parquet": "parquet",
}
ENDINGS = {"jsonl": "jsonl", "csv": "csv", "parquet": "parquet", "arrow": "arrows"}
TRUNCATED = "polybus-truncated"
"""The header that says whether a downloaded file lacks rows of the result."""
AUDITED_CHARACTERS_MAX = 1000
"""Maximum length of a statement in `$audit`."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class SqlQuery(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A statement. With an `id` of your choice it can be stopped."""

    query: Annotated[str, msgspec.Meta(min_length=1, max_length=1 << 20)]
    rows_max: Annotated[int, msgspec.Meta(ge=1, le=OFFSET_MAX)] = 1000
    time_s: Seconds | None = None
    id: Annotated[str, msgspec.Meta(max_length=64)] = ""


class SqlColumn(msgspec.Struct):
    name: str
    type: str


class SqlAnswer(msgspec.Struct, rename="kebab"):
    """The rows of a statement, as JSON; `truncated`: there are more."""

    columns: list[SqlColumn]
    row_count: int
    truncated: bool
    elapsed_s: float
    engine: str
    rows: list[list[Any]]


class TableView(msgspec.Struct):
    """A table of the lake."""

    name: str
    rows: int
    files: int
    bytes: int
    version: int
    updated: str | None
    columns: list[SqlColumn]


class TableList(msgspec.Struct):
    tables: list[TableView]


class SqlTopic(msgspec.Struct):
    name: str
    columns: list[str]


class SqlNames(msgspec.Struct):
    """The names that a statement may use."""

    topics: list[SqlTopic]
    tables: list[TableView]
    functions: list[str]
    truncated: bool
    """There are more topics, which a statement may also use."""


class SearchQuery(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """Search conditions: all given ones must hold."""

    text: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    header: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    path: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    equals: str | msgspec.UnsetType = msgspec.UNSET
    sql: Annotated[str, msgspec.Meta(max_length=10_000)] = ""
    from_offset: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)] = 0
    stop: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)] = OFFSET_MAX
    newest: bool = False
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    time_s: Seconds = 10.0


class ExportQuery(SearchQuery, rename="kebab", forbid_unknown_fields=True):
    """What to export, as a search."""

    format: Literal["csv", "jsonl", "parquet"] = "csv"
    limit: Annotated[int, msgspec.Meta(ge=1, le=OFFSET_MAX)] = 100_000


class FoundMessages(msgspec.Struct, rename="kebab"):
    """Messages that match. `next` is where to continue; null: everything was searched."""

    topic: str
    epoch: int
    messages: list[StoredMessage]
    scanned: int
    from_: int = msgspec.field(name="from")
    to: int
    next: int | None
    is_complete: bool
    elapsed_s: float


class HistogramQuery(msgspec.Struct, forbid_unknown_fields=True):
    """A range of time, all that the topic holds if it is left out, in about this many bins."""

    from_: str = msgspec.field(name="from", default="")
    to: str = ""
    bins: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 120


class Histogram(msgspec.Struct, rename="kebab"):
    """Messages in bins of `bin-s`, and the first offset of each."""

    topic: str
    from_: str = msgspec.field(name="from")
    to: str
    bin_s: float
    counts: list[int]
    offsets: list[int | None]


# SQL


async def visibility_of(viewer: Viewer, text: str) -> Visibility:
    """The topics and tables that a statement of this viewer may use; other tasks run meanwhile."""
    bare = text.lower().replace('"', "").replace("`", "")
    access = viewer.access
    found: dict[str, str] = {}
    known: list[str] = []
    for number, name in enumerate(viewer.state.bus.topic_names(system=True), 1):
        if number % SLICE_TOPICS == 0:
            await asyncio.sleep(0)
        if not access.may_read(name):
            continue
        shown = access.shown(name)
        if len(known) < NAMES_MAX:
            known.append(shown)
        if shown in bare:
            found[shown] = name
            if len(found) >= NAMES_MAX:
                break
    masks = {}
    for full in found.values():
        mask = viewer.mask_of(full)
        if mask is not None:
            masks[full] = mask.fields
    return Visibility(found, masks, sees_tables(viewer), known)


def sees_tables(viewer: Viewer) -> bool:
    return viewer.is_admin or (viewer.sees_bus and not viewer.state.masks)


async def run_sql(call: Call, body: SqlQuery) -> Annotated[Response, SqlAnswer]:
    """Run a statement, in a separate process; by Accept as CSV, JSON lines, Parquet or Arrow."""
    accepted = call.request.headers.get("accept", "")
    form: Form = next((form for media, form in MEDIA.items() if media in accepted), "json")
    rows_max = min(body.rows_max, call.state.config.queries.rows_max)
    job = SqlJob(body.query, await visibility_of(call, body.query), rows_max, form)
    name = f"{call.access.account}/{body.id}" if body.id else secrets.token_hex(8)
    # Before it runs: one that never ends, or fails, may have read much, too.
    shown = {"query": body.query[:AUDITED_CHARACTERS_MAX]}
    await call.state.audit.record(call.who, "sql-run", "sql", shown)
    if form != "json":
        return await _download(call, job, form, "query", body.time_s, name)
    data = await call.state.queries.data(job, time_s=body.time_s, name=name)
    return Response(data, media_type=JSON)


async def stop_sql(call: Call) -> None:
    """Stop a running statement."""
    if not call.state.queries.stop(f"{call.access.account}/{call.path['id']}"):
        raise UsageError("sql.unknown", "no statement of this id runs; it may have ended")


async def names(call: Call) -> SqlNames:
    """The names that a statement may use: topics, tables and their columns."""
    access = call.access
    columns = [name for name in SCHEMA.names if name != "epoch"] + ["epoch", "date"]
    readable = filter(access.may_read, call.state.bus.topic_names(system=True))
    found = list(islice(readable, NAMES_MAX + 1))
    topics = [SqlTopic(access.shown(name), columns) for name in found[:NAMES_MAX]]
    tables: list[TableView] = []
    if sees_tables(call):
        data = await call.state.queries.data(TablesJob())
        tables = decode(data, TableList).tables
    return SqlNames(topics, tables, ["text", "json"], len(found) > NAMES_MAX)


async def list_tables(call: Call) -> Annotated[Response, TableList]:
    """The tables of the lake."""
    return await _tables(call, "")


async def show_table(call: Call) -> Annotated[Response, TableView]:
    """One table of the lake."""
    found = await _tables(call, call.path["table"])
    view = decode(bytes(found.body), TableList).tables[0]
    return Response(msgspec.json.encode(view), media_type=JSON)


async def _tables(call: Call, name: str) -> Response:
    if not sees_tables(call):
        text = "tables have messages of all topics: only administrators see them here"
        raise UsageError("auth.denied", text)
    return Response(await call.state.queries.data(TablesJob(name)), media_type=JSON)


# Messages


def _search(call: Call, topic: str, query: SearchQuery, form: Form | None = None) -> SearchJob:
    check_condition(query.sql)
    path_steps(query.path)
    mask = call.mask_of(topic)
    return SearchJob(
        topic=topic,
        start=query.from_offset,
        stop=query.stop,
        limit=query.limit,
        time_s=min(query.time_s, call.state.config.queries.time_s_max),
        text=query.text,
        header=query.header,
        path=query.path,
        equals=None if query.equals is msgspec.UNSET else query.equals,
        sql=query.sql,
        fields=[] if mask is None else mask.fields,
        is_newest=query.newest,
        form=form,
    )


async def search(call: Call, topic: str, query: SearchQuery) -> FoundMessages:
    """Find messages by text, header, JSON path or an SQL condition, for a limited time."""
    await call.state.context.durability.wait()
    job = _search(call, topic, query)
    note: dict[str, Any] = {}
    rows = b""
    async for kind, content in call.state.queries.run(job):
        if kind == NOTE:
            note = msgspec.json.decode(content)
        else:
            rows += content
    messages = await asyncio.to_thread(_messages, rows, topic, is_masked=bool(job.fields))
    return FoundMessages(
        topic=call.access.shown(topic),
        epoch=note["epoch"],
        messages=messages,
        scanned=note["scanned"],
        from_=note["from"],
        to=note["to"],
        next=note["next"],
        is_complete=note["is-complete"],
        elapsed_s=note["elapsed-s"],
    )


def _messages(stream: bytes, topic: str, *, is_masked: bool) -> list[StoredMessage]:
    found = []
    for rows in pa.ipc.open_stream(stream).read_all().to_batches():
        for index in range(rows.num_rows):
            row = rows.slice(index, 1)
            offset = row.column("offset")[0].as_py()
            batch = batch_of(row, topic=topic, epoch=0, first_offset=offset)
            (message,) = stored_messages(batch)
            message.masked = is_masked
            found.append(message)
    return found


async def export(call: Call, topic: str, query: ExportQuery) -> Annotated[Response, str]:
    """Download what a search finds."""
    await call.state.context.durability.wait()
    query.limit = min(query.limit, call.state.config.queries.rows_max)
    query.time_s = 0.0
    job = _search(call, topic, query, query.format)
    name = secrets.token_hex(8)
    answer = await _download(call, job, query.format, call.access.shown(topic), None, name)
    # Always an attachment: a browser must not show it as a page.
    answer.headers["content-type"] = OCTETS
    return answer


async def histogram(
    call: Call, topic: str, query: HistogramQuery
) -> Annotated[Response, Histogram]:
    """The number of messages over time."""
    await call.state.context.durability.wait()
    start_us, stop_us = _time_us(query.from_), _time_us(query.to)
    job = HistogramJob(topic, start_us, stop_us, query.bins)
    found = msgspec.json.decode(await call.state.queries.data(job))
    answer = {"topic": call.access.shown(topic), **found}
    return Response(msgspec.json.encode(answer), media_type=JSON)


def _time_us(text: str) -> int:
    if not text:
        return 0
    try:
        found = datetime.fromisoformat(text)
        if found.tzinfo is None:
            raise ValueError("the zone is missing")
    except ValueError as error:
        raise PeerError("http.query", f"from and to must be ISO times: {error}") from error
    return int(found.timestamp() * 1_000_000)


async def _download(
    call: Call, job: Job, form: str, label: str, time_s: float | None, name: str
) -> Response:
    """A file, a piece at a time."""
    answers = call.state.queries.run(job, time_s=time_s, name=name)
    watching = asyncio.ensure_future(_stop_with_client(call, name))
    try:
        # Read the first frame before the status is sent, so that a failure becomes an error
        # response.
        _, note = await anext(answers)
    finally:
        watching.cancel()
    is_safe = re.compile(r"[a-zA-Z0-9._-]").fullmatch
    safe = "".join(one if is_safe(one) else "_" for one in label)[:80]
    media = next(media for media, its in MEDIA.items() if its == form)
    headers = {"content-disposition": f'attachment; filename="{safe}.{ENDINGS[form]}"'}
    truncated = msgspec.json.decode(note).get("truncated")
    if truncated is not None:
        headers[TRUNCATED] = "true" if truncated else "false"
    return DownloadResponse(_pieces(answers), media_type=media, headers=headers)


async def _stop_with_client(call: Call, name: str) -> None:
    """Stop a query when its client disconnects; its process may be starting then."""
    await disconnected(call.request.receive)
    while not call.state.queries.stop(name):  # noqa: ASYNC110 - a start of a process has no event
        await asyncio.sleep(STOP_RETRY_S)


async def _pieces(answers: AsyncGenerator[tuple[bytes, bytes], None]) -> AsyncIterator[bytes]:
    async with aclosing(answers):
        async for _, content in answers:
            yield content
