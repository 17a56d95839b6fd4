"""Copies topics from one log to another: from files to a Kafka cluster, and back.

Source and target must agree. The order of writes for each topic:

    1. the topic in the target
    2. its messages, in the order of their offsets

A crash leaves a topic with a prefix of the messages, and the next copy continues after it. A topic
of the target that has messages is only continued if it is known to be such a copy, by
`CopyTarget.messages_in`. When all messages are there, both sides are read once more and must have
the same digest. `polybus.log.kafka.registry` has the order of writes of 1 in Kafka, FilesTarget has
that in files.

System topics are left out: each bus has its own. The payload of a reference is copied into its
message, because a log in Kafka has no blobs.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from polybus import names, references
from polybus.batch import Batch
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log import checked_json, layout
from polybus.log.blobs import BlobReader, blobs_folder
from polybus.log.disk import Disk, replace_file
from polybus.log.interface import Bounds, Log, TopicSettings

READ_BYTES = 4 << 20
PENDING_BYTES_MAX = 32 << 20
"""How much is appended before the copy waits until it is durable."""
Payload = Callable[[references.Reference], bytes]
Progress = Callable[[str, int], None]
"""Called with a topic and the number of its messages that were copied since the last call."""


class CopyTarget(Protocol):
    """The log that topics are copied to."""

    @property
    def log(self) -> Log: ...

    def messages_in(self, topic: str, source: Bounds) -> int | None:
        """How many messages an earlier copy has left in the topic; None if it does not exist.

        Raises UsageError `topic.exists` if the topic is not a copy of this source.
        """

    def create(self, topic: str, source: Bounds, settings: TopicSettings) -> None: ...


@dataclass(frozen=True, slots=True)
class CopiedTopic:
    """A topic that the target has, message for message."""

    topic: str
    messages: int
    epoch: int
    start: int
    keeps_positions: bool
    """Whether each message has the same epoch and offset as in the source."""


class TopicMessages:
    """The messages of a topic as they are copied. They can be read several times."""

    def __init__(self, log: Log, topic: str, payload: Payload | None = None) -> None:
        self._log = log
        self._topic = topic
        self._payload = payload

    def read(self, skipped: int = 0) -> Iterator[Batch]:
        """Batches, each of one time, protocol and sender, without the first messages.

        Raises StorageError; UsageError `log.too-large`, a payload does not fit into a message.
        """
        bounds = self._log.bounds(self._topic)
        offset = bounds.start
        if not self._log.arrives_late:
            # Without gaps the messages need not be counted.
            offset, skipped = min(offset + skipped, bounds.stop), 0
        while offset < bounds.stop:
            found = self._log.read(self._topic, offset, bytes_max=READ_BYTES)
            if not found:
                break
            for batch in found:
                left = batch.slice(skipped, len(batch)) if skipped < len(batch) else None
                skipped = max(0, skipped - len(batch))
                if left is not None:
                    yield from map(self._inlined, alike(left))
            offset = found[-1].last_offset + 1

    def _inlined(self, batch: Batch) -> Batch:
        if self._payload is None or not any(map(references.marked, batch.headers or ())):
            return batch
        values, headers = list(batch.values()), list(batch.headers or ())
        for index, its_headers in enumerate(headers):
            reference = references.parse(values[index]) if references.marked(its_headers) else None
            if reference is not None:
                values[index] = self._payload(reference)
                headers[index] = references.without_mark(its_headers) or None
        made = Batch.of(batch.topic, values, headers=headers, keys=batch.keys)
        made.timestamp_us, made.protocol, made.sender = (
            batch.timestamp_us,
            batch.protocol,
            batch.sender,
        )
        return made

    def digest(self, progress: Progress) -> tuple[int, str]:
        """The number of messages, and the digest of their whole content."""
        count, digest = 0, xxhash.xxh3_128()
        encode = msgspec.msgpack.Encoder(order="deterministic").encode
        for batch in self.read():
            # Kafka has milliseconds.
            of_all = (batch.timestamp_us // 1000, batch.protocol, batch.sender)
            keys = batch.keys or itertools.repeat(None)
            headers = batch.headers or itertools.repeat(None)
            for value, key, its_headers in zip(batch.values(), keys, headers, strict=False):
                digest.update(encode((of_all, key, dict(its_headers or ()), value)))
            count += len(batch)
            progress(self._topic, len(batch))
        return count, digest.hexdigest()


def alike(batch: Batch) -> Iterator[Batch]:
    """The parts of a batch whose messages have the same time, protocol and sender."""
    rows = batch.stored
    if rows is None:
        yield batch
        return
    columns = [rows.column(name).to_pylist() for name in ("protocol", "sender")]
    times = rows.column("timestamp").cast("int64").to_pylist()
    start = 0
    for (time_us, protocol, sender), run in itertools.groupby(zip(times, *columns, strict=True)):
        stop = start + sum(1 for _ in run)
        part = batch.slice(start, stop)
        # The copy is not stored yet, and gets other offsets.
        part.stored = None
        part.timestamp_us, part.protocol, part.sender = time_us, protocol or "", sender or ""
        start = stop
        yield part


def copied_topics(source: Log, chosen: Sequence[str] = ()) -> list[str]:
    """The topics to copy: these, or all but system topics.

    Raises UsageError `topic.unknown`; StorageError `log.frozen`, one of them is damaged.
    """
    for topic in chosen:
        source.bounds(topic)
    topics = list(chosen) or [one for one in source.topics() if not names.is_reserved(one)]
    for topic in topics:
        if topic in source.frozen:
            raise source.frozen[topic].copy()
    return sorted(topics)


def copy_topic(
    topic: str,
    source: Log,
    target: CopyTarget,
    *,
    payload: Payload | None = None,
    progress: Progress = lambda topic, messages: None,
) -> CopiedTopic:
    """Copy a topic, or its missing messages, and compare both sides.

    Raises UsageError `topic.exists`, `log.too-large`; StorageError `log.damaged`, they differ.
    """
    bounds = source.bounds(topic)
    done = target.messages_in(topic, bounds)
    if done is None:
        target.create(topic, bounds, source.settings(topic))
        done = 0
    messages = TopicMessages(source, topic, payload)
    progress(topic, done)
    for batch in messages.read(done):
        target.log.append(batch)
        if target.log.pending_bytes > PENDING_BYTES_MAX:
            target.log.sync()
        progress(topic, len(batch))
    target.log.sync()
    expected = messages.digest(progress)
    found = TopicMessages(target.log, topic).digest(progress)
    if found != expected:
        text = f"topic {topic!r}: the copy has {found[0]:,} messages, the source {expected[0]:,}"
        if found[0] == expected[0]:
            text = f"topic {topic!r}: the copy has other messages than the source"
        raise StorageError("log.damaged", f"{text}; delete the topic in the target and copy again")
    copied = target.log.bounds(topic)
    same = copied == bounds and copied.stop - copied.start == expected[0]
    return CopiedTopic(topic, expected[0], copied.epoch, copied.start, same)


class PayloadsInFiles:
    """Reads the blobs of a data folder, up to the largest message of the target."""

    def __init__(self, data: Path, bytes_max: int) -> None:
        self._data = data
        self._bytes_max = bytes_max

    def of(self, topic: str) -> Payload:
        folder = blobs_folder(self._data, layout.owner_of(self._data, topic))

        def payload(reference: references.Reference) -> bytes:
            if reference.size > self._bytes_max:
                text = f"topic {topic!r}: a payload of {reference.size:,} bytes is over"
                text = f"{text} {self._bytes_max:,} bytes (limits.message-bytes-max)"
                raise UsageError("log.too-large", text)
            return BlobReader(folder / reference.id).read(0, reference.size)

        return payload


class FilesTarget:
    """A data folder. It assigns its own epochs, so a file says which topics are copies.

    Order of writes:

        1. the file, with all topics that are to be copied
        2. a topic, unless one without messages exists
        3. the file, with the epoch of the topic
        4. its messages; then 2 to 4 for the next topic
        5. the file without the topics that were chosen, or its removal if it has no other, or if
           all topics of the source were copied

    A crash between 2 and 3 leaves a topic without messages. While the file exists, no bus starts on
    the folder (`check_copied`): it would show a part of the messages, and add others.
    """

    def __init__(self, data: Path, log: Log) -> None:
        self.log = log
        self._path = data / NOTE
        self._disk = Disk()
        self._topics = dict(_read_note(data).topics)

    def begin(self, topics: Mapping[str, Bounds]) -> None:
        """Record the topics that are to be copied, with their bounds in the source.

        Raises UsageError `topic.exists` if one has other messages; then nothing is recorded.
        """
        for topic, source in topics.items():
            self._own_bounds(topic, source)
        for topic, source in topics.items():
            self._topics.setdefault(topic, CopiedEpochs(source.epoch))
        self._write()

    def _own_bounds(self, topic: str, source: Bounds) -> Bounds | None:
        """The bounds of the copy; None if there is none yet. Raises UsageError `topic.exists`."""
        if topic not in self.log.topics():
            return None
        bounds = self.log.bounds(topic)
        if bounds.stop and self._topics.get(topic) != CopiedEpochs(source.epoch, bounds.epoch):
            raise not_a_copy(topic)
        return bounds

    def messages_in(self, topic: str, source: Bounds) -> int | None:
        bounds = self._own_bounds(topic, source)
        if bounds is None:
            return None
        if bounds.stop == 0:
            self._add(topic, source, bounds)
        return bounds.stop - bounds.start

    def create(self, topic: str, source: Bounds, settings: TopicSettings) -> None:
        self._add(topic, source, self.log.create_topic(topic, settings))

    def _add(self, topic: str, source: Bounds, own: Bounds) -> None:
        self._topics[topic] = CopiedEpochs(source.epoch, own.epoch)
        self._write()

    def finish(self, topics: Sequence[str] = ()) -> None:
        """Mark topics as copied, or all of them. They become usable when every topic is copied.

        The file may name a topic that an earlier copy began and that the source no longer has.
        """
        for topic in topics or list(self._topics):
            self._topics.pop(topic, None)
        self._write()

    def _write(self) -> None:
        if self._topics:
            replace_file(self._path, checked_json.encode(CopyMetadata(self._topics)), self._disk)
        else:
            self._disk.unlink(self._path)
            self._disk.sync_folder(self._path.parent)


NOTE = "migration.json"


class CopiedEpochs(msgspec.Struct, frozen=True, rename="kebab"):
    """The epochs of a copied topic in the source and in the target; 0 before it exists."""

    source: int
    target: int = 0


class CopyMetadata(msgspec.Struct, frozen=True):
    """The topics of an unfinished copy."""

    topics: dict[str, CopiedEpochs]


def _read_note(data: Path) -> CopyMetadata:
    return checked_json.read(data / NOTE, CopyMetadata) or CopyMetadata({})


def check_copied(data: Path) -> None:
    """Raises StorageError `migrate.incomplete` if the folder lacks messages of its source."""
    missing = sorted(_read_note(data).topics)
    if missing:
        text = f"{data} is the target of an unfinished `polybus migrate`: {', '.join(missing)}"
        raise StorageError("migrate.incomplete", f"{text}; run the same command again")


def not_a_copy(topic: str) -> PolybusError:
    text = f"the topic {topic!r} exists in the target and is not a copy of this source"
    return UsageError("topic.exists", f"{text}; delete it there, or leave it out with --topic")
