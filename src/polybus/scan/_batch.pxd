from cpython cimport array
from libc.stdint cimport int64_t


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
    cdef dict _encodings


cdef class Flow:
    cdef public int64_t messages
    cdef public int64_t value_bytes


cdef Batch new_batch(object topic, object buffer, array.array spans)
cdef int64_t bytes_of(array.array spans) noexcept
