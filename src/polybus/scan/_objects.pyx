# cython: boundscheck=False, wraparound=False, cdivision=True
"""Finds the end of a JSON object, compiled. Contract, rules and twin: objects_py.py."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t
from libc.stdlib cimport free, malloc

from polybus.scan._text cimport BACKSLASH, QUOTE, is_space, plain8

# The verdicts, as in objects_py.py.
cdef enum:
    MORE = 0
    END = 1
    BAD = 2
    RESTART = 3
    DEEP = 4

cdef enum State:
    BEGIN
    KEY
    KEY_OR_END
    COLON
    VALUE
    VALUE_OR_END
    AFTER
    TOKEN
    STRING
    ESCAPE
    SKIP
    SKIP_STRING
    SKIP_ESCAPE


cdef inline bint is_token(uint8_t byte) noexcept nogil:
    return (
        c"0" <= byte <= c"9" or c"a" <= (byte | 0x20) <= c"z"
        or byte == c"-" or byte == c"+" or byte == c"."
    )


cdef class ObjectScanner:
    """Finds the end of one JSON object in a stream that arrives in pieces."""

    cdef uint8_t* opened
    cdef Py_ssize_t depth
    cdef Py_ssize_t depth_max
    cdef State state
    cdef bint in_key
    cdef bint after_newline

    def __cinit__(self, Py_ssize_t depth_max):
        if depth_max < 1:
            raise ValueError("depth_max must be 1 or more")
        self.depth_max = depth_max
        self.opened = <uint8_t*> malloc(depth_max)
        if self.opened == NULL:
            raise MemoryError()
        self.reset()

    def __dealloc__(self):
        free(self.opened)

    def reset(self):
        """Begin a new object."""
        self.depth = 0
        self.state = BEGIN
        self.after_newline = False

    def scan(self, buffer, Py_ssize_t start, Py_ssize_t stop):
        """Continue with `buffer[start:stop]`; return (where it stopped, verdict)."""
        cdef Py_buffer view
        cdef const uint8_t* base
        cdef Py_ssize_t at = start
        cdef int verdict = MORE
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            if start < 0 or stop > view.len:
                raise IndexError("the scan range is outside its buffer")
            base = <const uint8_t*> view.buf
            while at < stop:
                if self.state == STRING:
                    while stop - at >= 8 and plain8(base + at):
                        at += 8
                    if at == stop:
                        break
                elif self.state == TOKEN:
                    while at < stop and is_token(base[at]):
                        at += 1
                    if at == stop:
                        break
                    self.state = AFTER
                verdict = self.step(base[at])
                if verdict == BAD:
                    if base[at] == c"{" and self.state != BEGIN and (
                        base[at - 1] == c"\n" if at > start else self.after_newline
                    ):
                        verdict = RESTART
                    break
                at += 1
                if verdict != MORE:
                    break
            if at > start:
                self.after_newline = base[at - 1] == c"\n"
            return at, verdict
        finally:
            PyBuffer_Release(&view)

    cdef int step(self, uint8_t byte) noexcept:
        cdef State state = self.state
        if state == STRING:
            if byte == QUOTE:
                self.state = COLON if self.in_key else AFTER
            elif byte == BACKSLASH:
                self.state = ESCAPE
            elif byte < 0x20:
                return BAD
            return MORE
        if state == ESCAPE:
            self.state = STRING
            return BAD if byte < 0x20 else MORE
        if state >= SKIP:
            return self.skip(byte)
        if is_space(byte) and state != BEGIN:
            return MORE
        if byte == c"{" or byte == c"[":
            if state != VALUE and state != VALUE_OR_END and (state != BEGIN or byte == c"["):
                return BAD
            return self.open(byte)
        if state == BEGIN:
            return BAD
        if byte == c"}" or byte == c"]":
            return self.close(byte)
        if byte == c",":
            self.state = KEY if self.opened[self.depth - 1] == c"{" else VALUE
            return MORE if state == AFTER else BAD
        if byte == c":":
            self.state = VALUE
            return MORE if state == COLON else BAD
        return self.begin_scalar(byte)

    cdef int begin_scalar(self, uint8_t byte) noexcept:
        cdef bint key = self.state == KEY or self.state == KEY_OR_END
        if not key and self.state != VALUE and self.state != VALUE_OR_END:
            return BAD
        if byte == QUOTE:
            self.in_key = key
            self.state = STRING
            return MORE
        self.state = TOKEN
        return BAD if key or not is_token(byte) else MORE

    cdef int open(self, uint8_t byte) noexcept:
        self.depth += 1
        if self.depth > self.depth_max:
            self.state = SKIP
            return DEEP
        self.opened[self.depth - 1] = byte
        self.state = KEY_OR_END if byte == c"{" else VALUE_OR_END
        return MORE

    cdef int close(self, uint8_t byte) noexcept:
        cdef State empty = KEY_OR_END if byte == c"}" else VALUE_OR_END
        if self.state != AFTER and self.state != empty:
            return BAD
        # `{` and `}` are two apart in ASCII, and so are `[` and `]`.
        if self.opened[self.depth - 1] + 2 != byte:
            return BAD
        self.depth -= 1
        self.state = AFTER
        return END if self.depth == 0 else MORE

    cdef int skip(self, uint8_t byte) noexcept:
        if byte == c"\n":
            return END
        if self.state == SKIP_ESCAPE:
            self.state = SKIP_STRING
        elif self.state == SKIP_STRING:
            if byte == QUOTE:
                self.state = SKIP
            elif byte == BACKSLASH:
                self.state = SKIP_ESCAPE
        elif byte == QUOTE:
            self.state = SKIP_STRING
        elif byte == c"{" or byte == c"[":
            self.depth += 1
        elif byte == c"}" or byte == c"]":
            self.depth -= 1
            if self.depth == 0:
                return END
        return MORE
