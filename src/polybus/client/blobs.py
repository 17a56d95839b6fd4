"""Large payloads of a client: upload from a file or an iterator, and download, with resume.

Both use HTTP, which every detected port speaks, whatever the scheme of the client's URL. They run
on threads, so that a slow disk does not stop the event loop.
"""

import asyncio
import hashlib
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import quote

import msgspec

from polybus import references
from polybus.client.http.blocking import GONE, opened
from polybus.client.options import ClientOptions
from polybus.client.retry import Backoff
from polybus.errors import PolybusError, UsageError
from polybus.references import OCTETS, Reference
from polybus.structs import decode
from polybus.wire.positions import Position

Source = str | os.PathLike[str] | BinaryIO | AsyncIterator[bytes]
BlobProgress = Callable[[int, int | None], None]
"""Called with the bytes so far and, if known, in total."""
PIECE_BYTES = 1 << 20
PART_SUFFIX = ".part"
QUEUED_MAX = 4
POLL_S = 0.1
ANSWER_TIMEOUT_S = 600.0
BROKEN_OFF = (*GONE, "blob.arriving", "blob.position")
"""Errors after which a transfer can be continued."""
T = TypeVar("T")


class _Arrived(msgspec.Struct):
    bytes: int


class _Stored(msgspec.Struct):
    epoch: int
    offsets: list[int]
    reference: Reference


@dataclass(frozen=True, slots=True)
class _Put:
    """Sends payloads to a topic."""

    options: ClientOptions
    topic: str
    content_type: str
    progress: BlobProgress | None

    @property
    def _path(self) -> str:
        return f"/v1/topics/{quote(self.topic, safe='')}/blob"

    def arrived_bytes(self, sha256: str) -> int:
        """How many bytes the bus has of an interrupted upload."""
        url, tls, head = _url(self.options), self.options.tls, _head(self.options)
        with opened(url, "GET", f"{self._path}?sha256={sha256}", headers=head, tls=tls) as answer:
            return decode(_all_of(answer), _Arrived).bytes

    def send(
        self, pieces: Iterator[bytes], *, sha256: str = "", start: int = 0, size: int | None = None
    ) -> tuple[Position, Reference]:
        """Send a payload, or its missing part; the answer comes when it is durable."""
        sent = start

        def counted() -> Iterator[bytes]:
            nonlocal sent
            for piece in pieces:
                yield piece
                sent += len(piece)
                if self.progress is not None:
                    self.progress(sent, size)

        with opened(
            _url(self.options),
            "PUT",
            f"{self._path}?sha256={sha256}&from={start}" if sha256 else self._path,
            counted(),
            headers={"content-type": self.content_type, **_head(self.options)},
            timeout_s=ANSWER_TIMEOUT_S,
            tls=self.options.tls,
        ) as answer:
            stored = decode(_all_of(answer), _Stored)
        return Position(stored.epoch, stored.offsets[0]), stored.reference


def _all_of(answer: HTTPResponse) -> bytes:
    """The body of an answer. Raises PolybusError `client.disconnected`."""
    try:
        return answer.read()
    except (OSError, HTTPException) as error:
        raise PolybusError("client.disconnected", f"the answer was interrupted: {error}") from error


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(file):
        digest.update(piece)
    return digest.hexdigest()


async def upload(
    options: ClientOptions,
    topic: str,
    source: Source,
    *,
    content_type: str = OCTETS,
    progress: BlobProgress | None = None,
) -> tuple[Position, Reference]:
    """Publish a payload; return its position and reference when both are durable.

    A regular file is read twice: its SHA-256 identifies the upload, which continues where an
    earlier one, also of another process, was interrupted.

    Raises PolybusError: the bus's refusal, or why it could not be reached.
    """
    if isinstance(source, AsyncIterator):
        bridge = _Bridge()
        feeding = asyncio.create_task(bridge.feed(source))
        put = _Put(options, topic, content_type, progress)
        try:
            return await asyncio.to_thread(put.send, bridge)
        finally:
            # The source may be endless, and the rest of it is not needed.
            bridge.close()
            feeding.cancel()
            await asyncio.wait([feeding])
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:  # noqa: ASYNC230 - only opened here
            return await _upload_file(_Put(options, topic, content_type, progress), file)
    return await _upload_file(_Put(options, topic, content_type, progress), source)


async def _upload_file(put: _Put, file: BinaryIO) -> tuple[Position, Reference]:
    """Send a file; a seekable one continues where an earlier upload was interrupted."""
    if not file.seekable():
        return await asyncio.to_thread(put.send, _pieces(file))
    begin = file.tell()
    sha256 = await asyncio.to_thread(_sha256, file)
    size = file.tell() - begin

    def attempt() -> tuple[Position, Reference]:
        start = put.arrived_bytes(sha256)
        if start > size:
            start = 0
        file.seek(begin + start)
        return put.send(_pieces(file), sha256=sha256, start=start, size=size)

    return await _until_done(put.options, attempt)


async def _until_done(options: ClientOptions, attempt: Callable[[], T]) -> T:
    """Repeat an interrupted transfer, if the client reconnects."""
    backoff = Backoff()
    while True:
        try:
            return await asyncio.to_thread(attempt)
        except PolybusError as error:
            if error.code not in BROKEN_OFF or not options.reconnect:
                raise
        await asyncio.sleep(backoff.next_s())


async def download(
    options: ClientOptions,
    blob: Reference | str,
    target: str | os.PathLike[str],
    *,
    progress: BlobProgress | None = None,
) -> Path:
    """Write a payload to a file, which gets its name when it is complete and verified.

    An unfinished download is `TARGET.part`, and continues where it ended, also in another process.

    Raises PolybusError: `blob.unknown`; `blob.damaged` if the received bytes have another SHA-256;
    and if the bus cannot be reached and the client does not reconnect.
    """
    blob_id = blob if isinstance(blob, str) else blob.id
    if not references.is_blob_id(blob_id):
        text = f"{blob_id[:40]!r} cannot be the id of a blob, which has 64 hexadecimal digits"
        raise UsageError("blob.unknown", text)
    part = Path(f"{os.fspath(target)}{PART_SUFFIX}")
    await _until_done(options, lambda: _get(options, blob_id, part, progress))
    await asyncio.to_thread(_finish, part, Path(target), blob_id)
    return Path(target)


def _url(options: ClientOptions) -> str:
    address = options.address
    if address.scheme == "queue":
        text = "large payloads need HTTP, which the port of a queue does not speak"
        raise UsageError("client.unsupported", f"{text}; use another URL")
    return f"{'https' if address.tls else 'http'}://{address.authority}"


def _head(options: ClientOptions) -> dict[str, str]:
    credentials = options.address.credentials
    return {} if credentials is None else {"authorization": credentials.authorization}


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece


def _get(options: ClientOptions, blob_id: str, part: Path, progress: BlobProgress | None) -> None:
    """Append the missing part of a payload to a file."""
    have = part.stat().st_size if part.exists() else 0
    head = {"range": f"bytes={have}-", **_head(options)} if have else _head(options)
    try:
        with opened(
            _url(options), "GET", f"/v1/blobs/{blob_id}", headers=head, tls=options.tls
        ) as answer:
            if have and answer.status != 206:
                have = 0
            total = have + int(answer.headers.get("content-length") or 0)
            with part.open("ab" if have else "wb") as file:
                while piece := answer.read(PIECE_BYTES):
                    file.write(piece)
                    have += len(piece)
                    if progress is not None:
                        progress(have, total)
            if have < total:
                text = f"the bus ended a download after {have} of {total} bytes"
                raise PolybusError("client.disconnected", text)
    except UsageError as error:
        if error.code != "blob.range":
            raise
        # The file is complete; its SHA-256 will be checked.
    except OSError as error:
        raise PolybusError(
            "client.disconnected", f"the download was interrupted: {error}"
        ) from error


def _finish(part: Path, target: Path, blob_id: str) -> None:
    with part.open("rb") as file:
        found = _sha256(file)
    if found != blob_id:
        part.unlink()
        text = f"the downloaded bytes have the SHA-256 {found}, not {blob_id}; download again"
        raise PolybusError("blob.damaged", text)
    part.rename(target)


class _Bridge:
    """Pieces of an async iterator for a thread, which reads them as an iterator."""

    def __init__(self) -> None:
        self._pieces: queue.Queue[bytes | BaseException | None] = queue.Queue(QUEUED_MAX)
        self._closed = threading.Event()

    async def feed(self, source: AsyncIterator[bytes]) -> None:
        try:
            async for piece in source:
                if not await asyncio.to_thread(self._add, piece):
                    return
            await asyncio.to_thread(self._add, None)
        except Exception as error:
            await asyncio.to_thread(self._add, error)

    def _add(self, piece: bytes | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._pieces.put(piece, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def close(self) -> None:
        self._closed.set()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while True:
            try:
                piece = self._pieces.get(timeout=POLL_S)
                break
            except queue.Empty:
                if self._closed.is_set():
                    # Otherwise this thread, and the program with it, would wait forever.
                    raise PolybusError("client.closed", "the upload was cancelled") from None
        if piece is None:
            raise StopIteration
        if isinstance(piece, BaseException):
            raise piece
        return piece
