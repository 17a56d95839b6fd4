"""A large payload on its way from a blob to a peer that gets the bytes.

Nothing may come between its pieces, so they bypass the outbox, where other data for the peer waits.
Its subscriptions read the log meanwhile, and continue after the payload.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from polybus import references
from polybus.batch import Batch
from polybus.log.blobs import unknown_blob
from polybus.references import Reference
from polybus.services.blobs.blobs import Blobs
from polybus.services.memory import MemoryGate

PIECE_BYTES = 256 << 10


def unchanged(piece: bytes) -> bytes:
    return piece


@dataclass(frozen=True, slots=True)
class PayloadFraming:
    """The framing of a large payload in a protocol: prefix, encoding of each piece, and suffix."""

    head: bytes = b""
    wrap: Callable[[bytes], bytes] = unchanged
    tail: bytes = b""
    piece_bytes: int = PIECE_BYTES


def reference_of(batch: Batch) -> Reference:
    """The reference that is the only message of a batch.

    Raises UsageError `blob.unknown`: programs that write to Kafka may set the mark themselves.
    """
    found = references.parse(batch.value(0))
    if found is None:
        raise unknown_blob()
    return found


async def payload(
    blobs: Blobs, memory: MemoryGate, batch: Batch, words: PayloadFraming
) -> AsyncIterator[bytes]:
    """The payload of a batch that is one reference, in a protocol's framing.

    Raises UsageError `blob.unknown`, StorageError `blob.damaged`: before the first piece, or later.
    """
    found = reference_of(batch)
    reader = await blobs.reader(blobs.of_message(batch.topic, found.id))
    if reader.size != found.size:
        # The prefix has announced its size.
        raise unknown_blob()
    before, start = words.head, 0
    while start < reader.size:
        # Like catch-ups: few at a time, and none while there is no room for their data.
        async with memory.catch_up_turn():
            piece = await blobs.read(reader, start, words.piece_bytes)
        start += len(piece)
        yield before + words.wrap(piece) if before else words.wrap(piece)
        before = b""
    yield before + words.tail
