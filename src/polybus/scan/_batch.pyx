# cython: boundscheck=False, wraparound=False, cdivision=True
"""Batch, and the bus's loops over many batches, compiled. Contract and twin: batch_py.py."""

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


# Thousands of batches exist and never form reference cycles, so the collector need not visit them.
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
        """Build a batch from separate values, for slow paths and tests."""
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
        """The total size of the values."""
        return bytes_of(self.spans)

    @property
    def last_offset(self):
        return self.first_offset + len(self.spans) // 2 - 1

    def value(self, Py_ssize_t index):
        return bytes(self.buffer[self.spans[2 * index] : self.spans[2 * index + 1]])

    def values(self):
        """Each value as bytes, for callers that need single messages."""
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
        """The batch in a protocol's bytes; all subscribers share one encoding."""
        # A local name, because another thread may call `forget_encodings` meanwhile.
        cdef dict encodings = self._encodings
        if encodings is None:
            encodings = self._encodings = {}
        encoding = encodings.get(protocol)
        if encoding is None:
            encoding = encodings[protocol] = encode(self)
        return encoding

    def forget_encodings(self):
        """Drop the cached encodings. Thread-safe."""
        self._encodings = None

    def carry_encoding(self, protocol, encoding):
        """Use the bytes that the batch arrived in as its encoding in that protocol."""
        if self._encodings is None:
            self._encodings = {}
        self._encodings[protocol] = encoding


def weigh(batches, int64_t message_bytes, int64_t batch_bytes):
    """The size of all values, plus a fixed cost for each message and each batch."""
    cdef Batch batch
    cdef int64_t total = 0
    for batch in batches:
        total += bytes_of(batch.spans) + (len(batch.spans) // 2) * message_bytes + batch_bytes
    return total


cdef class Flow:
    """Counts messages and their bytes."""

    def __init__(self, int64_t messages=0, int64_t value_bytes=0):
        self.messages = messages
        self.value_bytes = value_bytes


def find_topics(batches, dict topics not None, int64_t now_us):
    """Set each batch's timestamp and return its topic; None if a topic does not exist."""
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
    """Add each batch to the incoming traffic of its topic and protocol."""
    cdef Batch batch
    cdef Flow flow
    cdef dict taken
    if len(batches) != len(topics):
        raise ValueError("batches and topics must have the same length")
    for batch, topic in zip(batches, topics):
        taken = topic.taken
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
    """How many receipts the batches request: one per id; a request without ids counts as one."""
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
