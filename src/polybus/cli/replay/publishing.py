"""How a replay publishes: to topics over any protocol, part by part, each part with a receipt.

HTTP carries keys and headers, Boson properties and goMS carry headers, Boson frames and queues
carry neither. What a protocol cannot carry is left out and counted.

The payload of a reference is published, not the reference: it is streamed over HTTP, or, if it has
a key or headers, sent as any other message.
"""

import asyncio
import contextlib
import copy
import itertools
import signal
import time
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec
import pyarrow as pa

from polybus import references
from polybus.cli.common.output import progress_bar
from polybus.client import connect
from polybus.client.http.blocking import opened
from polybus.client.options import parse
from polybus.errors import PolybusError, UsageError
from polybus.references import Reference
from polybus.spark.location import BusLocation
from polybus.spark.origin import opened_blob

REQUEST_BYTES_MAX = 8 << 20
HTTP = ("http", "ws")
WITH_HEADERS = ("boson+properties", "goms")

MessageHeaders = Sequence[tuple[str, bytes]] | None


class OutgoingRows:
    """The values, keys and headers of messages to publish."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.values: list[bytes] = [value or b"" for value in batch.column("value").to_pylist()]
        self.keys: list[bytes | None] = batch.column("key").to_pylist()
        self.headers: list[MessageHeaders] = batch.column("headers").to_pylist()

    def reference(self, index: int) -> Reference | None:
        """The reference of a message, if its payload is a blob."""
        is_marked = references.marked(dict(self.headers[index] or ()))
        return references.parse(self.values[index]) if is_marked else None

    def inline(self, index: int, value: bytes) -> None:
        """Replace a reference by its payload."""
        headers = references.without_mark(dict(self.headers[index] or ()))
        self.values[index], self.headers[index] = value, list(headers.items()) or None

    def slice(self, start: int, stop: int) -> "OutgoingRows":
        part = copy.copy(self)
        part.values, part.keys = self.values[start:stop], self.keys[start:stop]
        part.headers = self.headers[start:stop]
        return part


@dataclass(frozen=True, slots=True)
class ReplayPart:
    """Messages for one topic, due `due_s` seconds after the start; `done` is called afterwards.

    If the topic has no target, `done` publishes them itself.
    """

    topic: str
    rows: OutgoingRows
    due_s: float
    done: Callable[[], None]


@dataclass(slots=True)
class ReplayResult:
    """What a replay did; `by_topic` counts messages."""

    by_topic: Counter[str] = field(default_factory=Counter)
    value_bytes: int = 0
    seconds: float = 0.0
    stopped: bool = False
    error: PolybusError | None = None

    @property
    def messages(self) -> int:
        return self.by_topic.total()

    @property
    def complete(self) -> bool:
        return self.error is None and not self.stopped


class ReplayDestination:
    """One topic of one bus; `async with` its client before sending."""

    def __init__(self, url: str, topic: str, source: BusLocation) -> None:
        """`source` has the large payloads. Raises UsageError `client.url`, `client.scheme`."""
        self.topic = topic
        self._source = source
        self._address = parse(url)
        self.client = connect(url, reconnect=False)
        self.keys_left_out = 0
        self.headers_left_out = 0

    def beside(self, topic: str) -> "ReplayDestination":
        """Another topic, over the same client."""
        other = copy.copy(self)
        other.topic = topic
        return other

    def __str__(self) -> str:
        return f"{self.topic} at {self._address}"

    async def send(self, rows: OutgoingRows) -> None:
        """Publish; on return the messages are durable, except on a queue. Raises PolybusError."""
        begin = 0
        for index in range(len(rows.values)):
            reference = rows.reference(index)
            if reference is None:
                continue
            headers = references.without_mark(dict(rows.headers[index] or ()))
            if headers or rows.keys[index] is not None or self._address.scheme == "queue":
                rows.inline(index, await asyncio.to_thread(self._payload, reference))
                continue
            await self._send(rows.slice(begin, index))
            await self._stream(reference)
            begin = index + 1
        await self._send(rows.slice(begin, len(rows.values)))

    def _payload(self, reference: Reference) -> bytes:
        with opened_blob(self._source, reference.id) as (_, pieces):
            return b"".join(pieces)

    async def _stream(self, reference: Reference) -> None:
        with opened_blob(self._source, reference.id) as (_, pieces):

            async def read() -> AsyncIterator[bytes]:
                while piece := await asyncio.to_thread(next, pieces, b""):
                    yield piece

            await self.client.publish_file(self.topic, read(), content_type=reference.type)

    async def _send(self, rows: OutgoingRows) -> None:
        if not rows.values:
            return
        scheme = self._address.scheme
        plain = not any(rows.headers) and all(key is None for key in rows.keys)
        # As JSON a value is a third larger: a plain message near the limit would be refused.
        if scheme in HTTP and not plain:
            for body in ndjson(rows):
                await asyncio.to_thread(self._post, body)
            return
        self.keys_left_out += sum(key is not None for key in rows.keys)
        if scheme not in WITH_HEADERS:
            self.headers_left_out += sum(map(bool, rows.headers))
            await self._publish(rows.values, None)
            return
        # One publish has the same headers for all its messages.
        messages = zip(rows.values, rows.headers, strict=True)
        for headers, group in itertools.groupby(messages, key=itemgetter(1)):
            await self._publish([value for value, _ in group], headers)

    async def _publish(self, values: list[bytes], headers: MessageHeaders) -> None:
        if self._address.scheme == "queue":
            await self.client.publish_many(self.topic, values)
            await self.client.flush()
        else:
            named = dict(headers or ())
            await self.client.publish_many(self.topic, values, headers=named, receipt=True)

    def _post(self, body: bytes) -> None:
        path = f"/v1/topics/{quote(self.topic, safe='')}/messages"
        headers = {"accept": "application/json", "content-type": "application/x-ndjson"}
        if self._address.credentials is not None:
            headers["authorization"] = self._address.credentials.authorization
        with opened(http_url(str(self._address)), "POST", path, body, headers=headers) as answer:
            answer.read()


def publish_parts(
    title: str,
    parts: Iterator[ReplayPart],
    total: int,
    targets: dict[str, ReplayDestination],
    *,
    hidden: bool,
) -> ReplayResult:
    """Publish each part when it is due, until the end, an error, Ctrl-C or SIGTERM.

    A signal lets the current part finish.
    """

    async def run() -> None:
        halt = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, halt.set)
        async with contextlib.AsyncExitStack() as stack:
            for client in {id(one.client): one.client for one in targets.values()}.values():
                await stack.enter_async_context(client)
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                with contextlib.suppress(TimeoutError):
                    left_s = began_s + part.due_s - time.monotonic()
                    await asyncio.wait_for(halt.wait(), max(0.0, left_s))
                if halt.is_set():
                    result.stopped = True
                    return
                if part.topic in targets:
                    await targets[part.topic].send(part.rows)
                await asyncio.to_thread(part.done)
                result.by_topic[part.topic] += len(part.rows.values)
                result.value_bytes += sum(map(len, part.rows.values))
                update(advance=len(part.rows.values))

    result = ReplayResult()
    began_s = time.monotonic()
    with progress_bar(title, total, hidden=hidden) as update:
        try:
            asyncio.run(run())
        except PolybusError as error:
            result.error = error
    result.seconds = time.monotonic() - began_s
    return result


def http_url(url: str) -> str:
    """The HTTP address of a bus: all protocols except queues share its port."""
    address = parse(url)
    if address.scheme == "queue":
        raise UsageError("client.unsupported", "a queue has no history to read; use http://")
    return f"{'https' if address.tls else 'http'}://{address.authority}"


def split_url(into: str, topic: str) -> tuple[str, str]:
    """Divide `boson://host:port/topic` into URL and topic; without a path the topic is `topic`."""
    parts = urlsplit(into)
    named = unquote(parts.path.strip("/")).lower()
    if not named and parts.path not in ("", "/"):
        raise UsageError("client.url", f"{into}: the path must be the topic to replay into")
    return parts._replace(path="").geturl(), named or topic


def ndjson(rows: OutgoingRows) -> list[bytes]:
    """The messages as lines of JSON, in request bodies of limited size."""
    bodies: list[bytes] = []
    lines: list[bytes] = []
    size = 0
    for value, key, headers in zip(rows.values, rows.keys, rows.headers, strict=True):
        message: dict[str, Any] = _base64(value)
        if key is not None:
            message["key"] = _base64(key)
        if headers:
            message["headers"] = {name: _base64(one) for name, one in headers}
        line = msgspec.json.encode(message)
        if lines and size + len(line) > REQUEST_BYTES_MAX:
            bodies.append(b"\n".join(lines))
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    return [*bodies, b"\n".join(lines)] if lines else bodies


def _base64(value: bytes) -> dict[str, Any]:
    return {"base64": b64encode(value).decode()}
