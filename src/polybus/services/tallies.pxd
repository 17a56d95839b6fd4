"""C types of tallies.py, which is compiled as it is."""

cimport cython
from libc.stdint cimport int64_t

# Sessions and packs have no C types here: sessions import this module.


@cython.final
cdef class Run:
    cdef public int64_t first
    cdef public int64_t time_us
    cdef public int64_t last
    cdef public int64_t count
    cdef public int64_t messages


@cython.final
cdef class Tally:
    cdef public dict runs
    cdef public int64_t repeated
    cdef public int64_t confirmed
    cdef public int64_t first
    cdef public int64_t last
    cdef public int64_t time_us
    cdef public int64_t timed
    cdef public int64_t wait_us
    cdef public int64_t wait_us_max
    cdef public list marks
    cdef public bint pending


cdef class Tallies:
    cdef public object _clock_us
    cdef public bint _enabled
    cdef public dict _tallies
    cdef public list _pending
    cdef public dict _own_topics

    cdef bint _causes_itself(self, session) except -1
    @cython.locals(tally=Tally, run=Run, number=int64_t, shown_to=int64_t, now_us=int64_t, marks=list)
    cpdef delivered(self, session, list packs)
    @cython.locals(
        tally=Tally, first=int64_t, last=int64_t, number=int64_t, now_us=int64_t, time_us=int64_t,
        shown_us=int64_t, wait_us=int64_t, marks=list,
    )
    cpdef confirmed(self, session, ids, int64_t count)
    @cython.locals(tally=Tally)
    cdef Tally _touched(self, session)
