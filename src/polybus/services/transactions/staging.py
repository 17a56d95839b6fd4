"""Staged messages: files that a writer has written for a later commit.

A staged file is an Arrow IPC stream, not compressed, with the columns of SCHEMA; each record batch
is of one topic. Files are in DATA/staging/<producer>/ and named `<batch>-<unique>.arrows`; those of
a named account are in DATA/staging/<account>%<producer>/. The bus reads them when they are
committed and removes them afterwards.

Everyone who may publish may stage, so files are untrusted: sizes are checked before memory is
allocated, and every record batch is validated before it is read.
"""

import contextlib
import glob
import os
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from polybus import names, scan
from polybus.batch import Batch, Buffer
from polybus.config import Limits
from polybus.errors import UsageError
from polybus.log.disk import sync_path
from polybus.log.journal.commit import END, Damaged, size_of
from polybus.log.journal.message import own_pages
from polybus.log.topics import storage_error
from polybus.references import reserved_in

SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.binary())),
    ]
)
PROTOCOL = "spark"
HEAD_BYTES_MAX = 1 << 16
"""Maximum size of the metadata of a record batch, or of the schema."""
ROW_BYTES_MAX = 1 << 20
"""Size that key, headers and topic may add to the largest message."""
BATCH_WEIGHT_MAX = 2 << 20
"""Maximum memory of a record batch with more than one row."""
BATCH_BYTES = 1 << 20
"""The approximate size of a record batch that we stage; a single row may be larger."""
RECORD_BATCH_WEIGHT = 4096
"""Even a small one takes time of the bus's own thread."""
ROW_WEIGHT = 64
KEY_WEIGHT = 128
HEADER_WEIGHT = 256

_PRODUCER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FILE = re.compile(r"([0-9]{1,18})-[A-Za-z0-9-]{8,100}\.arrows")
_PREFIX_BYTES = 8


def staging_folder(data: Path) -> Path:
    return data / "staging"


def folder_of(data: Path, producer: str) -> Path:
    """The staging folder of a producer, by its full name, `etl` or `shop/etl`."""
    return staging_folder(data) / producer.replace("/", "%")


def producer_of(path: Path) -> str:
    """The full name of a staged file's producer."""
    return path.parent.name.replace("%", "/")


def check_producer(producer: str) -> str:
    """Raises UsageError `commit.producer` if it cannot be a producer's name."""
    if not _PRODUCER.fullmatch(producer):
        text = f"producer {producer[:40]!r} must be 1 to 128 of a-z A-Z 0-9 . _ - and begin with a"
        raise UsageError("commit.producer", f"{text} letter or digit")
    return producer


def check_file(name: str) -> int:
    """The batch number in the name of a staged file. Raises UsageError `commit.file`."""
    found = _FILE.fullmatch(name)
    if found is None:
        text = f"{name[:40]!r} is not a valid staged file name (BATCH-UNIQUE.arrows)"
        raise UsageError("commit.file", text)
    return int(found[1])


def paths_of(data: Path, producer: str, files: Sequence[str]) -> list[Path]:
    """The paths of staged files, by their names. Raises UsageError `commit.file`."""
    for name in files:
        check_file(name)
    if len(set(files)) < len(files):
        raise UsageError("commit.file", "a staged file is named twice")
    return [folder_of(data, producer) / name for name in files]


def inspect(files: Iterable[Path], limits: Limits) -> tuple[set[str], int, list[Batch] | None]:
    """Inspect all files: their topics, how many parts they need (at least 1), and all their
    messages if that is one part. May block.

    Raises:
        UsageError: `commit.file`, naming the file and what is wrong; `commit.value-too-large`;
            `commit.too-large`.
        StorageError: a file cannot be read.
    """
    topics: set[str] = set()
    count = 0
    batches: list[Batch] | None = None
    for part, is_last in parts(files, limits):
        count += 1
        topics.update(batch.topic for batch in part)
        if is_last and count == 1:
            batches = part
        # Free this part before the next one is read.
        del part
    return topics, count, batches


def parts(files: Iterable[Path], limits: Limits) -> Iterator[tuple[list[Batch], bool]]:
    """The messages part by part, the same parts each time, and whether it is the last part.

    Raises as `inspect`. May block.
    """
    part: list[Batch] = []
    total = part_bytes = 0
    for batch, size in _batches(files, limits):
        total += size
        if total > limits.transaction_bytes_max:
            text = (
                f"the transaction is over {limits.transaction_bytes_max} bytes "
                "(limits.transaction-bytes-max): let Spark take less at once, with the source's "
                "option maxOffsetsPerTrigger, or raise the limit"
            )
            raise UsageError("commit.too-large", text)
        if part_bytes and part_bytes + size > limits.transaction_part_bytes:
            # Arrow's allocator keeps memory for every thread that has read a part.
            pa.default_memory_pool().release_unused()
            yield part, False
            part, part_bytes = [], 0
        part.append(batch)
        part_bytes += size
    yield part, True


def _batches(files: Iterable[Path], limits: Limits) -> Iterator[tuple[Batch, int]]:
    """Each record batch as a batch, with its weight."""
    for path in files:
        try:
            with path.open("rb") as file:
                for rows, size in _read(file, path, limits):
                    weight = size + extra_weight(rows)
                    if weight > BATCH_WEIGHT_MAX and rows.num_rows > 1:
                        text = f"{path.name}: a record batch of {weight} bytes and several rows"
                        raise UsageError("commit.file", f"{text}; at most {BATCH_WEIGHT_MAX}")
                    yield _batch_of(rows, path, limits), weight
        except FileNotFoundError as error:
            text = (
                f"{path.name} is not staged in {path.parent}: is this the bus it was staged for? "
                "uncommitted files are removed after a day"
            )
            raise UsageError("commit.file", text) from error
        except OSError as error:
            raise storage_error(error, f"cannot read {path}") from error


def _read(file: BufferedReader, path: Path, limits: Limits) -> Iterator[tuple[pa.RecordBatch, int]]:
    bytes_max = max(limits.message_bytes_max, BATCH_WEIGHT_MAX) + ROW_BYTES_MAX
    file_bytes = os.fstat(file.fileno()).st_size
    position = 0
    try:
        if not pa.ipc.read_schema(pa.py_buffer(_head(file) or b"")).equals(SCHEMA):
            raise Damaged(f"its columns are not {', '.join(SCHEMA.names)}")
        while True:
            position = file.tell()
            head = _head(file)
            if head is None:
                return
            size = size_of(head)
            if size > file_bytes - position or size > bytes_max + HEAD_BYTES_MAX:
                text = f"a record batch of {size} bytes; at most {bytes_max} (message-bytes-max)"
                raise Damaged(text)
            if _is_compressed(head):
                raise Damaged("it is compressed")
            rows = pa.ipc.read_record_batch(_message(file, head, size), SCHEMA)
            rows.validate(full=True)
            if rows.num_rows:
                yield rows, size
    except (Damaged, pa.ArrowException, struct.error, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            # An error of the disk has a number; without one it is Arrow's error for invalid data.
            raise
        text = f"{path.name}, byte {position}: {str(error)[:200]}"
        raise UsageError("commit.file", text) from error


def _message(file: BufferedReader, head: bytes, size: int) -> pa.Message:
    """The message after its head, in memory that is allocated once and not copied.

    An allocator would keep the pages of one part in addition to those of the next.
    """
    pages = own_pages(size)
    whole = memoryview(pages)
    whole[: len(head)] = head
    if file.readinto(whole[len(head) :]) != size - len(head):
        raise Damaged("the message is incomplete")
    return pa.ipc.read_message(pa.BufferReader(pa.py_buffer(pages)))


def _head(file: BufferedReader) -> bytes | None:
    """The message at this position without its body; None at the end."""
    prefix = file.read(_PREFIX_BYTES)
    if not prefix or prefix == END:
        return None
    size = int.from_bytes(prefix[4:], "little", signed=True)
    return prefix + file.read(max(0, min(size, HEAD_BYTES_MAX)))


def _is_compressed(head: bytes) -> bool:
    """Whether a record batch's buffers are compressed: a few bytes could then become gigabytes.

    Flatbuffer tables: field 2 of `Message` is the record batch, field 3 of that its compression.
    """
    metadata = head[_PREFIX_BYTES:]
    table = struct.unpack_from("<I", metadata, 0)[0]
    at = _field(metadata, table, 2)
    if at is None:
        return False
    return _field(metadata, at + struct.unpack_from("<I", metadata, at)[0], 3) is not None


def _field(metadata: bytes, table: int, number: int) -> int | None:
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    if fields < 0:
        raise Damaged("the message header is unreadable")
    if 4 + 2 * number >= struct.unpack_from("<H", metadata, fields)[0]:
        return None
    offset = struct.unpack_from("<H", metadata, fields + 4 + 2 * number)[0]
    return table + int(offset) if offset else None


def extra_weight(rows: pa.RecordBatch) -> int:
    """Memory that rows, keys and headers will need beyond their bytes."""
    keys, headers = rows.column(1), rows.column(3)
    keyed = len(keys) - int(keys.null_count)
    objects = KEY_WEIGHT * keyed + HEADER_WEIGHT * sum_of(headers_in(headers))
    return RECORD_BATCH_WEIGHT + ROW_WEIGHT * int(rows.num_rows) + objects


def cut(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Pieces of up to BATCH_BYTES, or of one row, to be staged."""
    if rows.num_rows == 1 or rows.nbytes + extra_weight(rows) <= BATCH_BYTES:
        yield rows
        return
    half = rows.num_rows // 2
    yield from cut(rows.slice(0, half))
    yield from cut(rows.slice(half))


def headers_in(headers: pa.MapArray) -> pa.Array:
    """How many headers each row has."""
    ends = headers.offsets
    counts = pc.subtract(ends[1:], ends[:-1])
    return pc.if_else(pc.is_valid(headers), counts, 0) if headers.null_count else counts


def sum_of(counts: pa.Array) -> int:
    return int(pc.sum(counts).as_py() or 0)


def _batch_of(rows: pa.RecordBatch, path: Path, limits: Limits) -> Batch:
    """A batch over the rows' own memory."""
    topics = pc.unique(rows.column(0))
    if len(topics) != 1 or topics[0].as_py() is None:
        raise UsageError("commit.file", f"{path.name}: a record batch is not of one topic")
    values = rows.column(2)
    if values.null_count:
        raise UsageError("commit.file", f"{path.name}: column value is null in a row")
    topic = names.canonical(topics[0].as_py())
    largest = pc.max(pc.binary_length(values)).as_py()
    if largest > limits.message_bytes_max:
        text = (
            f"topic {topic!r}: column value holds {largest} bytes in a row; the bus takes at most "
            f"{limits.message_bytes_max} (limits.message-bytes-max)"
        )
        raise UsageError("commit.value-too-large", text)
    _, ends, content = values.buffers()
    if content is None or 2 * content.size < rows.nbytes:
        # Values keep the memory of the whole message: copy them if they are few.
        buffer: Buffer = b"" if content is None else content.to_pybytes()
    else:
        buffer = memoryview(content).cast("B")
    batch = Batch(topic, buffer, scan.spans_of_offsets(ends, values.offset, len(values)))
    keys, headers = rows.column(1), rows.column(3)
    if keys.null_count < len(keys):
        batch.keys = keys.to_pylist()
    if headers.null_count < len(headers):
        if pc.max(headers_in(headers)).as_py() > limits.properties_max:
            text = f"a row has over {limits.properties_max} headers (properties-max)"
            raise UsageError("commit.file", f"{path.name}: topic {topic!r}: {text}")
        batch.headers = [dict(one) if one else None for one in headers.to_pylist()]
        reserved = next(filter(None, (reserved_in(one) for one in batch.headers if one)), None)
        if reserved is not None:
            text = f"topic {topic!r}: the header {reserved[:40]!r} is reserved for the bus"
            raise UsageError("headers.reserved", text)
    batch.protocol = PROTOCOL
    return batch


# Leftovers


def staged(data: Path) -> tuple[Counter[str], Counter[str]]:
    """The number of staged bytes and files, by account. May block."""
    sizes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in _found(data, "*/*"):
        with contextlib.suppress(OSError):
            sizes[account_of(path)] += path.stat().st_size
            files[account_of(path)] += 1
    return sizes, files


def account_of(path: Path) -> str:
    """The account of a staged file's producer."""
    account, percent, _ = path.parent.name.partition("%")
    return account if percent else names.ACCOUNT


def drop(data: Path, producer: str, *, batch_max: int) -> None:
    """Remove the staged files of a producer's batches up to a committed one. May block."""
    for path in _found(data, f"{folder_of(data, producer).name}/*"):
        found = _FILE.fullmatch(path.name)
        if found is not None and int(found[1]) <= batch_max:
            # They are committed: if the disk fails now, a sweep removes them later.
            with contextlib.suppress(OSError):
                path.unlink()
    _remove_if_empty(folder_of(data, producer))


def drop_account(data: Path, account: str) -> None:
    """Remove all staged files of a named account's producers. May block."""
    for path in _found(data, f"{account}%*/*"):
        with contextlib.suppress(OSError):
            path.unlink()
        _remove_if_empty(path.parent)


def discard(path: Path) -> None:
    """Remove a staged file durably, if it exists. May block."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        sync_path(path.parent)
    _remove_if_empty(path.parent)


def sweep(data: Path, *, older_than_s: float, now_s: float, keep: Collection[Path] = ()) -> int:
    """Remove files that were not committed in time; return how many. May block."""
    removed = 0
    for path in _found(data, "*/*"):
        with contextlib.suppress(OSError):
            if path not in keep and path.stat().st_mtime < now_s - older_than_s:
                path.unlink()
                removed += 1
    for folder in _found(data, "*"):
        _remove_if_empty(folder)
    return removed


def _found(data: Path, pattern: str) -> list[Path]:
    """The content of the staging folder, without folders that are removed meanwhile."""
    folder = staging_folder(data)
    return [folder / name for name in glob.glob(pattern, root_dir=folder)]


def _remove_if_empty(folder: Path) -> None:
    # It may have been removed already.
    with contextlib.suppress(OSError):
        folder.rmdir()
