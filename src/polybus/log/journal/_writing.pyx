# cython: boundscheck=False, wraparound=False
"""What threads of the journal do without the interpreter's lock: write a commit, and sleep.

Its user is direct.py, which says why. There is no twin: without this module the committer's thread
does everything, with Python's own calls.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EINTR, ETIMEDOUT, errno
from libc.stdint cimport int64_t, uint64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

cdef extern from "semaphore.h" nogil:
    ctypedef struct sem_t:
        pass
    int sem_init(sem_t* semaphore, int shared, unsigned int value)
    int sem_post(sem_t* semaphore)
    int sem_wait(sem_t* semaphore)
    int sem_trywait(sem_t* semaphore)
    int sem_clockwait(sem_t* semaphore, int clock, const timespec* until)
    int sem_getvalue(sem_t* semaphore, int* value)
    int sem_destroy(sem_t* semaphore)

cdef extern from "unistd.h" nogil:
    ssize_t write(int fd, const void* at, size_t size)
    int fdatasync(int fd)

cdef extern from "sys/eventfd.h" nogil:
    int eventfd_write(int fd, uint64_t value)

cdef enum:
    NS_PER_S = 1000000000
    NS_PER_MS = 1000000
    FOREVER_S = 86400


cdef int64_t now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <int64_t> now.tv_sec * NS_PER_S + now.tv_nsec


cdef int64_t due_in_ns(timeout_s) except? -1:
    cdef double seconds = FOREVER_S if timeout_s is None else timeout_s
    return now_ns() + <int64_t> (seconds * NS_PER_S)


cdef int write_all(int file, const Py_buffer* data) noexcept nogil:
    """Write everything; return 0 or an errno. On an error some of it may have been written."""
    cdef const char* at = <const char*> data.buf
    cdef Py_ssize_t left = data.len
    cdef ssize_t written
    while left > 0:
        written = write(file, at, left)
        if written >= 0:
            at += written
            left -= written
        elif errno != EINTR:
            return errno
    return 0


cdef void await_post(sem_t* semaphore) noexcept nogil:
    while sem_wait(semaphore) != 0:
        pass


cdef class Writer:
    """Does one job at a time on a thread that holds the interpreter's lock only before and after.

    A job: append a message to a file; if it has `records`, then sync the file, append the records
    to the index, and increment the eventfd. An error ends it.
    """

    cdef sem_t _todo
    cdef sem_t _done
    cdef int _event
    cdef bint _stopping
    cdef bint _is_held
    cdef bint _is_synced
    cdef int _file
    cdef int _index
    cdef Py_buffer _message
    cdef Py_buffer _records
    cdef int _write_error
    cdef int _sync_error
    cdef int _index_error
    cdef int64_t _sync_ns

    def __cinit__(self, int event):
        """`event` is an eventfd."""
        self._event = event
        sem_init(&self._todo, 0, 0)
        sem_init(&self._done, 0, 0)

    def __dealloc__(self):
        self._release()
        sem_destroy(&self._todo)
        sem_destroy(&self._done)

    def run(self):
        """The thread: it does jobs until `stop`."""
        cdef bint tells
        with nogil:
            while True:
                await_post(&self._todo)
                if self._stopping:
                    break
                self._do()
                tells = self._is_synced
                # After this another job may begin.
                sem_post(&self._done)
                if tells:
                    eventfd_write(self._event, 1)

    cdef void _do(self) noexcept nogil:
        cdef int64_t began_ns
        self._sync_error = self._index_error = 0
        self._write_error = write_all(self._file, &self._message)
        if self._write_error or not self._is_synced:
            return
        began_ns = now_ns()
        while fdatasync(self._file) != 0:
            if errno != EINTR:
                self._sync_error = errno
                return
        self._sync_ns = now_ns() - began_ns
        self._index_error = write_all(self._index, &self._records)

    cdef void _release(self):
        if self._is_held:
            self._is_held = False
            PyBuffer_Release(&self._message)
            PyBuffer_Release(&self._records)

    def begin(self, int file, int index, message, bytes records):
        """Begin a job; the one before must have ended, with a call of `result`."""
        PyObject_GetBuffer(message, &self._message, PyBUF_SIMPLE)
        PyObject_GetBuffer(records, &self._records, PyBUF_SIMPLE)
        self._is_held = True
        self._file = file
        self._index = index
        self._is_synced = len(records) > 0
        sem_post(&self._todo)

    def is_done(self):
        """Whether the job that was begun has ended."""
        cdef int value = 0
        sem_getvalue(&self._done, &value)
        return value > 0

    def result(self):
        """Wait for the end of the job; the errno of write, sync and index, and the time of the sync.

        0 means that it succeeded, or was not reached.
        """
        if sem_trywait(&self._done) != 0:
            with nogil:
                await_post(&self._done)
        self._release()
        return self._write_error, self._sync_error, self._index_error, self._sync_ns / 1e9

    def stop(self):
        """End the thread after the job that it does."""
        self._stopping = True
        sem_post(&self._todo)


cdef class Alarm:
    """Wakes the one thread that waits for it, like an AutoResetEvent, and can be put off.

    A thread that an AutoResetEvent wakes too early needs the interpreter's lock before it can wait
    again.
    """

    cdef sem_t _set
    cdef int64_t _due_ns

    def __cinit__(self):
        sem_init(&self._set, 0, 0)

    def __dealloc__(self):
        sem_destroy(&self._set)

    def set(self):
        cdef int value = 0
        sem_getvalue(&self._set, &value)
        if not value:
            sem_post(&self._set)

    def clear(self):
        while sem_trywait(&self._set) == 0:
            pass

    def put_off(self, timeout_s):
        """Let the current wait last this long from now on, None means until `set`.

        The thread is woken at once if that is over a millisecond earlier than before.
        """
        cdef int64_t due_ns = due_in_ns(timeout_s)
        if due_ns < self._due_ns - NS_PER_MS:
            self.set()
        else:
            self._due_ns = due_ns

    def wait(self, timeout_s):
        """Wait until it is set, or was since the last wait or `clear`; at most this long."""
        cdef timespec until
        cdef int64_t due_ns
        self._due_ns = due_in_ns(timeout_s)
        with nogil:
            while True:
                due_ns = self._due_ns
                until.tv_sec = due_ns // NS_PER_S
                until.tv_nsec = due_ns % NS_PER_S
                if sem_clockwait(&self._set, CLOCK_MONOTONIC, &until) == 0:
                    break
                # Not put off meanwhile; after a signal it waits again.
                if errno == ETIMEDOUT and self._due_ns <= due_ns:
                    break
