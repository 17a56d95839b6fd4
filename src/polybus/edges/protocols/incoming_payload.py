"""A large payload on its way from a peer to a blob, and the message that follows it.

The peer is not read from while a piece waits for the disk, so that the payload is never in memory.
Data that the peer sends after it waits until its message is published, so messages of a connection
keep their order.
"""

import asyncio
import base64
import binascii
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Protocol

from polybus.batch import Batch, Buffer
from polybus.bus.bus import unknown_topic
from polybus.bus.subscriptions import Holdable
from polybus.config import Limits
from polybus.edges.edge import Edge
from polybus.errors import PeerError, PolybusError
from polybus.log.blobs import COPY_BYTES, BlobReader
from polybus.references import OCTETS, TEXT
from polybus.services.accounts.access import AccountAccess
from polybus.services.blobs.blobs import StoredPayload, with_receipt_ids
from polybus.services.blobs.uploads import IncomingBlob
from polybus.wire.codec import Bad, LargeBegin, LargeDropped, LargeEnd, LargePiece

GATE = "blob"
DECODE_BYTES = 192 << 10
"""A multiple of 4 and of 3, so that each piece of base64 decodes by itself."""


class PayloadSender(Holdable, Protocol):
    """The sender of a large payload."""

    def progressed(self, size: int) -> None: ...


class LargeReceiver(Protocol):
    """The translator of a peer that sends a large payload."""

    edge: Edge
    access: AccountAccess
    limits: Limits

    @property
    def peer(self) -> PayloadSender: ...

    def handle(self, event: Any) -> None: ...

    def arrived(self, waiting: list[Any]) -> None: ...

    def topics_of_large(self, end: LargeEnd) -> list[str]: ...

    def publish_large(self, kept: StoredPayload, end: LargeEnd) -> list[Batch]: ...

    def publish_small(self, value: bytes, end: LargeEnd) -> None: ...

    def publish_part(self, batch: Batch, *, is_first: bool, is_full: bool = False) -> None: ...

    def refuse_large(self, end: LargeEnd, error: PolybusError) -> None: ...


class IncomingPayload:
    """One large payload of a translator's peer; meanwhile it gets all events of the translator."""

    def __init__(self, translator: LargeReceiver, begin: LargeBegin) -> None:
        self._translator = translator
        self._pieces: deque[Buffer] = deque()
        self._end: LargeEnd | LargeDropped | None = None
        self._more = asyncio.Event()
        self._waiting: list[Any] = []
        self._upload: IncomingBlob | None = None
        self._error: PolybusError | None = None
        access = translator.access
        try:
            # For an unknown topic it is refused at the end, when the peer can parse the error.
            topic = access.full(begin.topic) if begin.topic else ""
            if topic and (access.topics is None or topic not in access.topics):
                raise unknown_topic(begin.topic)
            self._upload = translator.edge.blobs.upload(access, topic)
        except PolybusError as error:
            self._error = error.without_traceback()
        self._task = translator.edge.context.loop.create_task(self._run())

    @property
    def has_ended(self) -> bool:
        """Whether all bytes have arrived: it only waits for the disk."""
        return self._end is not None

    def take(self, event: Any) -> None:
        """The next event of the peer."""
        if self._end is not None:
            self._waiting.append(event)
        elif isinstance(event, LargePiece):
            if self._error is None:
                self._pieces.append(event.data)
                self._translator.peer.hold(GATE)
            self._translator.peer.progressed(len(event.data))
        elif isinstance(event, LargeEnd | LargeDropped):
            self._end = event
            self._translator.peer.hold(GATE)
        else:
            # The stream cannot be decoded any further, or a part was refused.
            assert isinstance(event, Bad), event
            self._translator.handle(event)
            if event.error.final:
                self._end = LargeDropped()
        self._more.set()

    def cancel(self) -> None:
        """The peer is gone. A complete payload is published nevertheless."""
        if self._end is None:
            self._task.cancel()

    async def _run(self) -> None:
        translator = self._translator
        try:
            await self._receive()
            if isinstance(self._end, LargeEnd):
                await self._publish(self._end)
            elif self._upload is not None:
                self._upload.discard()
        except asyncio.CancelledError:
            if self._upload is not None:
                self._upload.discard()
            # The peer is gone, or the bus is stopping: begin nothing else.
            self._waiting.clear()
            raise
        finally:
            translator.arrived(self._waiting)
            # A task and its frame refer to each other.
            del self._task

    async def _receive(self) -> None:
        """Write the pieces as they come, up to the end."""
        while self._end is None or self._pieces:
            while self._pieces:
                await self._write(self._pieces.popleft())
            if self._end is None:
                self._translator.peer.release(GATE)
                self._more.clear()
                await self._more.wait()

    async def _write(self, piece: Buffer) -> None:
        if self._upload is None or self._error is not None:
            return
        try:
            await self._upload.write(piece)
        except PolybusError as error:
            self._error = error.without_traceback()
            # At once: the peer may take long to end a payload that is discarded.
            self._upload.discard()
            self._upload = None

    async def _publish(self, end: LargeEnd) -> None:
        translator = self._translator
        try:
            if self._error is not None:
                raise self._error.copy()
            assert self._upload is not None
            topics = translator.topics_of_large(end)
            if not topics:
                self._upload.discard()
                return
            if end.spans is not None:
                await self._publish_parts(self._upload, end, topics[0])
                return
            if end.encoding:
                self._upload = await self._decoded(self._upload, topics[0])
            if self._upload.size <= translator.limits.inline_bytes_max:
                # It was large only in its encoded form.
                await self._publish_small(self._upload, end)
                return
            kind = TEXT if end.is_text and not end.encoding else OCTETS
            kept = await translator.edge.blobs.keep(self._upload, topics, kind)
        except PolybusError as error:
            if self._upload is not None:
                self._upload.discard()
            translator.refuse_large(end, error)
            return
        self._publish_kept(kept, end)

    async def _publish_parts(self, upload: IncomingBlob, end: LargeEnd, topic: str) -> None:
        """Publish the messages of a sequence, small ones in batches. Raises PolybusError."""
        await upload.finish()
        # Its parts are counted as they are copied, and it is discarded.
        upload.uncount()
        reader = await asyncio.to_thread(BlobReader, upload.writer.folder)
        spans, headers = end.spans or (), list(end.part_headers or ())
        limit = self._translator.limits.inline_bytes_max
        last, number = len(headers), 0
        while number < last:
            start, stop = spans[2 * number : 2 * number + 2]
            if stop - start > limit:
                one = LargeEnd(
                    end.topics,
                    end.receipt_id if number + 1 == last else b"",
                    headers[number],
                    part_number=number + 1,
                )
                self._publish_kept(await self._copied(reader, start, stop, topic), one)
                number += 1
                continue
            first, begin = number, start
            while number < last and spans[2 * number + 1] - begin <= limit:
                number += 1
            data = await asyncio.to_thread(reader.read, begin, spans[2 * number - 1] - begin)
            values = [
                data[spans[2 * at] - begin : spans[2 * at + 1] - begin]
                for at in range(first, number)
            ]
            batch = Batch.of(topic, values, headers=headers[first:number])
            if number == last and end.receipt_id:
                batch = with_receipt_ids(batch, [*[b""] * (len(values) - 1), end.receipt_id])
            await self._translator.edge.context.memory.room()
            self._translator.publish_part(batch, is_first=first == 0, is_full=True)
        upload.discard()

    async def _copied(self, reader: BlobReader, start: int, stop: int, topic: str) -> StoredPayload:
        """A blob of a part of the received bytes."""
        blobs = self._translator.edge.blobs
        part = blobs.upload(self._translator.access, topic)
        try:
            for at in range(start, stop, COPY_BYTES):
                piece = await asyncio.to_thread(reader.read, at, min(COPY_BYTES, stop - at))
                await part.write(piece)
        except BaseException:
            part.discard()
            raise
        return await blobs.keep(part, [topic])

    async def _publish_small(self, upload: IncomingBlob, end: LargeEnd) -> None:
        await upload.finish()
        reader = await asyncio.to_thread(BlobReader, upload.writer.folder)
        value = await asyncio.to_thread(reader.read, 0, reader.size)
        upload.discard()
        self._translator.publish_small(value, end)

    def _publish_kept(self, kept: StoredPayload, end: LargeEnd) -> None:
        batches = []
        try:
            batches = self._translator.publish_large(kept, end)
        finally:
            self._translator.edge.blobs.published(kept, batches, self._translator.access)

    async def _decoded(self, encoded: IncomingBlob, topic: str) -> IncomingBlob:
        """The payload that was sent as base64. Raises PeerError, StorageError."""
        blobs = self._translator.edge.blobs
        decoded = blobs.upload(self._translator.access, topic)
        limit = self._translator.limits.message_bytes_max
        try:
            await encoded.finish()
            encoded.uncount()
            reader = await asyncio.to_thread(BlobReader, encoded.writer.folder)
            async for piece in _pieces_of(reader):
                try:
                    await decoded.write(base64.b64decode(piece, validate=True))
                except binascii.Error as error:
                    raise PeerError("goms.000001", "data is not base64", final=False) from error
                if decoded.size > limit:
                    text = f"data is over {limit} bytes (message-bytes-max)"
                    raise PeerError("goms.000003", text, final=False)
        except BaseException:
            decoded.discard()
            raise
        finally:
            encoded.discard()
        return decoded


async def _pieces_of(reader: BlobReader) -> AsyncIterator[bytes]:
    for start in range(0, reader.size, DECODE_BYTES):
        yield await asyncio.to_thread(reader.read, start, DECODE_BYTES)
