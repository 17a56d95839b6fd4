"""verify over Kafka: reads everything that the nodes stored in a cluster, and reports damage.

It fetches every RecordBatch of the registry, of the entries that nodes share and of all topics, and
checks its checksum, its records and its offsets. Every topic of the registry must exist under the
Kafka id of its record. It reads what the leaders have, up to the ends at its beginning, and writes
nothing, so nodes may run meanwhile. The caller checks the content of the messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from aiokafka.errors import for_code
from aiokafka.protocol.admin import DescribeConfigsRequest

from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.log.cluster_location import ClusterLocation
from polybus.log.interface import SHARED
from polybus.log.kafka.fetch_session import Followed
from polybus.log.kafka.following import AbortedRanges, fetch_bytes, from_offset
from polybus.log.kafka.kafka_names import REGISTRY, kafka_name
from polybus.log.kafka.link import ANSWER_TIMEOUT_S, EARLIEST, LATEST, KafkaLink
from polybus.log.kafka.reader import LEADER_S, PAGE_BYTES, shared_link
from polybus.log.kafka.record_batch import HEADER, Fetched, RecordFrame, decode_frame, frames
from polybus.log.kafka.registry import TOPIC_RESOURCE, TopicRecord, counts
from polybus.log.verify.verify import Damage, VerifyProgress, VerifyReport
from polybus.structs import decode

SYSTEM = (REGISTRY, SHARED)
"""The parts of a bus in Kafka other than its topics."""
LOOKS = 5
FETCH_S = 5.0
"""A fetch that fails for this long may request messages that no longer exist."""
NO_LEADER = "it has no leader that answers"
Look = Callable[[str, Batch], Iterable[tuple[int, str]]]
"""Returns the offsets of damaged messages, and why."""


@dataclass(slots=True)
class CheckedTopic:
    """A topic under one of Kafka's ids, with the position and the end of the check."""

    followed: Followed
    id: bytes
    stop: int
    is_compacted: bool

    @property
    def position(self) -> int:
        return self.followed.position


class ClusterCheck:
    """One check of a bus in Kafka."""

    def __init__(self, place: ClusterLocation, look: Look, progress: VerifyProgress | None) -> None:
        """Raises as `polybus.log.opening.open_reader`."""
        self._link: KafkaLink = shared_link(place)
        self._prefix = place.prefix
        self._place = place
        self._look = look
        self._progress = progress
        self._records: dict[str, TopicRecord] = {}
        self._report = VerifyReport(is_cluster=True)
        self._done = self._total = 0

    def run(self) -> VerifyReport:
        """Raises UsageError `data.not-found` if no node has used the cluster; StorageError."""
        self._link.run(self._link.refreshed())
        names = {one: self._prefix + one for one in SYSTEM}
        if names[REGISTRY] not in self._link.partitions:
            text = f"no node of polybus has used {self._place}; check the address and the prefix"
            raise UsageError("data.not-found", text)
        if names[SHARED] not in self._link.partitions:
            self._damaged(SHARED, "Kafka does not have it")
            del names[SHARED]
        system = self._planned(names)
        for one in system:
            self._check(one)
        registry = next((one for one in system if one.followed.topic == REGISTRY), None)
        if registry is None:
            self._damaged(REGISTRY, "no topic of the bus can be checked without it")
            return self._report
        live = self._live(registry)
        for topic in live:
            self._report.count(topic, topics=1)
        for one in self._planned({one: kafka_name(one, self._prefix) for one in live}):
            self._check(one)
        return self._report

    def _live(self, registry: CheckedTopic) -> list[str]:
        """The existing topics, sorted; one that Kafka does not have is damage."""
        missing: dict[tuple[str, str], str] = {}
        for tries in range(LOOKS):
            # Nodes create and delete topics meanwhile, and brokers learn of them at different
            # times. A new topic is in Kafka before it is in the registry, and is removed from Kafka
            # last.
            self._read_on(registry)
            self._link.run(self._link.refreshed(tries))
            before, missing = missing, self._missing()
            if not missing:
                break
        for (topic, found), reason in missing.items():
            if (topic, found) in before:
                self._damaged(topic, reason)
            else:
                self._note(f"topic {topic!r} was created or deleted meanwhile")
        live = {one.topic for one in self._records.values() if not one.deleted}
        return sorted(live - {topic for topic, _ in missing})

    def _read_on(self, registry: CheckedTopic) -> None:
        """Read what nodes have added since; without a leader, use the earlier state."""
        name = registry.followed.name
        registry.stop = max(registry.stop, self._offsets([name], LATEST)[0].get(name, 0))
        self._check(registry)

    def _planned(self, names: dict[str, str]) -> list[CheckedTopic]:
        # A topic that is recreated from now on has another id.
        kafka, states = list(names.values()), self._link.partitions
        starts, silent = self._offsets(kafka, EARLIEST)
        stops, silent_later = self._offsets(list(starts), LATEST)
        silent |= silent_later
        compacted = self._compacted(names)
        found = []
        for topic, name in names.items():
            self._note_replicas(topic, name)
            state = states.get(name)
            if state is not None and name in starts and name in stops:
                followed = Followed(topic, name, 0, starts[name])
                is_compacted = name in compacted
                found.append(CheckedTopic(followed, state.topic_id, stops[name], is_compacted))
                self._total += stops[name] - starts[name]
            elif name in silent:
                self._damaged(topic, NO_LEADER)
            else:
                self._note(f"topic {topic!r} was deleted meanwhile")
        return found

    def _offsets(self, names: list[str], when: int) -> tuple[dict[str, int], set[str]]:
        """As the link's `offsets_known`."""
        return self._link.run(self._link.offsets_known(names, when), 2 * ANSWER_TIMEOUT_S)

    def _compacted(self, names: dict[str, str]) -> set[str]:
        """The Kafka topics from which records in the middle are removed."""
        if not names:
            return set()
        topics = {name: topic for topic, name in names.items()}
        resources = [(TOPIC_RESOURCE, name, ["cleanup.policy"]) for name in topics]
        answer = self._link.run(self._link.ask(DescribeConfigsRequest(resources)))
        found = set()
        for error, _, _, name, entries in answer.resources:
            if error:
                reason = f"Kafka does not show its settings ({for_code(error).__name__})"
                self._note(f"topic {topics[name]!r}: {reason}, so it is not checked for gaps")
            if error or any("compact" in (value or "") for _, value, *_ in entries):
                found.add(name)
        return found

    def _missing(self) -> dict[tuple[str, str], str]:
        """The topics whose record has an id that Kafka lacks; and the state of the others."""
        found = {}
        for topic, record in self._records.items():
            state = self._link.partitions.get(kafka_name(topic, self._prefix))
            if record.deleted or (state is not None and state.topic_id.hex() == record.id):
                continue
            found[topic, record.id] = "Kafka does not have it"
            if state is not None:
                text = f"Kafka has another topic of this name than the registry: id {record.id}"
                found[topic, record.id] = f"{text} is gone"
        return found

    def _note_replicas(self, topic: str, name: str) -> None:
        state = self._link.partitions.get(name)
        if state is not None and state.insync < state.replicas:
            self._note(f"topic {topic!r}: {state.insync} of {state.replicas} replicas are in sync")

    # One topic

    def _check(self, one: CheckedTopic) -> None:
        silent_at_s = time.monotonic() + LEADER_S
        while one.position < one.stop:
            before, error = one.position, None
            try:
                self._check_page(one)
            except LookupError:
                # Retention removed the first messages meanwhile.
                name = one.followed.name
                start = self._offsets([name], EARLIEST)[0].get(name, before)
                one.followed.position = max(before, start)
            except StorageError as caught:
                error = caught
                if error.code == "log.damaged":
                    self._lost(one, one.stop, error.text)
            if one.position == before:
                self._stand(one, error, is_last=time.monotonic() > silent_at_s)
            else:
                silent_at_s = time.monotonic() + LEADER_S
            self._done += one.position - before
            if self._progress is not None:
                self._progress(f"topic {one.followed.topic}", self._done, self._total)

    def _stand(self, one: CheckedTopic, error: StorageError | None, *, is_last: bool) -> None:
        """Handle an empty page: check that the topic still exists and still has its end.

        A new leader may not know yet that all replicas have its last messages: they count as lost
        only if this persists (`is_last`).
        """
        name, text = one.followed.name, f"topic {one.followed.topic!r} was"
        self._link.run(self._link.refreshed())
        state = self._link.partitions.get(name)
        if state is None or state.topic_id != one.id:
            self._note(f"{text} {'deleted' if state is None else 'recreated'} meanwhile")
            one.followed.position = one.stop
        elif is_last:
            stop = self._offsets([name], LATEST)[0].get(name)
            if stop is None:
                self._lost(one, one.stop, NO_LEADER)
            elif stop < one.stop:
                self._lost(one, one.stop, f"its end is missing: it ends before offset {stop}")
            elif error is not None:
                self._lost(one, one.stop, error.text)
            elif not one.is_compacted:
                self._lost(one, one.stop, "Kafka gives no messages for these offsets")
            # The last records of a compacted topic may be removed.
            one.followed.position = one.stop

    def _check_page(self, one: CheckedTopic) -> None:
        deadline = time.monotonic() + FETCH_S
        fetching = fetch_bytes(self._link, one.followed, one.position, PAGE_BYTES, deadline)
        data, aborted = self._link.run(fetching, 2 * LEADER_S)
        ranges = AbortedRanges(aborted)
        before = one.position
        page = list(frames(data))
        for number, frame in enumerate(page):
            if one.position >= one.stop:
                break
            # A fetch may begin before its offset, in the middle of a RecordBatch.
            is_first = one.position == before
            if frame.next_offset > before or not is_first:
                limit = _next_begin(one, page, number + 1)
                self._check_frame(one, frame, ranges, limit=limit, is_first=is_first)
            self._report.bytes += len(frame.data)
        if data and one.position == before:
            behind = one.stop
            if len(data) >= HEADER.size:
                whole = RecordFrame(memoryview(data), HEADER.unpack_from(data))
                behind = _behind(one, whole, one.stop)
            self._lost(one, behind, "the bytes there are not a RecordBatch")

    def _check_frame(
        self,
        one: CheckedTopic,
        frame: RecordFrame,
        ranges: AbortedRanges,
        *,
        limit: int,
        is_first: bool,
    ) -> None:
        """`limit` is where the next RecordBatch begins, or where the check of the topic ends."""
        topic, position = one.followed.topic, one.position
        if frame.first_offset >= limit:
            if one.is_compacted and limit == one.stop:
                one.followed.position = limit
            else:
                # The checksum does not cover the offset.
                reason = "messages are missing, or the offset of their RecordBatch is wrong"
                self._lost(one, limit, reason)
            return
        if frame.first_offset > position and not one.is_compacted:
            self._lost(one, frame.first_offset, "messages are missing before the next RecordBatch")
        if frame.first_offset < position and not is_first:
            reason = "its offsets repeat those before it"
            self._damaged(topic, reason, frame.first_offset, frame.next_offset - 1)
            return
        try:
            fetched = decode_frame(topic, frame)
            _check_offsets(frame, fetched, one.is_compacted)
        except (StorageError, ValueError) as error:
            text = error.text if isinstance(error, StorageError) else str(error)
            self._lost(one, _behind(one, frame, limit), text)
            return
        if not ranges.hides(fetched):
            for batch in from_offset(fetched.batches, position, 0):
                self._take(topic, batch)
        one.followed.position = frame.next_offset

    def _take(self, topic: str, batch: Batch) -> None:
        if topic == REGISTRY:
            self._read_records(batch)
            return
        for offset, reason in self._look(topic, batch):
            self._damaged(topic, reason, offset, offset)
        if topic not in SYSTEM:
            self._report.count(topic, messages=len(batch))

    def _read_records(self, batch: Batch) -> None:
        for offset, value in enumerate(batch.values(), batch.first_offset):
            try:
                record = decode(value, TopicRecord)
            except msgspec.MsgspecError as error:
                self._damaged(REGISTRY, f"it is not the record of a topic: {error}", offset, offset)
                continue
            if counts(record, self._records.get(record.topic)):
                self._records[record.topic] = record

    def _lost(self, one: CheckedTopic, stop: int, reason: str) -> None:
        """Messages cannot be read: the check continues after them."""
        self._damaged(one.followed.topic, reason, one.position, stop - 1)
        one.followed.position = max(one.position, stop)

    def _damaged(
        self, topic: str, reason: str, first: int | None = None, last: int | None = None
    ) -> None:
        file = kafka_name(topic, self._prefix) if topic not in SYSTEM else self._prefix + topic
        self._report.add(
            Damage(file=f"Kafka {file}", reason=reason, topic=topic, first=first, last=last)
        )

    def _note(self, text: str) -> None:
        self._report.notes.append(text)


def _next_begin(one: CheckedTopic, page: Sequence[RecordFrame], number: int) -> int:
    """The offset of the next RecordBatch, from an index on, that is possible; else the end."""
    # A page may have ten thousand, but usually the first one is the result.
    begins = (page[at].first_offset for at in range(number, len(page)))
    return next((begin for begin in begins if one.position < begin <= one.stop), one.stop)


def _behind(one: CheckedTopic, frame: RecordFrame, limit: int) -> int:
    """Where to continue after a RecordBatch that is damaged, perhaps in its header."""
    return frame.next_offset if one.position < frame.next_offset <= limit else limit


def _check_offsets(frame: RecordFrame, fetched: Fetched, is_compacted: bool) -> None:
    """Raises ValueError if the messages are not those that the header announces."""
    offset = frame.first_offset
    for batch in fetched.batches:
        if batch.first_offset < offset:
            raise ValueError(f"offset {batch.first_offset} is not above the one before it")
        offset = batch.last_offset + 1
    if offset > frame.next_offset:
        raise ValueError(f"offset {offset - 1} is beyond its last one")
    count = frame.next_offset - frame.first_offset
    if not is_compacted and frame.count != count:
        raise ValueError(f"it has {frame.count} messages for {count} offsets")
