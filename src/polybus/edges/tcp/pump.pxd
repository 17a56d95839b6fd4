"""C types of pump.py, which is compiled as it is."""

cimport cython
from libc.stdint cimport uint32_t

from polybus.edges.tcp.handling cimport ReadHandler, drop
from polybus.edges.tcp.outbox cimport Outboxes
from polybus.edges.tcp._sockets cimport Readiness, receive
from polybus.edges.tcp.transport cimport READABLE, SocketTransport, WRITABLE

@cython.final
cdef class Pump:
    cdef public object loop
    cdef public Readiness readiness
    cdef object _memory
    cdef Outboxes _outboxes
    cdef object _buffers
    cdef ReadHandler _handler
    cdef dict _sockets
    cdef list _pieces
    cdef Py_ssize_t _used
    cdef list _gathering
    cdef SocketTransport _last_reader
    cdef double _shared_until_s
    cdef Py_ssize_t _shared_bytes
    cdef double _single_until_s
    cdef long long _tick
    cdef double _tick_end_s

    @cython.locals(count=int, began_s=double, are_single=bint)
    cpdef turn(self)
    @cython.locals(index=int, transport=SocketTransport, events=uint32_t, got=Py_ssize_t, others=list)
    cdef _pass(self, int count)
    @cython.locals(start=Py_ssize_t, got=Py_ssize_t, size=Py_ssize_t, carry=bytes)
    cdef Py_ssize_t _read(self, SocketTransport transport) except? -1
    cdef bint _is_full(self) except -1
    @cython.locals(pieces=list, small=list, last=SocketTransport)
    cdef _handle_pieces(self)
    @cython.locals(transport=SocketTransport, got=Py_ssize_t, sockets=list)
    cpdef _gather(self)
    cdef _next_tick(self, double now_s)
    cdef bint _are_many(self) except -1
    cdef bint _should_wait(self, SocketTransport transport) except -1
    cdef _wait_for_tick(self, SocketTransport transport)
    cdef _widen_for_bulk(self, SocketTransport transport, Py_ssize_t got)
    @cython.locals(transport=SocketTransport, are_many=bint)
    cdef _continue_gathering(self, list sockets)
    @cython.locals(
        transport=SocketTransport, index=Py_ssize_t, count=Py_ssize_t, first=Py_ssize_t,
        end=Py_ssize_t, stop=Py_ssize_t, began_s=double, is_kept=bint,
    )
    cdef _handle(self, list pieces)
    @cython.locals(transport=SocketTransport, start=Py_ssize_t, stop=Py_ssize_t)
    cdef _adapt(self, list pieces, double elapsed_s)
