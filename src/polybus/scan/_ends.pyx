# cython: boundscheck=False, wraparound=False, cdivision=True
"""The log's loops over many batches, compiled. Contract and twin: ends_py.py."""

cimport cython
from cpython cimport array
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport int64_t

import array
from collections import deque

from polybus.scan._batch cimport Batch

cdef array.array LONGS = array.array("q")


cdef class TopicEnd:
    """The end of a topic's log and the index of its commits."""

    cdef public int64_t epoch
    cdef public int64_t stop
    cdef public object tail
    cdef public object frozen
    cdef public object places
    cdef object _segment
    cdef array.array _entries

    def __init__(self, int64_t epoch, int64_t stop, places):
        self.epoch = epoch
        self.stop = stop
        self.tail = deque()
        self.places = places

    def forget_entries(self):
        """Drop the cached index entries."""
        self._segment = self._entries = None

    cdef array.array entries_in(self, segment):
        """The index entries of a segment, cached for the next commit."""
        if self._segment is not segment:
            self._entries = self.places.in_segment(segment).entries
            self._segment = segment
        return self._entries


def find_ends(batches, dict ends not None):
    """The end of each batch's topic; None if a topic does not exist or is read-only."""
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
    """Assign each batch its topic's epoch and next offsets, and append it to the tail."""
    cdef Batch batch
    cdef TopicEnd end
    cdef list taken = []
    if len(batches) != len(ends):
        raise ValueError("batches and ends must have the same length")
    for batch, end in zip(batches, ends):
        batch.epoch = end.epoch
        batch.first_offset = end.stop
        if batch.timestamp_us == 0:
            batch.timestamp_us = now_us
        if len(batch.spans) == 0:
            continue
        # The tail before `stop`: a reader that sees the new end finds the messages.
        end.tail.append(batch)
        end.stop += len(batch.spans) // 2
        taken.append(batch)
    return taken


def keep_batches(batches, dict ends not None, last_owner, int64_t batch_bytes, extra_bytes):
    """For each read buffer the tails of its batches and its memory (see the twin)."""
    cdef Batch batch
    cdef TopicEnd end
    cdef int64_t weight = 0
    cdef list reads = [], tails = None
    for batch in batches:
        end = ends.get(batch.topic)
        if end is None or end.epoch != batch.epoch:
            continue
        batch._encodings = None
        owner = batch.buffer
        if isinstance(owner, memoryview):
            owner = owner.obj or owner
        if tails is None or owner is not last_owner:
            if tails is not None:
                reads.append((tails, weight))
            tails = []
            weight = 0 if owner is last_owner else memoryview(owner).nbytes
            last_owner = owner
        weight += batch_bytes + 4 * len(batch.spans)
        if batch.keys is not None or batch.headers is not None:
            weight += extra_bytes(batch)
        tails.append(end.tail)
    if tails is not None:
        reads.append((tails, weight))
    return reads, last_owner


def drop_oldest(tails):
    """Remove the first batch of each tail."""
    for tail in tails:
        tail.popleft()


@cython.final
@cython.freelist(256)
cdef class Run:
    cdef Batch first
    cdef list others  # None if there is only the first
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
    """The batches ordered by topic and epoch, with their rows (see the twin)."""
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
            # The topic was deleted and recreated within a commit.
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
    """Timestamps, protocols and senders of the batches' rows, each as runs of equal values."""
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
    if counts.typecode != "q":
        raise TypeError("counts must be in an array of type 'q' (64 bits)")
    if len(batches) != len(counts):
        raise ValueError("batches and counts must have the same length")
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
    """Add a commit to the index of each of its topics."""
    cdef int64_t latest
    cdef int64_t* entry
    cdef array.array entries
    cdef TopicEnd topic_end
    cdef Py_ssize_t end
    for part in parts:
        if not isinstance(part, tuple) or len(part) != 8:
            raise ValueError("a part must be a tuple of eight")
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
