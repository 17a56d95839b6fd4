"""C types of session.py, which is compiled as it is."""

cimport cython
from libc.stdint cimport int64_t

from polybus.services.sessions.contents cimport Content, Entries, Follow
from polybus.services.sessions.sequence cimport PackSequence

cdef int64_t BEHIND


@cython.final
cdef class Session(PackSequence):
    cdef public int64_t number
    cdef public bytes digest
    cdef public double ttl_s
    cdef public str account
    cdef public str token
    cdef public object receiver
    cdef public dict follows
    cdef public dict damaged
    cdef public bint is_ended
    cdef double _contact_s

    @cython.locals(follow=Follow, feed=Entries, fresh=list, index=int64_t, runs=int)
    cpdef cut(self)
    cpdef add(self, Content content)
    cpdef add_caught(self, Follow follow, Content content)
    @cython.locals(feed=Entries)
    cpdef note_missing(self, Follow follow, int64_t start)
    @cython.locals(follow=Follow)
    cpdef Follow wants_catch_up(self)
    @cython.locals(follow=Follow)
    cpdef set hold(self, str topic, number=*)
    cpdef bint needs_notice(self, int64_t after) except -1
