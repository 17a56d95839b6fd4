"""The administrator's socket: a Unix socket in the data folder, through which topics are managed.

Users who may open the file are administrators; clients on the network are not. One JSON object a
line: `{"verb": "topics.list"}` gets `{"result": …}` or `{"error": {"code": …, "text": …}}`.
`run.json` in the data folder names the socket, the process and its addresses while the bus runs.
"""

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from polybus import names
from polybus.bus.bus import Topic
from polybus.config import Connector
from polybus.edges.edge import Edge
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.interface import TopicSettings
from polybus.services.consumers import ConsumerBook

LINE_BYTES_MAX = 1 << 16
# Linux allows 108 bytes with the closing NUL, others 104.
SOCKET_PATH_BYTES_MAX = 100


class AdminRequest(msgspec.Struct, rename="kebab"):
    verb: str
    name: str = ""
    retention_age_s: float | None = None
    retention_bytes: int | None = None
    system: bool = False


class Admin:
    """Answers the administrator of one running bus."""

    def __init__(
        self,
        edge: Edge,
        consumers: ConsumerBook,
        addresses: list[str],
        count_connections: Callable[[], int],
    ) -> None:
        self._edge = edge
        self._context = edge.context
        self._bus = edge.context.bus
        self._consumer_book = consumers
        self._data = data = edge.context.data
        self._addresses = addresses
        self._count_connections = count_connections
        self._socket = socket_path(data)
        self._listener: asyncio.Server | None = None
        self._verbs: dict[str, Callable[[AdminRequest], Any]] = {
            "topics.list": self._list,
            "topics.create": self._create,
            "topics.delete": self._delete,
            "topics.describe": self._describe,
            "consumers.list": self._consumers,
            "consumers.forget": self._forget,
            "status": self._status,
        }

    async def start(self) -> None:
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._listener = await asyncio.start_unix_server(
                self._serve, self._socket, limit=LINE_BYTES_MAX
            )
        finally:
            os.umask(before)
        run = {
            "pid": os.getpid(),
            "addresses": self._addresses,
            "http": http_urls(self._context.config.connectors, self._addresses),
            "admin": str(self._socket),
        }
        (self._data / "run.json").write_bytes(msgspec.json.encode(run))

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._socket.unlink(missing_ok=True)
        (self._data / "run.json").unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            while line := await reader.readline():
                writer.write(msgspec.json.encode(self._answer(line)) + b"\n")
                await writer.drain()
        writer.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = msgspec.json.decode(line, type=AdminRequest)
            verb = self._verbs.get(request.verb)
            if verb is None:
                raise UsageError("admin.verb-unknown", f"verbs are {', '.join(self._verbs)}")
            return {"result": verb(request)}
        except msgspec.MsgspecError as error:
            return {"error": {"code": "admin.request-invalid", "text": str(error)}}
        except PolybusError as error:
            return {"error": {"code": error.code, "text": error.text}}

    def _list(self, request: AdminRequest) -> list[dict[str, Any]]:
        topics = self._bus.topics(system=request.system)
        lags = self._consumer_book.lags()
        return [self._summary(topic) | {"lag": lags.get(topic.name)} for topic in topics]

    def _create(self, request: AdminRequest) -> dict[str, Any]:
        settings = TopicSettings(
            retention_age_s=request.retention_age_s, retention_bytes=request.retention_bytes
        )
        bounds = self._bus.create_topic(request.name, settings)
        return {"name": names.canonical(request.name), "epoch": bounds.epoch}

    def _delete(self, request: AdminRequest) -> dict[str, Any]:
        name = names.canonical(request.name)
        self._bus.delete_topic(name)
        return {"name": name}

    def _describe(self, request: AdminRequest) -> dict[str, Any]:
        name = names.canonical(request.name)
        log = self._bus.log
        log.bounds(name)
        topic = self._bus.topic(name)
        settings = log.settings(name)
        return self._summary(topic) | {
            "settings": {
                "retention-age-s": settings.retention_age_s,
                "retention-bytes": settings.retention_bytes,
            },
            **log.describe(name),
            "consumers": self._consumer_book.of_topic(name),
        }

    def _consumers(self, request: AdminRequest) -> list[Any]:
        return list(self._consumer_book.views())

    def _forget(self, request: AdminRequest) -> dict[str, Any]:
        self._consumer_book.forget(request.name)
        return {"group": request.name}

    def _summary(self, topic: Topic) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "name": topic.name,
            "messages-in": topic.messages_in,
            "subscribers": len(topic.subscribers),
        }
        try:
            bounds = self._bus.log.bounds(topic.name)
        except StorageError as error:
            # A damaged topic must not hide the others.
            return summary | {"epoch": 0, "start": 0, "stop": 0, "damaged": error.text}
        return summary | {"epoch": bounds.epoch, "start": bounds.start, "stop": bounds.stop}

    def _status(self, request: AdminRequest) -> dict[str, Any]:
        bus, error = self._bus, self._context.durability.error
        return {
            "pid": os.getpid(),
            "addresses": self._addresses,
            "connections": self._count_connections(),
            "topics": len(bus.topics()),
            "receipts-waiting": bus.receipts.waiting,
            "outbox-bytes": self._context.memory.ledger.bytes,
            "log-pending-bytes": bus.log.pending_bytes,
            "errors": dict(self._edge.bad_peers.counts),
            "storage-error": None if error is None else str(error),
        }


def http_urls(connectors: Sequence[Connector], addresses: Sequence[str]) -> list[str]:
    """The addresses at which HTTP is spoken, as URLs."""
    urls = []
    for connector, address in zip(connectors, addresses, strict=True):
        if "http" in connector.protocols and address.startswith("tcp://"):
            scheme = "https://" if connector.tls is not None else "http://"
            urls.append(address.replace("tcp://", scheme))
    return urls


def socket_path(data: Path) -> Path:
    """The socket's path: in the data folder or, if that is too long, in a folder of the user's."""
    path = data.resolve() / "admin.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return path
    digest = hashlib.blake2b(os.fsencode(path), digest_size=10).hexdigest()
    return Path(tempfile.gettempdir()) / f"polybus-{os.getuid()}" / f"{digest}.sock"
