# cython: boundscheck=False, wraparound=False
"""System calls on sockets, compiled. Contract and twin: sockets_py.py.

The interpreter's lock is released only around calls that copy much: getting it back may take as long
as the committer holds it.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport errno
from libc.stdint cimport uint32_t

import os

cdef extern from "sys/socket.h" nogil:
    ssize_t recv(int fd, void* at, size_t size, int flags)
    ssize_t send(int fd, const void* at, size_t size, int flags)
    enum: MSG_DONTWAIT
    enum: MSG_NOSIGNAL

cdef extern from "sys/epoll.h" nogil:
    int epoll_create1(int flags)
    int epoll_ctl(int epfd, int op, int fd, epoll_event* event)
    int epoll_wait(int epfd, epoll_event* events, int count, int timeout_ms)
    enum: EPOLL_CLOEXEC
    enum: EPOLL_CTL_ADD
    enum: EPOLL_CTL_DEL
    enum: EPOLL_CTL_MOD

cdef extern from "unistd.h" nogil:
    int c_close "close"(int fd)

cdef enum:
    LARGE_BYTES = 65536
    FOUND_MAX = 256


cpdef Py_ssize_t receive(int fd, view, Py_ssize_t start, Py_ssize_t stop) except? -1:
    """Read into `view[start:stop]`."""
    cdef Py_buffer buffer
    cdef Py_ssize_t count
    PyObject_GetBuffer(view, &buffer, PyBUF_WRITABLE)
    try:
        if start < 0 or stop < start or stop > buffer.len:
            raise IndexError("the range is outside its buffer")
        if stop - start > LARGE_BYTES:
            with nogil:
                count = recv(fd, <char*> buffer.buf + start, stop - start, MSG_DONTWAIT)
        else:
            count = recv(fd, <char*> buffer.buf + start, stop - start, MSG_DONTWAIT)
        return count if count >= 0 else -errno
    finally:
        PyBuffer_Release(&buffer)


cpdef Py_ssize_t transmit(int fd, data) except? -1:
    """Write as much as the socket takes."""
    cdef Py_buffer buffer
    cdef Py_ssize_t count
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        if buffer.len > LARGE_BYTES:
            with nogil:
                count = send(fd, buffer.buf, buffer.len, MSG_DONTWAIT | MSG_NOSIGNAL)
        else:
            count = send(fd, buffer.buf, buffer.len, MSG_DONTWAIT | MSG_NOSIGNAL)
        return count if count >= 0 else -errno
    finally:
        PyBuffer_Release(&buffer)


cdef class Readiness:
    """Which of many sockets can be read or written."""

    def __cinit__(self):
        self._epoll = epoll_create1(EPOLL_CLOEXEC)
        if self._epoll < 0:
            raise OSError(errno, os.strerror(errno))

    def fileno(self):
        return self._epoll

    cpdef int watch(self, int fd, uint32_t events, uint32_t before) except -1:
        cdef epoll_event event
        cdef int operation = EPOLL_CTL_MOD
        event.events = events
        event.data.fd = fd
        if not before:
            operation = EPOLL_CTL_ADD
        elif not events:
            operation = EPOLL_CTL_DEL
        if epoll_ctl(self._epoll, operation, fd, &event) < 0:
            raise OSError(errno, os.strerror(errno))
        return 0

    cpdef int find(self) except -1:
        cdef int count = epoll_wait(self._epoll, self._found, FOUND_MAX, 0)
        return count if count > 0 else 0

    cpdef int fd(self, int index) noexcept:
        return self._found[index].data.fd

    cpdef uint32_t events(self, int index) noexcept:
        return self._found[index].events

    def close(self):
        if self._epoll >= 0:
            c_close(self._epoll)
            self._epoll = -1

    def __dealloc__(self):
        self.close()
