# cython: boundscheck=False, wraparound=False, cdivision=True
"""Boson properties, the loops over every message, compiled. Contract and twin: properties_py.py."""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcmp, memcpy

import array

cdef enum:
    LENGTH_BYTES = 4
    # A colon and two numbers of up to 19 digits.
    POSITION_BYTES_MAX = 39

cdef array.array INTS = array.array("i")


cdef inline int32_t get_int32(const uint8_t* at) noexcept nogil:
    return <int32_t> (
        (<uint32_t> at[0] << 24) | (<uint32_t> at[1] << 16) | (<uint32_t> at[2] << 8) | at[3]
    )


cdef inline void put_int32(uint8_t* at, uint32_t number) noexcept nogil:
    at[0] = <uint8_t> (number >> 24)
    at[1] = <uint8_t> (number >> 16)
    at[2] = <uint8_t> (number >> 8)
    at[3] = <uint8_t> number


cdef inline Py_ssize_t put_decimal(uint8_t* at, int64_t number) noexcept nogil:
    cdef uint8_t digits[20]
    cdef Py_ssize_t size = 0, index
    while True:
        digits[size] = <uint8_t> (48 + number % 10)
        size += 1
        number //= 10
        if number == 0:
            break
    for index in range(size):
        at[index] = digits[size - 1 - index]
    return size


def scan_properties(
    buffer, Py_ssize_t start, Py_ssize_t stop, bytes head not None, int64_t value_bytes_max
):
    """Scan `buffer[start:stop]` for messages that are `head` and one more value."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef const char* shared = PyBytes_AS_STRING(head)
    cdef Py_ssize_t head_bytes = len(head), value, count = 0, room = 0
    cdef int32_t length
    cdef array.array spans = array.clone(INTS, 0, zero=False)
    if stop > 0x7FFFFFFF:
        raise OverflowError("a scan covers at most 2 GiB")
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        if start < 0 or stop > view.len:
            raise IndexError("the scan lies outside its buffer")
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
    cdef int64_t total = 0
    cdef uint8_t* target
    cdef uint8_t* position
    if epoch < 0 or first_offset < 0:
        raise ValueError("a message needs a position")
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        for index in range(0, count - 1, 2):
            if at[index] < 0 or at[index + 1] < at[index] or at[index + 1] > view.len:
                raise IndexError("a span lies outside its buffer")
            total += at[index + 1] - at[index]
        total += (count // 2) * (
            head_bytes + middle_bytes + 2 * LENGTH_BYTES + POSITION_BYTES_MAX
        )
        messages = bytearray(total)
        target = <uint8_t*> <char*> messages
        for index in range(0, count - 1, 2):
            memcpy(target, before, head_bytes)
            position = target + head_bytes + LENGTH_BYTES
            size = put_decimal(position, epoch)
            position[size] = c":"
            size += 1
            size += put_decimal(position + size, first_offset + index // 2)
            put_int32(target + head_bytes, <uint32_t> size)
            target = position + size
            memcpy(target, between, middle_bytes)
            target += middle_bytes
            size = at[index + 1] - at[index]
            put_int32(target, <uint32_t> size)
            memcpy(target + LENGTH_BYTES, <const char*> view.buf + at[index], size)
            target += LENGTH_BYTES + size
        return bytes(messages[: target - <uint8_t*> <char*> messages])
    finally:
        PyBuffer_Release(&view)
