"""/v1/staging and /v1/commits: how Spark's sink publishes, exactly once.

A producer on the bus's machine writes staged files itself. Others upload them in pieces, so that a
large file does not fill memory and need not be sent again as a whole.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import msgspec

from polybus import names
from polybus.edges.http.calls import OFFSET_MAX, Call
from polybus.errors import PeerError, UsageError
from polybus.services.transactions import staging
from polybus.services.transactions.commits import Offsets, TransactionKey, unknown_producer
from polybus.services.transactions.staged_uploads import StagedUpload
from polybus.services.transactions.transactions import CommitRequest

PIECE_BYTES_MAX = 8 << 20
WRITE_BYTES = 128 << 10
FILES_MAX = 10_000
QUERY_BYTES_MAX = 128

BatchNumber = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
# A list and not a tuple: tools that read OpenAPI handle lists better.
RangeBody = Annotated[list[int], msgspec.Meta(min_length=3, max_length=3)]


class NewCommit(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A transaction: all messages of the staged files; identified by producer, query and batch."""

    producer: str
    query: Annotated[str, msgspec.Meta(min_length=1, max_length=QUERY_BYTES_MAX)]
    batch: BatchNumber
    files: Annotated[list[str], msgspec.Meta(max_length=FILES_MAX)] = []
    take_over: bool = False
    """Let this query continue for a producer of another query, or after missing batches."""
    gaps: bool = False
    """Batch numbers may be missing: empty batches are not committed."""


class Committed(msgspec.Struct):
    """Ranges of each topic: epoch, first offset, offset after the last.

    `already`: it was committed before. Its ranges are then known only if it was the last batch and
    has few of them.
    """

    producer: str
    query: str
    batch: int
    already: bool
    offsets: dict[str, list[RangeBody]]


class PieceQuery(msgspec.Struct, forbid_unknown_fields=True):
    position: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)] = 0
    end: bool = False


class Staged(msgspec.Struct):
    """The size of the staged file so far."""

    file: str
    bytes: int


async def commit(call: Call, body: NewCommit) -> Committed:
    """Publish staged files, all or nothing, once for each producer, query and batch."""
    key = TransactionKey(_producer(call, body.producer), body.query, body.batch)
    wanted = CommitRequest(key, body.files, body.take_over, body.gaps)
    offsets, already = await call.state.transactions.commit(wanted, call.access)
    return _committed(call, key, already, offsets)


async def last_commit(call: Call) -> Committed:
    """The last transaction of a producer, in the topics that the caller may use."""
    await call.state.transactions.check_read()
    name = call.path["producer"]
    if not call.is_admin and "/" in name:
        raise unknown_producer(name)
    known = call.state.transactions.producer(call.access.own(name))
    key = TransactionKey(known.name, known.query, known.batch)
    shown = {topic: one for topic, one in known.offsets.items() if call.access.rights(topic)}
    return _committed(call, key, True, shown)


def _committed(call: Call, key: TransactionKey, already: bool, offsets: Offsets) -> Committed:
    """The ranges by the account's names for topics."""
    access = call.access
    ranges = {access.shown(topic): [list(one) for one in found] for topic, found in offsets.items()}
    return Committed(access.mine(key.producer) or "", key.query, key.batch, already, ranges)


def _producer(call: Call, name: str) -> str:
    """The full name of an account's producer. Raises UsageError `commit.producer`."""
    if call.is_admin:
        account, slash, own = name.partition("/")
        staging.check_producer(own if slash and names.is_account(account) else name)
        return name
    return call.access.own(staging.check_producer(name))


async def stage(call: Call, query: PieceQuery) -> Staged:
    """Upload a piece of a file to be committed."""
    path = _staged_path(call)
    _check_size(call.content_length)
    uploads = call.state.transactions.uploads
    if call.state.transactions.is_wanted(path):
        raise UsageError("staging.in-use", f"{path.name} is being committed")
    with uploads.writing(path):
        upload = await uploads.run(StagedUpload, path, query.position, uploads.room)
        try:
            async for some in _pieces(call):
                await uploads.run(upload.write, some)
            if query.end:
                await uploads.run(upload.sync)
        finally:
            await uploads.run(upload.close)
    return Staged(path.name, upload.size)


async def unstage(call: Call) -> None:
    """Delete a staged file, unless an unfinished transaction needs it."""
    path = _staged_path(call)
    # An unfinished transaction keeps its files: it will be finished.
    if not call.state.transactions.is_wanted(path):
        await call.state.transactions.uploads.run(staging.discard, path)


def _staged_path(call: Call) -> Path:
    producer = _producer(call, call.path["producer"])
    staging.check_file(call.path["file"])
    return staging.folder_of(call.state.context.data, producer) / call.path["file"]


def _check_size(size: int) -> None:
    if size > PIECE_BYTES_MAX:
        text = f"the body is over {PIECE_BYTES_MAX} bytes (a piece of a staged file)"
        raise PeerError("http.body-too-large", text)


async def _pieces(call: Call) -> AsyncIterator[bytes]:
    """The body in small pieces, so that it is not in memory as a whole."""
    gathered: list[bytes] = []
    total = waiting = 0
    async for some in call.request.stream():
        gathered.append(some)
        total += len(some)
        waiting += len(some)
        _check_size(total)
        if waiting >= WRITE_BYTES:
            yield b"".join(gathered)
            gathered, waiting = [], 0
    if waiting:
        yield b"".join(gathered)
