"""C types of contents.py, which is compiled as it is."""

cimport cython
from libc.stdint cimport int64_t


@cython.final
cdef class Content:
    cdef public str topic
    cdef public int64_t epoch
    cdef public int64_t first_offset
    cdef public int64_t count
    cdef public int64_t value_bytes
    cdef public int64_t order
    cdef public bytes json
    cdef public int64_t holders


cdef class Entries:
    cdef public str topic
    cdef public str shown
    cdef public int64_t epoch
    cdef public int64_t stop_offset
    cdef public list contents
    cdef public int64_t first_index
    cdef public set followers
    cdef public dict listeners
    cdef public bint is_damaged

    cpdef add(self, Content content)
    @cython.locals(count=int64_t)
    cpdef trim(self, int64_t index)


@cython.final
cdef class Follow:
    cdef public Entries feed
    cdef public int64_t index
    cdef public int64_t offset

    @cython.locals(feed=Entries, contents=list, at=Py_ssize_t, starts_at=int64_t, one=Content)
    cpdef bint try_live(self) except -1
    cpdef take_all(self)
    cpdef read_to(self, int64_t offset)
    cpdef go_back(self, int64_t offset)
