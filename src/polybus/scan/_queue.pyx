# cython: boundscheck=False, wraparound=False, cdivision=True
"""Queue messages, compiled. Contract and twin: queue_py.py."""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t

import array

from polybus.scan._bytes cimport check_scan, check_spans, get_int32, put, put_int32

cdef enum:
    LENGTH_BYTES = 4

cdef array.array INTS = array.array("i")


cdef inline bint complete(
    const uint8_t* base, int64_t start, int64_t stop, int64_t message_bytes_max
) noexcept nogil:
    """Whether a complete message within the limit begins at `start`."""
    cdef int64_t length
    if stop - start < LENGTH_BYTES:
        return False
    length = get_int32(base + start)
    return 0 <= length <= message_bytes_max and start + LENGTH_BYTES + length <= stop


def scan_queue(buffer, Py_ssize_t start, Py_ssize_t stop, int64_t message_bytes_max):
    """Scan `buffer[start:stop]`; return where it stopped, and the spans of the messages."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef Py_ssize_t end = start, count = 0, index
    cdef array.array spans
    cdef int* at
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        check_scan(&view, start, stop)
        base = <const uint8_t*> view.buf
        # Two passes over the lengths cost less than a growing table: they are in the cache.
        while complete(base, end, stop, message_bytes_max):
            end += LENGTH_BYTES + get_int32(base + end)
            count += 1
        spans = array.clone(INTS, 2 * count, zero=False)
        at = spans.data.as_ints
        for index in range(count):
            at[2 * index] = <int> (start + LENGTH_BYTES)
            start += LENGTH_BYTES + get_int32(base + start)
            at[2 * index + 1] = <int> start
        return end, spans
    finally:
        PyBuffer_Release(&view)


def split_queue(buffer, Py_ssize_t start, Py_ssize_t stop, int64_t message_bytes_max):
    """Like `scan_queue`, with each message as bytes."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef Py_ssize_t length
    cdef list messages = []
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        check_scan(&view, start, stop)
        base = <const uint8_t*> view.buf
        while complete(base, start, stop, message_bytes_max):
            length = get_int32(base + start)
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
    cdef int64_t total
    cdef int size
    cdef uint8_t* target
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        total = check_spans(&view, spans) + (count // 2) * LENGTH_BYTES
        encoded = PyBytes_FromStringAndSize(NULL, total)
        target = <uint8_t*> PyBytes_AS_STRING(encoded)
        for index in range(0, count - 1, 2):
            size = at[index + 1] - at[index]
            put_int32(target, <uint32_t> size)
            target = put(target + LENGTH_BYTES, <const char*> view.buf + at[index], size)
        return encoded
    finally:
        PyBuffer_Release(&view)


def join_queue(
    list messages not None, Py_ssize_t first, int64_t run_bytes_max, int64_t message_bytes_max
):
    """Encode a run of `messages` from `first` on; return where it ended, and its bytes."""
    cdef Py_ssize_t index, size, stop = first, count = PyList_GET_SIZE(messages)
    cdef int64_t total = 0
    cdef uint8_t* target
    if first < 0:
        raise IndexError("a run must begin inside its list")
    while stop < count:
        message = <object> PyList_GET_ITEM(messages, stop)
        if not isinstance(message, bytes):
            raise TypeError("a message must be bytes")
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
        put_int32(target, <uint32_t> size)
        target = put(target + LENGTH_BYTES, PyBytes_AS_STRING(message), size)
    return stop, run
