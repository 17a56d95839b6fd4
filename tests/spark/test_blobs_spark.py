"""Large payloads in Spark, DuckDB and pyarrow: the reference, and the bytes behind it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from source_kit import rows_of, source_options

import polybus.spark
from polybus.edges.node import Node
from polybus.errors import StorageError, UsageError
from polybus.lake import duck
from polybus.log.blobs import blobs_folder
from polybus.spark.blobs import read_blob
from polybus.spark.location import BusLocation
from polybus.spark.source.readers import FilteringReader
from polybus.testing import run_bus

LARGE = bytes(range(256)) * 3000
ID = hashlib.sha256(LARGE).hexdigest()
REFERENCE = {"id": ID, "size": len(LARGE), "sha256": ID, "type": "image/png"}
FORGED = json.dumps({"reference": {**REFERENCE, "url": ""}}).encode()


@dataclass
class Served:
    data: Path
    url: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A running bus with a small message, a large one, and one that only looks like that."""
    data = tmp_path_factory.mktemp("data")
    ready, done = threading.Event(), threading.Event()
    found: list[Served] = []

    async def publish(node: Node) -> None:
        url = f"http://127.0.0.1:{node.tcp_port}"
        async with polybus.connect(url) as c:
            await c.publish("news", b"small", receipt=True)
            path = data.parent / "large"
            path.write_bytes(LARGE)
            await c.publish_file("news", path, content_type="image/png")
            await c.publish("news", FORGED, receipt=True)
        found.append(Served(data, url))

    async def run() -> None:
        async with run_bus("news", data=str(data)) as node:
            await publish(node)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(30)
    yield found[0]
    done.set()
    thread.join()


def test_the_source_has_a_column_of_references(served: Served) -> None:
    options = source_options(served.data, subscribe="news", columns="offset,reference")
    reader = FilteringReader(options)
    rows = rows_of(reader, reader.partitions()).to_pylist()
    assert [row["reference"] for row in rows] == [None, REFERENCE, None]


def test_the_bytes_come_from_the_folder_or_over_http(served: Served) -> None:
    for where in (BusLocation(data=served.data), BusLocation(url=served.url)):
        assert read_blob(where, ID) == LARGE
        with pytest.raises(UsageError, match=r"blob\.unknown"):
            read_blob(where, "0" * 64)
        with pytest.raises(UsageError, match=r"spark\.value-too-large"):
            read_blob(where, ID, bytes_max=100)


def test_damaged_bytes_are_not_read(served: Served) -> None:
    content = blobs_folder(served.data, "default") / ID / "content"
    content.write_bytes(b"?" + LARGE[1:])
    try:
        with pytest.raises(StorageError, match=r"blob\.damaged"):
            read_blob(BusLocation(data=served.data), ID)
    finally:
        content.write_bytes(LARGE)


def test_executors_read_the_bytes_of_references(spark: Any, served: Served) -> None:
    frame = spark.read.format("polybus").options(subscribe="news", data=str(served.data)).load()
    rows = polybus.spark.with_reference(frame)
    read = polybus.spark.blob("reference", data=served.data)
    found = rows.orderBy("offset").select("reference", read.alias("bytes")).collect()
    assert [row["bytes"] and bytes(row["bytes"]) for row in found] == [None, LARGE, None]
    assert found[1]["reference"].asDict() == REFERENCE
    ids = rows.where("reference IS NOT NULL").select(
        polybus.spark.blob(rows["reference"]["id"], url=served.url).alias("bytes")
    )
    assert bytes(ids.first()["bytes"]) == LARGE


def test_duckdb_shows_the_reference(served: Served) -> None:
    with duck.Engine(served.data) as engine:
        sql = 'SELECT text(value), headers FROM news ORDER BY "offset"'
        small, large, forged = engine.query(sql).fetchall()
    assert small == ("small", None) and forged[1] is None
    assert json.loads(large[0])["reference"]["id"] == ID
    assert ID.encode() in large[1].values()


def test_pyarrow_shows_the_reference(served: Served) -> None:
    accept = {"accept": "application/vnd.apache.arrow.stream"}
    answer = httpx.get(f"{served.url}/v1/topics/news/messages?offset=0", headers=accept)
    rows = pa.ipc.open_stream(answer.content).read_all().to_pylist()
    small, large, forged = [(bytes(row["value"]), dict(row["headers"] or {})) for row in rows]
    assert small == (b"small", {}) and forged[1] == {}
    assert json.loads(large[0])["reference"]["id"] == ID
    assert ID.encode() in large[1].values()
