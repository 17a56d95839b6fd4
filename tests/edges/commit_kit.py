"""What the tests of transactions share: staging files, and asking for commits."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pyarrow as pa
from http_kit import Http

from polybus.log.interface import Log
from polybus.services.transactions.staging import SCHEMA

Topics = Mapping[str, Sequence[bytes]]


def rows(topic: str, values: Sequence[bytes | None], **columns: Any) -> pa.RecordBatch:
    nothing = [None] * len(values)
    keys, headers = columns.get("keys", nothing), columns.get("headers", nothing)
    arrays = [[topic] * len(values), keys, list(values), headers]
    return pa.record_batch(
        [pa.array(one, field.type) for one, field in zip(arrays, SCHEMA, strict=True)],
        schema=SCHEMA,
    )


def staged(batches: Sequence[pa.RecordBatch], *, schema: pa.Schema = SCHEMA) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def stage_bytes(data: Path, producer: str, batch: int, content: bytes) -> str:
    """Put a file where the bus looks for it; return its name."""
    name = f"{batch}-{uuid4().hex}.arrows"
    folder = data / "staging" / producer
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        # The bus removes the folder when a commit has left it empty.
        with contextlib.suppress(FileNotFoundError):
            (folder / name).write_bytes(content)
            return name


def stage(data: Path, producer: str, batch: int, topics: Topics) -> str:
    batches = [rows(topic, values) for topic, values in topics.items()]
    return stage_bytes(data, producer, batch, staged(batches))


class Producer:
    """Commits transactions of one name."""

    def __init__(self, http: Http, name: str = "spark", query: str = "q1") -> None:
        self.data = http.node.data
        self.name = name
        self.query = query
        self.client = http.client

    async def commit(
        self, batch: int, topics: Topics | None = None, **fields: Any
    ) -> httpx.Response:
        files = [] if topics is None else [stage(self.data, self.name, batch, topics)]
        headers = fields.pop("headers", {})
        body = {"producer": self.name, "query": self.query, "batch": batch, "files": files}
        return await self.client.post("/v1/commits", json=body | fields, headers=headers)

    async def done(self, batch: int, topics: Topics | None = None, **fields: Any) -> Any:
        answer = await self.commit(batch, topics, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refused(
        self, status: int, code: str, batch: int, topics: Topics | None = None, **fields: Any
    ) -> str:
        answer = await self.commit(batch, topics, **fields)
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
        return str(answer.json()["detail"])

    def left(self) -> list[str]:
        """The files that are still staged."""
        return sorted(path.name for path in (self.data / "staging").glob("*/*"))


def values_of(log: Log, topic: str) -> list[bytes]:
    found: list[bytes] = []
    offset = log.bounds(topic).start
    while batches := log.read(topic, offset):
        for batch in batches:
            found += batch.values()
            offset = batch.last_offset + 1
    return found


def records(http: Http) -> list[dict[str, Any]]:
    return [msgspec.json.decode(value) for value in values_of(http.node.bus.log, "$commits")]
