"""C types of message.py, which is compiled as it is."""

cimport cython
from cpython cimport array


cdef class GroupedRows:
    cdef list _batches
    cdef readonly tuple topics
    cdef tuple _runs
    cdef readonly Py_ssize_t count
    cdef list _accounts
    cdef array.array _account_counts
    cdef object _keys
    cdef object _headers
    cdef Py_ssize_t _value_bytes
    cdef bint _is_beside

    cdef dict nodes(self)
    cdef tuple write(self, Py_ssize_t start, room)
    cdef list pieces(self, target, Py_ssize_t start, Py_ssize_t body_bytes, array.array places)


cdef class _Header:
    cdef bytes _template
    cdef array.array _fields
    cdef array.array _nodes
    cdef Py_ssize_t _nodes_at
    cdef readonly Py_ssize_t size
    cdef readonly Py_ssize_t digits_at

    cdef Py_ssize_t write(
        self, target, bytes note, GroupedRows rows, array.array places
    ) except -1


cdef class MessageWriter:
    cdef object _scratch
    cdef dict _headers

    @cython.locals(header=_Header, places=array.array, body_bytes=Py_ssize_t)
    cpdef tuple write(self, GroupedRows rows, bytes note)
    @cython.locals(header=_Header)
    cdef _Header _header(self, Py_ssize_t note_bytes)
    # Called by the scanner, too.
    cpdef object _room(self, Py_ssize_t size)
