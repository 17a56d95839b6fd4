"""Where a replay writes: any topic over any protocol, a batch at a time, each one with its receipt.

Over HTTP messages keep their keys and headers; over Boson properties and goMS their headers; Boson
frames and queues carry neither, and what was left out is counted.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec
import pyarrow as pa

from polybus.client import Client, connect
from polybus.client.http.blocking import request
from polybus.client.urls import Address, parse
from polybus.errors import UsageError

NDJSON = "application/x-ndjson"
REQUEST_BYTES_MAX = 8 << 20
REQUEST_ROWS_MAX = 5000
HTTP = ("http", "ws")
WITH_HEADERS = ("boson+properties", "goms")

Headers = Sequence[tuple[str, bytes]] | None


class Rows:
    """Messages to publish; a column of None where no message has any."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.values: list[bytes] = [value or b"" for value in batch.column("value").to_pylist()]
        self.keys: list[bytes | None] | None = None
        self.headers: list[Headers] | None = None
        keys = batch.column("key")
        if keys.null_count < len(keys):
            self.keys = keys.to_pylist()
        headers = batch.column("headers")
        if headers.null_count < len(headers) and len(headers.items):
            self.headers = headers.to_pylist()

    @property
    def is_plain(self) -> bool:
        return self.keys is None and self.headers is None


def split_url(into: str, topic: str) -> tuple[str, str]:
    """`boson://host:port/topic` as URL and topic; the topic is the same if the URL names none."""
    parts = urlsplit(into)
    named = unquote(parts.path.strip("/")).lower()
    if not named and parts.path not in ("", "/"):
        raise UsageError("client.url", f"{into}: the path is the topic to replay into")
    return parts._replace(path="").geturl(), named or topic


class Target:
    """One topic of one bus; `async with` connects."""

    def __init__(self, url: str, topic: str) -> None:
        """Raises UsageError `client.url`, `client.scheme`."""
        self.topic = topic
        self.url = url
        self._address: Address = parse(url)
        self._client: Client = connect(url, reconnect=False)
        self.keys_left_out = 0
        self.headers_left_out = 0

    def __str__(self) -> str:
        return f"{self.topic} at {self._address}"

    async def __aenter__(self) -> Target:
        await self._client.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def send(self, rows: Rows) -> None:
        """Publish; when this returns, the messages are safe where the protocol has receipts.

        Raises:
            PolybusError: the bus refused some, or it is not known whether they are stored.
        """
        if self._address.scheme in HTTP and not rows.is_plain:
            for body in ndjson(rows):
                await asyncio.to_thread(self._post, body)
            return
        if rows.keys is not None:
            self.keys_left_out += sum(key is not None for key in rows.keys)
        if rows.headers is None or self._address.scheme not in (*HTTP, *WITH_HEADERS):
            if rows.headers is not None:
                self.headers_left_out += sum(bool(one) for one in rows.headers)
            await self._publish(rows.values, None)
            return
        start = 0
        for stop in range(1, len(rows.values) + 1):
            # A publish has one set of headers for all its messages.
            if stop == len(rows.values) or rows.headers[stop] != rows.headers[start]:
                await self._publish(rows.values[start:stop], rows.headers[start])
                start = stop

    async def _publish(self, values: list[bytes], headers: Headers) -> None:
        named = dict(headers) if headers else None
        if self._address.scheme == "queue":
            await self._client.publish_many(self.topic, values)
            await self._client.flush()
        else:
            await self._client.publish_many(self.topic, values, headers=named, receipt=True)

    def _post(self, body: bytes) -> None:
        scheme = "https" if self._address.tls else "http"
        url = f"{scheme}://{self._address.authority}"
        path = f"/v1/topics/{quote(self.topic, safe='')}/messages"
        request(url, "POST", path, body, content_type=NDJSON)


def ndjson(rows: Rows) -> list[bytes]:
    """The messages as lines of JSON, in bodies of a fair size."""
    bodies: list[bytes] = []
    lines: list[bytes] = []
    size = 0
    for index, value in enumerate(rows.values):
        message: dict[str, Any] = {"base64": b64encode(value).decode()}
        key = None if rows.keys is None else rows.keys[index]
        if key is not None:
            message["key"] = _base64(key)
        headers = None if rows.headers is None else rows.headers[index]
        if headers:
            message["headers"] = {name: _base64(one) for name, one in dict(headers).items()}
        line = msgspec.json.encode(message)
        if lines and (size + len(line) > REQUEST_BYTES_MAX or len(lines) >= REQUEST_ROWS_MAX):
            bodies.append(b"\n".join(lines))
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    return [*bodies, b"\n".join(lines)] if lines else bodies


def _base64(value: bytes) -> dict[str, str]:
    return {"base64": b64encode(value).decode()}
