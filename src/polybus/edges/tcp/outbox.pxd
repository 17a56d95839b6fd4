"""C types of outbox.py, which is compiled as it is."""

cimport cython


cdef class Outboxes:
    cdef public object policy
    cdef public Py_ssize_t bytes_max
    cdef public object ledger
    cdef public set congested
    cdef object _call_soon
    cdef object _memory
    cdef list _pending
    cdef list _pieces
    cdef object _joined
    cdef double _short_s
    cdef public bint in_turn

    cpdef flush_soon(self, Outbox outbox)
    cpdef flush(self)
    cpdef join(self, list pieces)


cdef class Outbox:
    cdef public object _write
    cdef public object _on_overflow
    cdef public Outboxes _shared
    cdef public object _ledger
    cdef Py_ssize_t _limit
    cdef public object _pending
    cdef public list _waiters
    cdef public list _drains
    cdef public object _written
    cdef object _lost
    cdef bint _scheduled
    cdef public Py_ssize_t bytes
    cdef public bint paused
    cdef public bint closed
    cdef public double patience_s
    cdef public double quiet_s

    cpdef send(self, data, batches=*, publisher=*)
    cpdef bint wants_wait(self)
    cpdef flush(self)
    cpdef put(self, data)
    cdef _put(self, data)
