"""C types of pump.py, which is compiled as it is."""

cimport cython
from libc.stdint cimport uint32_t

from polybus.edges.tcp.outbox cimport Outbox, Outboxes
from polybus.edges.tcp._sockets cimport Readiness, receive, transmit
from polybus.scan.batch cimport Batch

cdef enum:
    # As in sys/epoll.h.
    READABLE = 1
    WRITABLE = 4


@cython.final
cdef class Channel:
    cdef Pump _pump
    cdef public object socket
    cdef public int fd
    cdef public object connection
    cdef public object plain
    cdef public Py_ssize_t read_bytes
    cdef object _waiting
    cdef public uint32_t watched
    cdef long long _tick
    cdef public bint _is_gathering
    cdef int _gathers
    cdef bint _is_reading
    cdef bint _has_ended
    cdef bint _ends_output
    cdef bint _is_closing
    cdef bint _is_closed

    @cython.locals(events=uint32_t)
    cpdef _watch(self)
    cpdef bint _may_read(self)
    @cython.locals(sent=Py_ssize_t)
    cpdef write(self, data)
    @cython.locals(sent=Py_ssize_t)
    cpdef writable(self)


@cython.final
cdef class Pump:
    cdef public object loop
    cdef public Readiness readiness
    cdef object _bus
    cdef object _memory
    cdef Outboxes _outboxes
    cdef object _buffers
    cdef dict _channels
    cdef list _pieces
    cdef Py_ssize_t _used
    cdef list _gathering
    cdef Channel _last_reader
    cdef object _lane_of
    cdef list _lane_boxes
    cdef double _shared_until_s
    cdef bint _is_shared
    cdef long long _tick
    cdef double _tick_end_s
    cdef Py_ssize_t _small_messages

    @cython.locals(count=int, began_s=double)
    cpdef turn(self)
    @cython.locals(index=int, channel=Channel, events=uint32_t, got=Py_ssize_t, others=list)
    cdef _pass(self, int count)
    @cython.locals(start=Py_ssize_t, got=Py_ssize_t, size=Py_ssize_t, carry=bytes)
    cdef Py_ssize_t _read(self, Channel channel) except? -1
    cdef bint _is_full(self) except -1
    @cython.locals(pieces=list, used=Py_ssize_t, last=Channel)
    cdef _handle_pieces(self)
    @cython.locals(channel=Channel, got=Py_ssize_t, channels=list)
    cpdef _gather(self)
    cdef _next_tick(self, double now_s)
    cdef _wait_for_tick(self, Channel channel)
    @cython.locals(channel=Channel, is_much=bint)
    cdef _go_on_gathering(self, list channels)
    @cython.locals(
        channel=Channel, start=Py_ssize_t, stop=Py_ssize_t, end=Py_ssize_t, run=list,
        run_start=Py_ssize_t, run_stop=Py_ssize_t, batches=list, batch=Batch,
    )
    cdef _handle(self, list pieces, Py_ssize_t used)
    @cython.locals(batches=list, batch=Batch)
    cdef tuple _scan(self, Channel channel, data, Py_ssize_t start, Py_ssize_t stop)
    @cython.locals(
        channel=Channel, batches=list, its_batches=list, batch=Batch, by_name=dict, lane=list,
        outbox=Outbox,
    )
    cdef _publish(self, list run, data, Py_ssize_t start, Py_ssize_t stop)
    @cython.locals(found=list)
    cdef list _lane(self, list batches)
    @cython.locals(channel=Channel, start=Py_ssize_t, stop=Py_ssize_t)
    cdef _adapt(self, list pieces, double elapsed_s)
