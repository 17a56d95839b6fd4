"""Large payloads over HTTP: streamed in as they arrive, and out in ranges, in constant memory."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from polybus.edges.http.api.cloud_events import headers_of
from polybus.edges.http.api.publish import (
    PublishQuery,
    StoredBlob,
    begin_upload,
    gathered,
    publish_upload,
)
from polybus.edges.http.calls import OFFSET_MAX, Call
from polybus.edges.http.downloads import DownloadResponse
from polybus.errors import PeerError, PolybusError, UsageError
from polybus.log.blobs import BlobReader
from polybus.references import OCTETS
from polybus.services.blobs.unfinished import ContinuedBlob
from polybus.services.topics import refuse_in_cluster

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class UploadQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`sha256` is that of the whole payload, in lower case: a broken upload can be continued."""

    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class BlobQuery(PublishQuery):
    """`start` is the offset of the body in the payload, if the bus already has a part."""

    sha256: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""
    start: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)] = msgspec.field(default=0, name="from")


class ArrivedBytes(msgspec.Struct):
    """How many bytes of an upload the bus has: it may continue there."""

    bytes: int


async def arrived(call: Call, topic: str, query: UploadQuery) -> ArrivedBytes:
    """How many bytes of an interrupted upload have arrived."""
    return ArrivedBytes(call.state.blobs.unfinished_bytes(call.access, topic, query.sha256))


async def put(call: Call, topic: str, query: BlobQuery) -> StoredBlob:
    """Publish the body as one message, whose payload is stored as a blob while it arrives."""
    refuse_in_cluster(call.state.bus, "blobs")
    headers = headers_of(call.request.headers)
    if query.start and not query.sha256:
        raise PeerError("http.query", "from is given without sha256, which it needs")
    upload = begin_upload(call, topic, query.sha256)
    try:
        if isinstance(upload, ContinuedBlob):
            await upload.begin(query.start)
        async for piece in gathered(call, upload.size):
            await upload.write(piece)
    except BaseException as error:
        if isinstance(upload, ContinuedBlob) and _is_break(error):
            upload.pause()
        else:
            upload.discard()
        raise
    return await publish_upload(call, upload, query, (topic, headers))


def _is_break(error: BaseException) -> bool:
    """Whether the sender may continue an upload after this error."""
    if isinstance(error, PolybusError):
        return error.code == "blob.position"
    return isinstance(error, ClientDisconnect | asyncio.CancelledError)


async def get(call: Call) -> Annotated[Response, msgspec.Raw]:
    """Read a blob, or a range of it."""
    blobs = call.state.blobs
    blob_id = call.path["id"]
    reader = await blobs.reader(blobs.find(call.access, blob_id, call.hides_values))
    etag = f'"{blob_id}"'
    headers = {
        "accept-ranges": "bytes",
        "cache-control": "private, no-cache",
        # A payload is untrusted data, never a page of the bus.
        "content-disposition": "attachment",
        "etag": etag,
    }
    asked = call.request.headers
    if etag in asked.get("if-none-match", "") or asked.get("if-none-match") == "*":
        return Response(status_code=304, headers=headers)
    start, stop, status = 0, reader.size, 200
    if asked.get("if-range", etag) == etag:
        found = wanted_range(asked.get("range", ""), reader.size)
        if found is not None:
            start, stop = found
            status = 206
            headers["content-range"] = f"bytes {start}-{stop - 1}/{reader.size}"
    headers["content-length"] = str(stop - start)
    if call.request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=OCTETS)
    pieces = await _begun(call, reader, start, stop)
    return DownloadResponse(pieces, status, headers, media_type=OCTETS)


def wanted_range(text: str, size: int) -> tuple[int, int] | None:
    """The first byte and the one after the last; None for all: several ranges count as none.

    Raises UsageError `blob.range`.
    """
    found = _RANGE.fullmatch(text.strip().lower())
    if found is None or found[1] == found[2] == "":
        return None
    if not found[1]:
        start, stop = max(0, size - int(found[2])), size
    else:
        start, stop = int(found[1]), size
        if found[2]:
            if int(found[2]) < start:
                return None
            stop = min(size, int(found[2]) + 1)
    if start >= stop:
        raise UsageError("blob.range", f"the range is empty or not within the blob's {size} bytes")
    return start, stop


async def _begun(call: Call, reader: BlobReader, start: int, stop: int) -> AsyncIterator[bytes]:
    """Read the first piece before the status is sent, so that damage becomes an error response."""
    pieces = call.state.blobs.pieces(reader, start, stop, call.access.account)
    first = await anext(pieces, b"")

    async def rest() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            if call.access.is_ended:
                # Truncated: the login ended meanwhile.
                raise UsageError("auth.ended", "your account, password or token is no longer valid")
            yield piece

    return rest()
