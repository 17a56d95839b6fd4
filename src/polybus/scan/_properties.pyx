# cython: boundscheck=False, wraparound=False, cdivision=True
"""Boson properties, compiled. Contract and twin: properties_py.py."""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcmp

import array

from polybus.scan._bytes cimport (
    check_scan, check_spans, get_int32, put, put_decimal, put_int32,
)

cdef enum:
    LENGTH_BYTES = 4
    # A colon and two numbers of up to 19 digits.
    POSITION_BYTES_MAX = 39

cdef array.array INTS = array.array("i")


def scan_properties(
    buffer, Py_ssize_t start, Py_ssize_t stop, bytes head not None, int64_t value_bytes_max
):
    """Scan `buffer[start:stop]` for messages of `head` and one more value (see the twin)."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef const char* shared = PyBytes_AS_STRING(head)
    cdef Py_ssize_t head_bytes = len(head), value, count = 0, room = 0
    cdef int32_t length
    cdef array.array spans = array.clone(INTS, 0, zero=False)
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        check_scan(&view, start, stop)
        base = <const uint8_t*> view.buf
        while (
            stop - start >= head_bytes + LENGTH_BYTES
            and memcmp(base + start, shared, head_bytes) == 0
        ):
            value = start + head_bytes + LENGTH_BYTES
            length = get_int32(base + value - LENGTH_BYTES)
            if length < 0 or length > value_bytes_max or length > stop - value:
                break
            if count == room:
                room = 2 * room + 128
                array.resize(spans, room)
            start = value + length
            spans.data.as_ints[count] = <int> value
            spans.data.as_ints[count + 1] = <int> start
            count += 2
    finally:
        PyBuffer_Release(&view)
    array.resize(spans, count)
    return start, spans


def encode_properties(
    bytes head not None,
    bytes middle not None,
    buffer,
    array.array spans not None,
    int64_t epoch,
    int64_t first_offset,
):
    """Each span of `buffer` as a message: `head`, its position as a value, `middle`, its value."""
    cdef Py_buffer view
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index, size, count = len(spans)
    cdef Py_ssize_t head_bytes = len(head), middle_bytes = len(middle)
    cdef const char* before = PyBytes_AS_STRING(head)
    cdef const char* between = PyBytes_AS_STRING(middle)
    cdef int64_t total
    cdef uint8_t* target
    cdef uint8_t* position
    if epoch < 0 or first_offset < 0:
        raise ValueError("a message needs a position")
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        total = check_spans(&view, spans) + (count // 2) * (
            head_bytes + middle_bytes + 2 * LENGTH_BYTES + POSITION_BYTES_MAX
        )
        messages = bytearray(total)
        target = <uint8_t*> <char*> messages
        for index in range(0, count - 1, 2):
            position = put(target, before, head_bytes) + LENGTH_BYTES
            target = put_decimal(position, epoch)
            target[0] = c":"
            target = put_decimal(target + 1, first_offset + index // 2)
            put_int32(position - LENGTH_BYTES, <uint32_t> (target - position))
            target = put(target, between, middle_bytes)
            size = at[index + 1] - at[index]
            put_int32(target, <uint32_t> size)
            target = put(target + LENGTH_BYTES, <const char*> view.buf + at[index], size)
        return bytes(messages[: target - <uint8_t*> <char*> messages])
    finally:
        PyBuffer_Release(&view)
