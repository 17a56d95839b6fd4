"""C types of delivery.py, which is compiled as it is."""

cimport cython
from libc.stdint cimport int64_t

from polybus.scan.batch cimport Traffic
from polybus.services.sessions.contents cimport Content
from polybus.services.sessions.session cimport Session
from polybus.services.tallies cimport Tallies


cdef class PackDelivery:
    cdef public Tallies _events
    cdef public object _saver
    cdef set _touched
    cdef public object _state
    cdef public dict delivered
    cdef public int64_t packs_out

    @cython.locals(held=int64_t)
    cpdef confirm(self, Session session, ids)
    @cython.locals(shown=list, packs=list, content=Content)
    cpdef list collect_now(self, Session session, int64_t after)
    cdef _touch(self, Session session)
    @cython.locals(content=Content, traffic=Traffic)
    cpdef show(self, Session session, list packs)
