# cython: boundscheck=False, wraparound=False, cdivision=True
"""Columns from spans and back, compiled. Contract and twin: columns_py.py."""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

import array

cdef array.array INTS = array.array("i")


def spans_bytes(array.array spans not None):
    """The total length of all spans."""
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index, count = len(spans)
    cdef int64_t total = 0
    for index in range(0, count - 1, 2):
        total += at[index + 1] - at[index]
    return total


def gather(buffers, spans):
    """Copy the spans of several buffers end to end; return (values, int32 offsets)."""
    cdef Py_ssize_t rows = 0, part, index, length
    cdef int64_t total = 0
    cdef array.array one
    cdef Py_buffer view
    cdef const char* source
    cdef char* target
    cdef int32_t* ends
    cdef const int* at
    cdef int32_t end = 0
    cdef int size
    cdef bint inside
    for one in spans:
        rows += len(one) // 2
        at = one.data.as_ints
        for index in range(0, len(one) - 1, 2):
            # Checked here, before anything is sized by it: the copy below trusts the total.
            if at[index] < 0 or at[index + 1] < at[index]:
                raise IndexError("a span lies outside its buffer")
            total += at[index + 1] - at[index]
    if total > 0x7FFFFFFF:
        raise OverflowError("a column holds at most 2 GiB")
    values = PyBytes_FromStringAndSize(NULL, total)
    offsets = PyBytes_FromStringAndSize(NULL, (rows + 1) * 4)
    target = PyBytes_AS_STRING(values)
    ends = <int32_t*> PyBytes_AS_STRING(offsets)
    ends[0] = 0
    ends += 1
    for part in range(len(spans)):
        one = spans[part]
        at = one.data.as_ints
        length = len(one) - 1
        PyObject_GetBuffer(buffers[part], &view, PyBUF_SIMPLE)
        source = <const char*> view.buf
        inside = True
        # The committer runs this beside the event loop: without the lock, they run at once.
        with nogil:
            for index in range(0, length, 2):
                size = at[index + 1] - at[index]
                if at[index + 1] > view.len:
                    inside = False
                    break
                memcpy(target, source + at[index], size)
                target += size
                end += size
                ends[0] = end
                ends += 1
        PyBuffer_Release(&view)
        if not inside:
            raise IndexError("a span lies outside its buffer")
    return values, offsets


def string_runs(runs):
    """A string column that repeats each value `count` times; return (values, int32 offsets)."""
    cdef Py_ssize_t rows = 0, count, index, size
    cdef int64_t total = 0
    cdef bytes value
    cdef char* target
    cdef const char* source
    cdef int32_t* ends
    cdef int32_t end = 0
    for value, count in runs:
        rows += count
        total += len(value) * count
    if total > 0x7FFFFFFF:
        raise OverflowError("a column holds at most 2 GiB")
    values = PyBytes_FromStringAndSize(NULL, total)
    offsets = PyBytes_FromStringAndSize(NULL, (rows + 1) * 4)
    target = PyBytes_AS_STRING(values)
    ends = <int32_t*> PyBytes_AS_STRING(offsets)
    ends[0] = 0
    ends += 1
    for value, count in runs:
        source = PyBytes_AS_STRING(value)
        size = len(value)
        with nogil:
            for index in range(count):
                memcpy(target, source, size)
                target += size
                end += <int32_t> size
                ends[index] = end
            ends += count
    return values, offsets


def offset_runs(runs):
    """An int64 column that counts up from each `first`, `count` times."""
    cdef Py_ssize_t rows = 0, count, index
    cdef int64_t first
    cdef int64_t* target
    for _, count in runs:
        rows += count
    column = PyBytes_FromStringAndSize(NULL, rows * 8)
    target = <int64_t*> PyBytes_AS_STRING(column)
    for first, count in runs:
        for index in range(count):
            target[index] = first + index
        target += count
    return column


def integer_runs(runs):
    """An int64 column that repeats each value `count` times."""
    cdef Py_ssize_t rows = 0, count, index
    cdef int64_t value
    cdef int64_t* target
    for _, count in runs:
        rows += count
    column = PyBytes_FromStringAndSize(NULL, rows * 8)
    target = <int64_t*> PyBytes_AS_STRING(column)
    for value, count in runs:
        for index in range(count):
            target[index] = value
        target += count
    return column


def spans_of_offsets(offsets, Py_ssize_t first, Py_ssize_t count):
    """The spans of `count` messages of a column, from its int32 offsets, beginning with `first`."""
    cdef Py_buffer view
    cdef array.array spans = array.clone(INTS, 2 * count, zero=False)
    cdef int* at = spans.data.as_ints
    cdef const int32_t* ends
    cdef Py_ssize_t index
    PyObject_GetBuffer(offsets, &view, PyBUF_SIMPLE)
    try:
        if first < 0 or count < 0 or (first + count + 1) * 4 > view.len:
            raise IndexError("more messages than offsets")
        ends = <const int32_t*> view.buf + first
        for index in range(count):
            at[2 * index] = ends[index]
            at[2 * index + 1] = ends[index + 1]
    finally:
        PyBuffer_Release(&view)
    return spans
