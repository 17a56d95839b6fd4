"""C types of handling.py, which is compiled as it is."""

cimport cython

from polybus.edges.tcp.outbox cimport Outbox, Outboxes
from polybus.edges.tcp.transport cimport SocketTransport, ReadInterceptor
from polybus.scan.batch cimport Batch

@cython.final
cdef class ReadHandler:
    cdef public Py_ssize_t small_messages
    cdef public bint single_came
    cdef object _bus
    cdef Outboxes _outboxes
    cdef object _lane_of
    cdef list _lane_boxes
    cdef object _lane_account

    cpdef forget(self)
    @cython.locals(
        transport=SocketTransport, start=Py_ssize_t, stop=Py_ssize_t, end=Py_ssize_t, run=list,
        run_stop=Py_ssize_t, batches=list,
    )
    cpdef handle(self, list pieces, data, Py_ssize_t first)
    @cython.locals(taker=ReadInterceptor)
    cdef bint _is_taken(
        self, SocketTransport transport, data, Py_ssize_t start, Py_ssize_t stop
    ) except -1
    @cython.locals(batches=list, batch=Batch)
    cdef tuple _scan(
        self, SocketTransport transport, codec, data, Py_ssize_t start, Py_ssize_t stop
    )
    @cython.locals(
        transport=SocketTransport, batches=list, everything=list, batch=Batch, lane=list,
        renames=bint, as_shown=bint, topics=list,
    )
    cdef _publish(self, list run, data)
    @cython.locals(outbox=Outbox, start=Py_ssize_t)
    cdef _write(self, list lane, list run, list batches, data, publisher)
    cdef _append(self, list batches, list topics, publisher)
    cdef _publish_one(self, tuple read, data, bint as_shown)
    @cython.locals(found=list)
    cdef list _lane(self, tuple subscribers, access)

cpdef drop(SocketTransport transport)
