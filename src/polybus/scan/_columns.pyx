# cython: boundscheck=False, wraparound=False, cdivision=True
"""Columns from spans and back, compiled. Contract and twin: columns_py.py."""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t

import array

from polybus.scan._bytes cimport Part, copy_parts

cdef array.array INTS = array.array("i")
cdef int64_t COLUMN_BYTES_MAX = 0x7FFFFFFF


def gather(buffers, spans):
    """Concatenate the spans of several buffers; return (values, int32 offsets)."""
    cdef Py_ssize_t rows = 0
    cdef int64_t total = measure(spans, &rows)
    values = PyBytes_FromStringAndSize(NULL, total)
    ends = PyBytes_FromStringAndSize(NULL, (rows + 1) * 4)
    copy_spans(buffers, spans, PyBytes_AS_STRING(values), <int32_t*> PyBytes_AS_STRING(ends))
    return values, ends


cdef int64_t measure(spans, Py_ssize_t* rows) except -1:
    """Count spans and bytes; refuse spans that are invalid in any buffer."""
    cdef array.array one
    cdef const int* at
    cdef Py_ssize_t index
    cdef int64_t total = 0
    for one in spans:
        rows[0] += len(one) // 2
        at = one.data.as_ints
        for index in range(0, len(one) - 1, 2):
            # Checked before memory is allocated by the total, which the copy relies on.
            if at[index] < 0 or at[index + 1] < at[index]:
                raise IndexError("a span is outside its buffer")
            total += at[index + 1] - at[index]
    if total > COLUMN_BYTES_MAX:
        raise OverflowError("a column holds at most 2 GiB")
    return total


cdef int copy_spans(buffers, spans, char* target, int32_t* ends) except -1:
    cdef Py_ssize_t parts = len(spans), held = 0, part, inside = 0
    cdef Part* all_parts = <Part*> PyMem_Malloc((parts + 1) * sizeof(Part))
    cdef array.array one
    if all_parts == NULL:
        raise MemoryError
    ends[0] = 0
    try:
        for part in range(parts):
            one = spans[part]
            all_parts[part].spans = one.data.as_ints
            all_parts[part].length = len(one) - 1
            PyObject_GetBuffer(buffers[part], &all_parts[part].view, PyBUF_SIMPLE)
            held += 1
        # The committer's thread runs this beside the event loop, in parallel without the GIL. It
        # is released only once, because acquiring it again may have to wait.
        with nogil:
            inside = copy_parts(all_parts, parts, target, ends + 1)
        if not inside:
            raise IndexError("a span is outside its buffer")
    finally:
        for part in range(held):
            PyBuffer_Release(&all_parts[part].view)
        PyMem_Free(all_parts)
    return 0


def spans_of_offsets(offsets, Py_ssize_t first, Py_ssize_t count):
    """The spans of `count` messages of a column from its int32 offsets, starting at `first`."""
    cdef Py_buffer view
    cdef array.array spans = array.clone(INTS, 2 * count, zero=False)
    cdef int* at = spans.data.as_ints
    cdef const int32_t* ends
    cdef Py_ssize_t index
    PyObject_GetBuffer(offsets, &view, PyBUF_SIMPLE)
    try:
        if first < 0 or count < 0 or (first + count + 1) * 4 > view.len:
            raise IndexError("the column has fewer offsets than messages")
        ends = <const int32_t*> view.buf + first
        for index in range(count):
            at[2 * index] = ends[index]
            at[2 * index + 1] = ends[index + 1]
    finally:
        PyBuffer_Release(&view)
    return spans
