"""C types of sequence.py, which is compiled as it is."""

cimport cython
from libc.stdint cimport int64_t

from polybus.services.sessions.contents cimport Content


cdef class PackSequence:
    cdef int64_t _packs_max
    cdef int64_t _bytes_max
    cdef public dict lost
    cdef public int64_t shown_to
    cdef public int64_t pack_count
    cdef public int64_t value_bytes
    cdef int64_t _first_id
    cdef list _packs
    cdef object _gap
    cdef int64_t _mark
    cdef bint _raises_mark
    cdef int64_t _saved_to
    cdef int64_t _rewrite_from
    cdef bint _is_changed
    cdef list _unsaved_confirms
    cdef list _unsaved_empties

    cpdef _take(self, list fresh)
    @cython.locals(content=Content)
    cdef _count(self, list contents)
    @cython.locals(packs=list, number=int64_t, index=int64_t, confirmed=bint)
    cpdef confirm(self, ids)
    @cython.locals(content=Content, index=int64_t)
    cpdef discard(self, int64_t number)
    @cython.locals(packs=list, unseen=int64_t, first=int64_t, index=int64_t, one=Content)
    cdef set _take_back(self, str topic, int64_t epoch, number)
    cdef _empty(self, Py_ssize_t index)
    @cython.locals(content=Content)
    cdef _let_go(self, Py_ssize_t index)
    @cython.locals(index=Py_ssize_t)
    cdef _let_go_all(self)
    @cython.locals(packs=list, count=Py_ssize_t)
    cdef _trim(self)
    cdef bint _is_over(self) except -1
    @cython.locals(packs=list, unseen=int64_t, index=int64_t, first=int64_t, content=Content)
    cdef _drop_oldest(self)
    cdef _renumber(self)
    cdef _note_lost(self, str topic, epoch, offset, count)
    @cython.locals(
        packs=list, first_id=int64_t, first=int64_t, stop=int64_t, number=int64_t, size=int64_t,
        content=Content, shown=list,
    )
    cpdef list unconfirmed(self, int64_t after, int64_t bytes_max)
    cpdef bint needs_mark(self) except -1
    cpdef show(self, int64_t number)
