"""Publishes parts of dead letters exactly once, although a topic and a table must agree on them.

The order of writes of a part, which has one topic:

    1. DATA/staging/dead-letters/      its messages, staged by the bus
    2. DATA/pipeline/replay/part.json  the key of its transaction, and which dead letters it has
    3. the topic                       the transaction, by the bus
    4. the table `replayed`            the dead letters, under the same key
    5. DATA/pipeline/replay/part.json  removed

After a crash the next run does 3 and 4 for the part that it finds in part.json, before it looks for
other dead letters. The bus does a transaction once, and the table takes a batch of a writer once.
If the bus refuses the transaction, it has published none of it, and the dead letters still wait.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import msgspec
import pyarrow as pa

from polybus.cli.replay.publishing import OutgoingRows
from polybus.errors import BusyError, StorageError, UsageError
from polybus.log import checked_json
from polybus.log.disk import Disk, FileLock, replace_file, sync_path
from polybus.log.topics import storage_error
from polybus.services.transactions.staging import SCHEMA, cut
from polybus.spark.location import BusLocation
from polybus.spark.origin import opened_blob

PRODUCER = "dead-letters"
PIECE_BYTES = 4 << 20
PATIENCE_S = 5.0
FILE = "part.json"

Identity = tuple[str, int, int]
"""Topic, epoch and offset of a dead letter."""


class PublishedPart(msgspec.Struct, frozen=True):
    """A transaction, and the dead letters in it."""

    query: str
    batch: int
    file: str
    letters: list[Identity]


Record = Callable[[PublishedPart], None]
"""Adds the part's dead letters to the table `replayed`, unless it has them."""


@contextmanager
def opened_publisher(data: Path, record: Record) -> Iterator["OncePublisher"]:
    """The only publisher of dead letters on a data folder.

    Raises:
        BusyError: `lake.busy`, another run publishes them.
        StorageError: the folder cannot be written.
    """
    folder = data / "pipeline" / "replay"
    try:
        Disk().make_folder(folder)
        lock = FileLock(folder / "lock")
    except BlockingIOError as error:
        text = f"another run of replay --dead-letters is publishing those of {data}"
        raise BusyError("lake.busy", text) from error
    except OSError as error:
        raise storage_error(error, f"cannot write to {folder}") from error
    with lock:
        yield OncePublisher(data, folder / FILE, record)


class OncePublisher:
    """Publishes one part after the other. Each run is a query of its own."""

    def __init__(self, data: Path, path: Path, record: Record) -> None:
        self._bus = BusLocation(data)
        self._path = path
        self._record = record
        self._query = uuid4().hex
        self._next_batch = 0

    def finish_begun(self) -> int:
        """Finish the part at which an earlier run ended, and return its size.

        Raises PolybusError.
        """
        try:
            content = self._path.read_bytes()
            begun = checked_json.decode(content, PublishedPart, self._path, accept_unchecked=True)
        except FileNotFoundError:
            return 0
        except (OSError, StorageError) as error:
            reason = error.text if isinstance(error, StorageError) else f"{self._path}: {error}"
            advice = "restore it, or remove it: dead letters of one part may then go out twice"
            raise StorageError("pipeline.settings", f"{reason}; {advice}") from error
        try:
            self._finish(begun)
        except UsageError as error:
            if error.code == "client.unreachable":
                raise
            return 0
        return len(begun.letters)

    def publish(self, topic: str, rows: OutgoingRows, letters: list[Identity]) -> None:
        """Publish and record a part; it is durable on return.

        Raises:
            UsageError: the bus refuses it; nothing is published.
            PolybusError: the next run finishes it.
        """
        part = PublishedPart(self._query, self._next_batch, self._stage(topic, rows), letters)
        self._next_batch += 1
        replace_file(self._path, checked_json.encode(part))
        self._finish(part)

    def _finish(self, part: PublishedPart) -> None:
        key = {"producer": PRODUCER, "query": part.query, "batch": part.batch}
        try:
            # Each run takes over from the previous one, whose last part is finished.
            body = {**key, "files": [part.file], "gaps": True, "take-over": True}
            self._bus.call("POST", "/v1/commits", body, patience_s=PATIENCE_S)
        except UsageError as error:
            if error.code != "client.unreachable":
                self._forget()
            raise
        self._record(part)
        self._forget()

    def _forget(self) -> None:
        self._path.unlink()
        sync_path(self._path.parent)

    def _stage(self, topic: str, rows: OutgoingRows) -> str:
        """Stage the messages at the bus; return the name of the file.

        Payloads of references are staged as they are: the bus stores them as blobs again.
        """
        for index in range(len(rows.values)):
            if (reference := rows.reference(index)) is not None:
                with opened_blob(self._bus, reference.id) as (_, pieces):
                    rows.inline(index, b"".join(pieces))
        columns = [[topic] * len(rows.values), rows.keys, rows.values, rows.headers]
        arrays = [pa.array(*pair) for pair in zip(columns, SCHEMA.types, strict=True)]
        content = io.BytesIO()
        with pa.ipc.new_stream(content, SCHEMA) as writer:
            for batch in cut(pa.record_batch(arrays, schema=SCHEMA)):
                writer.write_batch(batch)
        name, size = f"{self._next_batch}-{uuid4().hex}.arrows", content.tell()
        for position in range(0, size, PIECE_BYTES):
            piece = content.getbuffer()[position : position + PIECE_BYTES].tobytes()
            end = "true" if position + len(piece) == size else "false"
            path = f"/v1/staging/{PRODUCER}/{name}?position={position}&end={end}"
            self._bus.call("POST", path, piece, patience_s=PATIENCE_S)
        return name
