# cython: boundscheck=False, wraparound=False, cdivision=True
"""Queue messages, the loops over every message, compiled. Contract and twin: queue_py.py."""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

import array

cdef enum:
    LENGTH_BYTES = 4

cdef array.array INTS = array.array("i")


cdef inline int32_t length_at(const uint8_t* at) noexcept nogil:
    return <int32_t> (
        (<uint32_t> at[0] << 24) | (<uint32_t> at[1] << 16) | (<uint32_t> at[2] << 8) | at[3]
    )


cdef inline void put_length(uint8_t* at, uint32_t length) noexcept nogil:
    at[0] = <uint8_t> (length >> 24)
    at[1] = <uint8_t> (length >> 16)
    at[2] = <uint8_t> (length >> 8)
    at[3] = <uint8_t> length


cdef inline bint complete(
    const uint8_t* base, int64_t start, int64_t stop, int64_t message_bytes_max
) noexcept nogil:
    """Whether a whole message within the limit stands at `start`."""
    cdef int64_t length
    if stop - start < LENGTH_BYTES:
        return False
    length = length_at(base + start)
    return 0 <= length <= message_bytes_max and start + LENGTH_BYTES + length <= stop


cdef int check(Py_buffer* view, Py_ssize_t start, Py_ssize_t stop) except -1:
    if stop > 0x7FFFFFFF:
        raise OverflowError("a scan covers at most 2 GiB")
    if start < 0 or stop > view.len:
        raise IndexError("the scan lies outside its buffer")
    return 0


def scan_queue(buffer, Py_ssize_t start, Py_ssize_t stop, int64_t message_bytes_max):
    """Scan `buffer[start:stop]`; return where it stopped, and the spans of the messages it met."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef Py_ssize_t end = start, count = 0, index
    cdef array.array spans
    cdef int* at
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        check(&view, start, stop)
        base = <const uint8_t*> view.buf
        # Twice over the lengths costs less than a table that grows: they are in the cache.
        while complete(base, end, stop, message_bytes_max):
            end += LENGTH_BYTES + length_at(base + end)
            count += 1
        spans = array.clone(INTS, 2 * count, zero=False)
        at = spans.data.as_ints
        for index in range(count):
            at[2 * index] = <int> (start + LENGTH_BYTES)
            start += LENGTH_BYTES + length_at(base + start)
            at[2 * index + 1] = <int> start
        return end, spans
    finally:
        PyBuffer_Release(&view)


def split_queue(buffer, Py_ssize_t start, Py_ssize_t stop, int64_t message_bytes_max):
    """As `scan_queue`, with each message as bytes of its own."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef Py_ssize_t length
    cdef list messages = []
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        check(&view, start, stop)
        base = <const uint8_t*> view.buf
        while complete(base, start, stop, message_bytes_max):
            length = length_at(base + start)
            start += LENGTH_BYTES
            messages.append(PyBytes_FromStringAndSize(<const char*> base + start, length))
            start += length
        return start, messages
    finally:
        PyBuffer_Release(&view)


def encode_queue(buffer, array.array spans not None):
    """Each span of `buffer` as a message on the wire."""
    cdef Py_buffer view
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index, count = len(spans)
    cdef int64_t total = 0
    cdef int size
    cdef uint8_t* target
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        for index in range(0, count - 1, 2):
            if at[index] < 0 or at[index + 1] < at[index] or at[index + 1] > view.len:
                raise IndexError("a span lies outside its buffer")
            total += LENGTH_BYTES + at[index + 1] - at[index]
        encoded = PyBytes_FromStringAndSize(NULL, total)
        target = <uint8_t*> PyBytes_AS_STRING(encoded)
        for index in range(0, count - 1, 2):
            size = at[index + 1] - at[index]
            put_length(target, <uint32_t> size)
            memcpy(target + LENGTH_BYTES, <const char*> view.buf + at[index], size)
            target += LENGTH_BYTES + size
        return encoded
    finally:
        PyBuffer_Release(&view)


def join_queue(
    list messages not None, Py_ssize_t first, int64_t run_bytes_max, int64_t message_bytes_max
):
    """A run of `messages` from `first` on, as they go on the wire; return where it ended."""
    cdef Py_ssize_t index, size, stop = first, count = PyList_GET_SIZE(messages)
    cdef int64_t total = 0
    cdef uint8_t* target
    if first < 0:
        raise IndexError("a run begins inside its list")
    while stop < count:
        message = <object> PyList_GET_ITEM(messages, stop)
        if not isinstance(message, bytes):
            raise TypeError("a message is bytes")
        size = PyBytes_GET_SIZE(message)
        if size > message_bytes_max or total + LENGTH_BYTES + size > run_bytes_max:
            break
        total += LENGTH_BYTES + size
        stop += 1
    run = PyBytes_FromStringAndSize(NULL, total)
    target = <uint8_t*> PyBytes_AS_STRING(run)
    for index in range(first, stop):
        message = <object> PyList_GET_ITEM(messages, index)
        size = PyBytes_GET_SIZE(message)
        put_length(target, <uint32_t> size)
        memcpy(target + LENGTH_BYTES, PyBytes_AS_STRING(message), size)
        target += LENGTH_BYTES + size
    return stop, run
