"""C types of _sockets.pyx, for the compiled pump."""

from libc.stdint cimport uint32_t

cdef extern from "sys/epoll.h" nogil:
    ctypedef union epoll_data_t:
        int fd
    struct epoll_event:
        uint32_t events
        epoll_data_t data

cpdef Py_ssize_t receive(int fd, view, Py_ssize_t start, Py_ssize_t stop) except? -1
cpdef Py_ssize_t transmit(int fd, data) except? -1


cdef class Readiness:
    cdef int _epoll
    cdef epoll_event _found[256]

    cpdef int watch(self, int fd, uint32_t events, uint32_t before) except -1
    cpdef int find(self) except -1
    cpdef int fd(self, int index) noexcept
    cpdef uint32_t events(self, int index) noexcept
