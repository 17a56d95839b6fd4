"""C types of batch.py, which is compiled as it is, and what only the compiled scanners call."""

cimport cython
from cpython cimport array
from libc.stdint cimport int64_t

from polybus.scan._bytes cimport (
    add_entry, append_long, bytes_of, count_filled, count_of, field,
)

cdef array.array LONGS


@cython.final
cdef class Batch:
    cdef public object topic
    cdef public object buffer
    cdef public array.array spans
    cdef public object keys
    cdef public object headers
    cdef public array.array receipt_ids
    cdef public object protocol
    cdef public object sender
    cdef public int64_t timestamp_us
    cdef public int64_t epoch
    cdef public int64_t first_offset
    cdef public object stored
    # Public, because in tests the loops also run uncompiled, on compiled batches.
    cdef public dict _encodings

    cdef void _begin(self, topic, buffer, array.array spans) noexcept
    cpdef bytes value(self, Py_ssize_t index)
    @cython.locals(part=Batch)
    cpdef Batch slice(self, Py_ssize_t start, Py_ssize_t stop)


@cython.locals(batch=Batch)
cdef Batch new_batch(object topic, object buffer, array.array spans)


cdef class Traffic:
    cdef public int64_t messages
    cdef public int64_t value_bytes

    cpdef add(self, int64_t messages, int64_t value_bytes)


@cython.locals(batch=Batch, total=int64_t)
cpdef weigh(batches, int64_t message_bytes, int64_t batch_bytes)

@cython.locals(batch=Batch, found=list)
cpdef find_topics(batches, dict topics, int64_t now_us)

@cython.locals(batch=Batch, traffic=Traffic, taken=dict)
cpdef count_taken(batches, topics)

@cython.locals(batch=Batch, total=Py_ssize_t)
cpdef count_receipts(batches)


cdef class TopicEnd:
    cdef public int64_t epoch
    cdef public int64_t stop
    cdef public object tail
    cdef public object frozen
    cdef public object places
    cdef object _segment
    cdef array.array _entries

    cdef array.array _entries_in(self, segment)


@cython.final
cdef class _Run:
    cdef Batch first
    cdef list others
    cdef int64_t count
    cdef int64_t earliest
    cdef int64_t latest


@cython.locals(run=_Run)
cdef _Run _new_run(Batch batch)

@cython.locals(batch=Batch, end=TopicEnd, found=list)
cpdef find_ends(batches, dict ends)

@cython.locals(batch=Batch, end=TopicEnd, taken=list)
cpdef take_batches(batches, ends, int64_t now_us)

@cython.locals(batch=Batch, end=TopicEnd, weight=int64_t, reads=list, tails=list)
cpdef keep_batches(batches, dict ends, last_owner, int64_t batch_bytes, extra_bytes)

@cython.locals(tails=list, weight=int64_t)
cpdef drop_oldest(reads, int64_t total, int64_t total_max, Py_ssize_t count_max)

@cython.locals(groups=list, group=list, batches=list, weight=int64_t, added=int64_t, _=Py_ssize_t)
cpdef take_groups(queue, int64_t weight_max)

@cython.locals(
    batch=Batch, run=_Run, runs=dict, row=int64_t, ordered=list, topics=list,
    names=list, firsts=array.array, rows=array.array,
)
cpdef rows_by_topic(batches, kind, account)

@cython.locals(batch=Batch)
cpdef bint have_extras(batches)

@cython.locals(end=TopicEnd, epoch=int64_t)
cpdef add_places(parts, dict ends, segment, int64_t position, int64_t size)
