"""C types of transport.py, which is compiled as it is."""

cimport cython
from libc.stdint cimport uint32_t

from polybus.edges.tcp._sockets cimport Readiness, transmit

cdef enum:
    # As in sys/epoll.h.
    READABLE = 1
    WRITABLE = 4


cdef class ReadInterceptor:
    cpdef bint take(self, data, Py_ssize_t start, Py_ssize_t stop) except -1


@cython.final
cdef class SocketTransport:
    cdef object _loop
    cdef Readiness _readiness
    cdef object _forget
    cdef public object socket
    cdef public int fd
    cdef public object connection
    cdef public object plain
    cdef public object access
    cdef public ReadInterceptor taker
    cdef public Py_ssize_t read_bytes
    cdef object _waiting
    cdef public uint32_t watched
    cdef public long long tick
    cdef public bint is_gathering
    cdef public int gathers
    cdef public Py_ssize_t messages
    cdef public long long exempt_until
    cdef public int small_reads
    cdef public Py_ssize_t large_bytes
    cdef public bint is_narrow
    cdef bint _is_reading
    cdef bint _has_ended
    cdef bint _ends_output
    cdef bint _is_closing
    cdef bint _is_closed

    @cython.locals(events=uint32_t)
    cpdef watch(self)
    cpdef bint may_read(self)
    @cython.locals(sent=Py_ssize_t)
    cpdef write(self, data)
    @cython.locals(sent=Py_ssize_t)
    cpdef writable(self)
