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


def take_batches(batches, logs):
    """Give each batch its log's epoch and next offsets, and put it at the end of the log's tail."""
    cdef Batch batch
    cdef int64_t stop
    if len(batches) != len(logs):
        raise ValueError("as many batches as logs")
    for batch, log in zip(batches, logs):
        stop = log.stop
        batch.epoch = log.epoch
        batch.first_offset = stop
        if len(batch.spans) == 0:
            continue
        # The tail before `stop`: whoever sees the new end finds the messages.
        log.tail.append(batch)
        log.stop = stop + len(batch.spans) // 2


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
