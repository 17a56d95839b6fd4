# cython: boundscheck=False, wraparound=False, cdivision=True
"""Batch and the loops over many batches, compiled. Contract and twin: batch_py.py."""

cimport cython
from cpython cimport array
from libc.stdint cimport int64_t

import array


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


def take_batches(batches, logs, int64_t now_us):
    """Give each batch its log's epoch and next offsets, and put it at the end of the log's tail."""
    cdef Batch batch
    cdef int64_t stop
    cdef list taken = []
    if len(batches) != len(logs):
        raise ValueError("as many batches as logs")
    for batch, log in zip(batches, logs):
        stop = log.stop
        batch.epoch = log.epoch
        batch.first_offset = stop
        if batch.timestamp_us == 0:
            batch.timestamp_us = now_us
        if len(batch.spans) == 0:
            continue
        # The tail before `stop`: whoever sees the new end finds the messages.
        log.tail.append(batch)
        log.stop = stop + len(batch.spans) // 2
        taken.append(batch)
    return taken


def count_taken(batches, flows):
    """Add each batch's messages and bytes to its flow."""
    cdef Batch batch
    if len(batches) != len(flows):
        raise ValueError("as many batches as flows")
    for batch, flow in zip(batches, flows):
        flow.messages += len(batch.spans) // 2
        flow.value_bytes += bytes_of(batch.spans)


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


def keep_batches(batches, logs, kept, last_owner, int64_t batch_bytes, extra_bytes):
    """Say of each batch in its log's tail what it weighs; return the sum, and the last buffer."""
    cdef Batch batch
    cdef int64_t weight, total = 0
    for batch in batches:
        log = logs.get(batch.topic)
        if log is None or log.epoch != batch.epoch:
            continue
        batch._encodings = None
        weight = batch_bytes + 4 * len(batch.spans)
        owner = batch.buffer
        if isinstance(owner, memoryview):
            owner = owner.obj or owner
        if owner is not last_owner:
            last_owner = owner
            weight += memoryview(owner).nbytes
        if batch.keys is not None or batch.headers is not None:
            weight += extra_bytes(batch)
        kept.append((log.tail, weight))
        total += weight
    return total, last_owner


@cython.final
cdef class Run:
    cdef list batches
    cdef Batch first
    cdef int64_t count
    cdef int64_t earliest
    cdef int64_t latest


def rows_by_topic(batches, kind, account):
    """The batches ordered by topic and epoch, the rows of each, and each topic's `kind`."""
    cdef dict runs = {}
    cdef Batch batch
    cdef Run run
    cdef int64_t row = 0
    cdef list ordered = [], counts = [], topics = []
    for batch in batches:
        key = (batch.topic, batch.epoch)
        run = runs.get(key)
        if run is None:
            run = runs[key] = Run()
            run.batches = []
            run.first = batch
            run.earliest = run.latest = batch.timestamp_us
        run.batches.append(batch)
        run.count += len(batch.spans) // 2
        run.earliest = min(run.earliest, batch.timestamp_us)
        run.latest = max(run.latest, batch.timestamp_us)
    for run in runs.values():
        batch = run.first
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
        ordered += run.batches
        for batch in run.batches:
            counts.append(len(batch.spans) // 2)
    return ordered, counts, tuple(topics)


def merge_runs(batches, counts):
    """Times, protocols and senders of the batches' rows, each as runs of equal values."""
    cdef list times = [], protocols = [], senders = []
    cdef Batch batch, first = None
    cdef int64_t time_rows = 0, protocol_rows = 0, sender_rows = 0, count
    cdef int64_t time_us = 0
    protocol = sender = None
    if len(batches) != len(counts):
        raise ValueError("as many batches as counts")
    for batch, count in zip(batches, counts):
        if first is None:
            first = batch
            time_us, protocol, sender = batch.timestamp_us, batch.protocol, batch.sender
        if batch.timestamp_us != time_us:
            times.append((time_us, time_rows))
            time_us, time_rows = batch.timestamp_us, 0
        if batch.protocol is not protocol and batch.protocol != protocol:
            protocols.append((protocol, protocol_rows))
            protocol, protocol_rows = batch.protocol, 0
        if batch.sender is not sender and batch.sender != sender:
            senders.append((sender, sender_rows))
            sender, sender_rows = batch.sender, 0
        time_rows += count
        protocol_rows += count
        sender_rows += count
    if first is not None:
        times.append((time_us, time_rows))
        protocols.append((protocol, protocol_rows))
        senders.append((sender, sender_rows))
    return times, protocols, senders


def add_places(parts, logs, segment, int64_t position, int64_t size):
    """Enter a commit's rows into the places of their topics."""
    cdef int64_t latest
    cdef int64_t* entry
    cdef array.array entries
    cdef Py_ssize_t end
    for part in parts:
        log = logs.get(part[1])
        if log is None or log.epoch != part[2]:
            continue
        entries = log.places.in_segment(segment).entries
        latest = part[7]
        end = len(entries)
        if end and entries.data.as_longlongs[end - 1] > latest:
            latest = entries.data.as_longlongs[end - 1]
        array.resize_smart(entries, end + 6)
        entry = <int64_t*> entries.data.as_longlongs + end
        entry[0] = part[3]
        entry[1] = part[4]
        entry[2] = position
        entry[3] = size
        entry[4] = part[5]
        entry[5] = latest
