"""C types of sending.py, which is compiled as it is."""

cimport cython
from libc.stdint cimport int64_t

from polybus.edges.tcp.outbox cimport Outbox
from polybus.edges.tcp.transport cimport ReadInterceptor
from polybus.services.sessions.delivery cimport PackDelivery
from polybus.services.sessions.session cimport Session

cdef int TEXT, MASKED, HEAD_BYTES, DIGITS_MAX, COMMA, ZERO


@cython.final
cdef class PackEncodings:
    cdef object _loop
    cdef object _encode
    cdef dict _encoded

    @cython.locals(found=tuple)
    cpdef get(self, list packs)


cdef class PackSender(ReadInterceptor):
    cdef public PackDelivery _inboxes
    cdef public object _memory
    cdef public PackEncodings _frames
    cdef public Session _session
    cdef public Outbox _outbox
    cdef public int64_t _sent_to
    cdef public bint _paused
    cdef public object _collecting
    cdef public bint _again
    cdef public bint _between_frames

    @cython.locals(session=Session, packs=list)
    cpdef wake(self)
    cdef _send_packs(self, list packs)
    @cython.locals(session=Session, ids=list)
    cpdef bint take(self, data, Py_ssize_t start, Py_ssize_t stop) except -1
    cpdef _confirm(self, Session session, list ids)


cpdef bytes text_frame(bytes text)

@cython.locals(
    ids=list, size=int, mask_at=Py_ssize_t, index=int, byte=int, number=int64_t, digits=int,
)
cpdef list confirmed_ids(bytes data, Py_ssize_t start, Py_ssize_t stop)
