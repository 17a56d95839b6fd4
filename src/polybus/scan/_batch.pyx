# cython: boundscheck=False, wraparound=False, cdivision=True
"""Batch and the loops over many batches, compiled. Contract and twin: batch_py.py."""

cimport cython
from cpython cimport array
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport int64_t

import array
from collections import deque

cdef array.array LONGS = array.array("q")


cdef int64_t bytes_of(array.array spans) noexcept:
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index, count = len(spans)
    cdef int64_t total = 0
    for index in range(0, count - 1, 2):
        total += at[index + 1] - at[index]
    return total


cdef Batch new_batch(object topic, object buffer, array.array spans):
    cdef Batch batch = Batch.__new__(Batch)
    batch.topic = topic
    batch.buffer = buffer
    batch.spans = spans
    batch.protocol = batch.sender = ""
    batch.first_offset = -1
    return batch


# Batches come by the thousand and never refer to one another, so no collector need look at them.
@cython.no_gc
@cython.freelist(256)
cdef class Batch:
    """Messages of one topic, in order."""

    def __init__(self, topic, buffer, array.array spans not None):
        self.topic = topic
        self.buffer = buffer
        self.spans = spans
        self.protocol = self.sender = ""
        self.first_offset = -1

    @classmethod
    def of(cls, topic, values, *, headers=None, keys=None):
        """Build a batch from separate values: for slow paths and tests."""
        spans = array.array("i")
        end = 0
        for value in values:
            spans.append(end)
            end += len(value)
            spans.append(end)
        cdef Batch batch = cls(topic, b"".join(values), spans)
        if headers is not None and any(headers):
            batch.headers = headers
        if keys is not None and any([key is not None for key in keys]):
            batch.keys = keys
        return batch

    def __len__(self):
        return len(self.spans) // 2

    def __repr__(self):
        return f"<Batch {self.topic!r} {self.epoch}:{self.first_offset} of {len(self)}>"

    @property
    def value_bytes(self):
        """The size of all values together."""
        return bytes_of(self.spans)

    @property
    def last_offset(self):
        return self.first_offset + len(self.spans) // 2 - 1

    def value(self, Py_ssize_t index):
        return bytes(self.buffer[self.spans[2 * index] : self.spans[2 * index + 1]])

    def values(self):
        """Each value as bytes: for protocols and callers that must look at single messages."""
        view = memoryview(self.buffer)
        spans = self.spans
        for index in range(0, len(spans), 2):
            yield bytes(view[spans[index] : spans[index + 1]])

    def slice(self, Py_ssize_t start, Py_ssize_t stop):
        """Messages `start` to `stop` (exclusive) as a batch over the same buffer."""
        cdef object spans = self.spans
        cdef Batch part = new_batch(self.topic, self.buffer, spans[2 * start : 2 * stop])
        part.keys = None if self.keys is None else self.keys[start:stop]
        part.headers = None if self.headers is None else self.headers[start:stop]
        part.protocol = self.protocol
        part.sender = self.sender
        part.timestamp_us = self.timestamp_us
        part.epoch = self.epoch
        if self.first_offset >= 0:
            part.first_offset = self.first_offset + start
        if self.stored is not None:
            part.stored = self.stored.slice(start, stop - start)
        return part

    def encoded(self, protocol, encode):
        """The batch in a protocol's bytes, made once however many subscribers there are."""
        # By a name of its own: another thread may forget the encodings meanwhile.
        cdef dict encodings = self._encodings
        if encodings is None:
            encodings = self._encodings = {}
        encoding = encodings.get(protocol)
        if encoding is None:
            encoding = encodings[protocol] = encode(self)
        return encoding

    def forget_encodings(self):
        """Let go of what `encoded` made; any thread may do so."""
        self._encodings = None

    def carry_encoding(self, protocol, encoding):
        """Remember the bytes the batch arrived in as its encoding in that protocol."""
        if self._encodings is None:
            self._encodings = {}
        self._encodings[protocol] = encoding


def weigh(batches, int64_t message_bytes, int64_t batch_bytes):
    """The values' bytes of all batches, and so much more for each message and each batch."""
    cdef Batch batch
    cdef int64_t total = 0
    for batch in batches:
        total += bytes_of(batch.spans) + (len(batch.spans) // 2) * message_bytes + batch_bytes
    return total


cdef class TopicEnd:
    """Where a topic's log ends, and the places of its commits."""

    def __init__(self, int64_t epoch, int64_t stop, places):
        self.epoch = epoch
        self.stop = stop
        self.tail = deque()
        self.places = places

    cdef array.array entries_in(self, segment):
        """The entries of its places in a segment, remembered for the next commit."""
        if self._segment is not segment:
            self._entries = self.places.in_segment(segment).entries
            self._segment = segment
        return self._entries


cdef class Flow:
    """So many messages and bytes."""

    def __init__(self, int64_t messages=0, int64_t value_bytes=0):
        self.messages = messages
        self.value_bytes = value_bytes


def find_ends(batches, dict ends not None):
    """The end of each batch's topic; None if one is not there or takes no writes."""
    cdef Batch batch
    cdef TopicEnd end
    cdef list found = []
    for batch in batches:
        end = ends.get(batch.topic)
        if end is None or end.frozen is not None:
            return None
        found.append(end)
    return found


def take_batches(batches, ends, int64_t now_us):
    """Give each batch its topic's epoch and next offsets, and put it at the end of the tail."""
    cdef Batch batch
    cdef TopicEnd end
    cdef list taken = []
    if len(batches) != len(ends):
        raise ValueError("as many batches as ends")
    for batch, end in zip(batches, ends):
        batch.epoch = end.epoch
        batch.first_offset = end.stop
        if batch.timestamp_us == 0:
            batch.timestamp_us = now_us
        if len(batch.spans) == 0:
            continue
        # The tail before `stop`: whoever sees the new end finds the messages.
        end.tail.append(batch)
        end.stop += len(batch.spans) // 2
        taken.append(batch)
    return taken


def find_topics(batches, dict topics not None, int64_t now_us):
    """Give each batch its time; the bus's topic of each, or None if one is not there."""
    cdef Batch batch
    cdef list found = []
    for batch in batches:
        batch.timestamp_us = now_us
        topic = topics.get(batch.topic)
        if topic is None:
            return None
        found.append(topic)
    return found


def count_taken(batches, topics):
    """Add each batch's messages and bytes to what came in by its topic and protocol."""
    cdef Batch batch
    cdef Flow flow
    cdef dict taken
    if len(batches) != len(topics):
        raise ValueError("as many batches as topics")
    for batch, topic in zip(batches, topics):
        taken = topic.traffic.taken
        flow = taken.get(batch.protocol)
        if flow is None:
            flow = taken[batch.protocol] = Flow()
        flow.messages += len(batch.spans) // 2
        flow.value_bytes += bytes_of(batch.spans)


def listen_alike(topics):
    """Whether all these topics have the same subscribers."""
    first = None
    for topic in topics:
        if first is None:
            first = topic.subscribers
        elif topic.subscribers != first:
            return False
    return True


def count_receipts(batches):
    """How many receipts the batches ask for: one for each id; a request without ids is one."""
    cdef Batch batch
    cdef const int* at
    cdef Py_ssize_t index, count, total = 0
    for batch in batches:
        if batch.receipt_ids is None:
            continue
        at = batch.receipt_ids.data.as_ints
        count = 0
        for index in range(0, len(batch.receipt_ids) - 1, 2):
            count += at[index + 1] > at[index]
        total += max(1, count)
    return total


def keep_batches(batches, dict ends not None, last_owner, int64_t batch_bytes, extra_bytes):
    """The tails that hold the batches, what they weigh, and the last read (see the twin)."""
    cdef Batch batch
    cdef TopicEnd end
    cdef int64_t total = 0
    cdef list tails = []
    for batch in batches:
        end = ends.get(batch.topic)
        if end is None or end.epoch != batch.epoch:
            continue
        batch._encodings = None
        total += batch_bytes + 4 * len(batch.spans)
        owner = batch.buffer
        if isinstance(owner, memoryview):
            owner = owner.obj or owner
        if owner is not last_owner:
            last_owner = owner
            total += memoryview(owner).nbytes
        if batch.keys is not None or batch.headers is not None:
            total += extra_bytes(batch)
        tails.append(end.tail)
    return tails, total, last_owner


def drop_oldest(tails):
    """Take the first batch off each tail."""
    for tail in tails:
        tail.popleft()


@cython.final
@cython.freelist(256)
cdef class Run:
    cdef Batch first
    cdef list others  # None: there is only the first
    cdef int64_t count
    cdef int64_t earliest
    cdef int64_t latest


cdef inline int add_to(Run run, Batch batch) except -1:
    run.count += len(batch.spans) // 2
    if batch.timestamp_us < run.earliest:
        run.earliest = batch.timestamp_us
    if batch.timestamp_us > run.latest:
        run.latest = batch.timestamp_us
    return 0


def rows_by_topic(batches, kind, account):
    """The batches ordered by topic and epoch, and what their rows are (see the twin)."""
    cdef dict runs = {}
    cdef Batch batch
    cdef Run run
    cdef int64_t row = 0
    cdef Py_ssize_t index = 0
    cdef list ordered = [], topics = [], names = []
    cdef array.array counts, firsts, rows
    for batch in batches:
        run = runs.get(batch.topic)
        key = batch.topic
        if run is not None and run.first.epoch != batch.epoch:
            # Deleted and made again within a commit.
            key = (batch.topic, batch.epoch)
            run = runs.get(key)
        if run is None:
            run = runs[key] = Run.__new__(Run)
            run.first = batch
            run.earliest = run.latest = batch.timestamp_us
        elif run.others is None:
            run.others = [batch]
        else:
            run.others.append(batch)
        add_to(run, batch)
    firsts = array.clone(LONGS, len(runs), zero=False)
    rows = array.clone(LONGS, len(runs), zero=False)
    for run in runs.values():
        batch = run.first
        names.append(batch.topic)
        firsts.data.as_longlongs[index] = batch.first_offset
        rows.data.as_longlongs[index] = run.count
        index += 1
        topics.append(
            tuple.__new__(
                kind,
                (
                    account, batch.topic, batch.epoch, batch.first_offset,
                    run.count, row, run.earliest, run.latest,
                ),
            )
        )
        row += run.count
        ordered.append(batch)
        if run.others is not None:
            ordered += run.others
    counts = array.clone(LONGS, len(ordered), zero=False)
    index = 0
    for batch in ordered:
        counts.data.as_longlongs[index] = len(batch.spans) // 2
        index += 1
    return ordered, counts, tuple(topics), (names, firsts, rows)


def merge_runs(batches, array.array counts not None):
    """Times, protocols and senders of the batches' rows, each as runs of equal values."""
    cdef Batch batch
    cdef Py_ssize_t index, time_runs = 0
    cdef int64_t count, time_us = 0
    cdef const long long* count_at = counts.data.as_longlongs
    cdef array.array times = array.clone(LONGS, len(counts), zero=False)
    cdef array.array time_counts = array.clone(LONGS, len(counts), zero=False)
    cdef list protocols = [], senders = []
    cdef array.array protocol_counts = array.array("q")
    cdef array.array sender_counts = array.array("q")
    protocol = sender = None
    if len(batches) != len(counts):
        raise ValueError("as many batches as counts")
    for index in range(len(counts)):
        batch = batches[index]
        count = count_at[index]
        if time_runs == 0 or batch.timestamp_us != time_us:
            time_us = batch.timestamp_us
            times.data.as_longlongs[time_runs] = time_us
            time_counts.data.as_longlongs[time_runs] = 0
            time_runs += 1
        time_counts.data.as_longlongs[time_runs - 1] += count
        if index == 0 or (batch.protocol is not protocol and batch.protocol != protocol):
            protocol = batch.protocol
            protocols.append(protocol)
            protocol_counts.append(0)
        protocol_counts.data.as_longlongs[len(protocol_counts) - 1] += count
        if index == 0 or (batch.sender is not sender and batch.sender != sender):
            sender = batch.sender
            senders.append(sender)
            sender_counts.append(0)
        sender_counts.data.as_longlongs[len(sender_counts) - 1] += count
    array.resize(times, time_runs)
    array.resize(time_counts, time_runs)
    return (times, time_counts), (protocols, protocol_counts), (senders, sender_counts)


def add_places(parts, dict ends not None, segment, int64_t position, int64_t size):
    """Enter a commit's rows into the places of their topics."""
    cdef int64_t latest
    cdef int64_t* entry
    cdef array.array entries
    cdef TopicEnd topic_end
    cdef Py_ssize_t end
    for part in parts:
        if not isinstance(part, tuple) or len(part) != 8:
            raise ValueError("a part is a tuple of eight")
        topic_end = ends.get(<object> PyTuple_GET_ITEM(part, 1))
        if topic_end is None or topic_end.epoch != <int64_t> <object> PyTuple_GET_ITEM(part, 2):
            continue
        entries = topic_end.entries_in(segment)
        latest = <object> PyTuple_GET_ITEM(part, 7)
        end = len(entries)
        if end and entries.data.as_longlongs[end - 1] > latest:
            latest = entries.data.as_longlongs[end - 1]
        array.resize_smart(entries, end + 6)
        entry = <int64_t*> entries.data.as_longlongs + end
        entry[0] = <object> PyTuple_GET_ITEM(part, 3)
        entry[1] = <object> PyTuple_GET_ITEM(part, 4)
        entry[2] = position
        entry[3] = size
        entry[4] = <object> PyTuple_GET_ITEM(part, 5)
        entry[5] = latest
