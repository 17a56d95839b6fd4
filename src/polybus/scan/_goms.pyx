# cython: boundscheck=False, wraparound=False, cdivision=True
"""goMS, compiled: lines, and the ends of other objects. Contract, rules and twin: goms_py.py.

A scan of lines reads the bytes once. It records each message's position and the number of its topic's group,
then distributes the positions to one array per group. In a run of one topic each line is only
compared with the head of the previous line. Values without escapes are not copied; a group with
escapes gets a buffer of its own.
"""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp

import array
import os

from polybus.scan.batch cimport new_batch
from polybus.scan._bytes cimport check_scan, check_spans, put, put_decimal
from polybus.scan._groups cimport (
    Entry, Groups, PyGC_Disable, PyGC_Enable, begin_scan, group_of, new_entry,
)
from polybus.scan._text cimport (
    BACKSLASH, QUOTE, ascii8, escaped_size, is_space, plain8, put_base64, put_escaped,
    put_unescaped, string_end, utf8_size,
)

cdef array.array INTS = array.array("i")
cdef Groups groups
groups.seed = int.from_bytes(os.urandom(8), "little")


cdef inline const uint8_t* topic_end(const uint8_t* at, const uint8_t* stop) noexcept nogil:
    """The quote that ends a topic in plain lower case; NULL for any other topic."""
    if at < stop and at[0] == c"$":
        return NULL
    while at < stop and 0x20 <= at[0] < 0x7F and at[0] != BACKSLASH:
        if at[0] == QUOTE:
            return at
        if c"A" <= at[0] <= c"Z":
            return NULL
        at += 1
    return NULL


cdef inline const uint8_t* after(
    const uint8_t* at, const uint8_t* stop, const char* text, Py_ssize_t size
) noexcept nogil:
    """The position after `text` if `at` begins with it, else NULL."""
    if stop - at >= size and memcmp(at, text, size) == 0:
        return at + size
    return NULL


def scan_lines(
    buffer, Py_ssize_t start, Py_ssize_t stop, bytes messagetype not None,
    int64_t message_bytes_max, int64_t topic_bytes_max,
):
    """Scan `buffer[start:stop]` for plain lines; return where it stopped, and batches by topic."""
    cdef Py_buffer view
    cdef const uint8_t* at
    cdef const uint8_t* end
    cdef const uint8_t* topic
    cdef const uint8_t* data
    cdef const uint8_t* head = NULL
    cdef Py_ssize_t head_bytes = 0, count = 0
    cdef int32_t group = -1, escaped
    cdef bytes compact = b'{"messagetype":"' + messagetype + b'","topics":["'
    cdef bytes spaced = b'{"messagetype": "' + messagetype + b'", "topics": ["'
    cdef const char* compact_at = PyBytes_AS_STRING(compact)
    cdef const char* spaced_at = PyBytes_AS_STRING(spaced)
    cdef Py_ssize_t compact_bytes = len(compact), spaced_bytes = len(spaced)
    cdef Entry* entry
    cdef bint collects
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    collects = PyGC_Disable()
    try:
        check_scan(&view, start, stop)
        at = <const uint8_t*> view.buf + start
        end = <const uint8_t*> view.buf + stop
        begin_scan(&groups)
        while True:
            while at < end and is_space(at[0]):
                at += 1
            if head != NULL and end - at > head_bytes and memcmp(at, head, head_bytes) == 0:
                data = at + head_bytes
            else:
                topic = after(at, end, compact_at, compact_bytes)
                if topic == NULL:
                    topic = after(at, end, spaced_at, spaced_bytes)
                    if topic == NULL:
                        break
                data = topic_end(topic, end)
                if data == NULL or data == topic or data - topic > topic_bytes_max:
                    break
                group = group_of(&groups, topic, <int32_t> (data - topic))
                topic = data
                data = after(topic, end, b'"],"data":"', 11)
                if data == NULL:
                    data = after(topic, end, b'"], "data": "', 13)
                    if data == NULL:
                        break
                head = at
                head_bytes = data - at
            topic = string_end(data, end, &escaped)
            if (
                topic == NULL or topic - data > message_bytes_max
                or end - topic < 2 or topic[1] != c"}"
            ):
                break
            entry = new_entry(&groups, count, group)
            count += 1
            entry.start = <int32_t> (data - <const uint8_t*> view.buf)
            entry.end = <int32_t> (topic - <const uint8_t*> view.buf)
            groups.found[group].marked |= escaped
            groups.found[group].value_bytes += entry.end - entry.start
            at = topic + 2
        groups.entries_count = count
        return at - <const uint8_t*> view.buf, make_batches(buffer, <const uint8_t*> view.buf)
    finally:
        if collects:
            PyGC_Enable()
        PyBuffer_Release(&view)


cdef struct Writer:
    int* at  # the group's next span
    uint8_t* begin  # the group's own buffer; NULL if its values are not copied
    uint8_t* end


cdef list make_batches(buffer, const uint8_t* base):
    """One Batch per topic that has messages, in the order of their first ones."""
    cdef list batches = []
    cdef Py_ssize_t index, group
    cdef array.array spans
    cdef const Entry* entry
    cdef Writer* writer
    cdef Writer* writers = <Writer*> calloc(groups.count + 1, sizeof(Writer))
    if writers == NULL:
        raise MemoryError()
    try:
        for group in range(groups.count):
            if groups.found[group].count == 0:
                continue
            spans = array.clone(INTS, 2 * groups.found[group].count, zero=False)
            writers[group].at = spans.data.as_ints
            values = buffer
            if groups.found[group].marked:
                values = PyBytes_FromStringAndSize(NULL, groups.found[group].value_bytes)
                writers[group].begin = writers[group].end = <uint8_t*> PyBytes_AS_STRING(values)
            topic = PyUnicode_DecodeASCII(
                <const char*> groups.found[group].topic, groups.found[group].topic_bytes, NULL
            )
            batches.append(new_batch(topic, values, spans))
        for index in range(groups.entries_count):
            entry = &groups.entries[index]
            writer = &writers[entry.group]
            if writer.begin == NULL:
                writer.at[0] = entry.start
                writer.at[1] = entry.end
            else:
                writer.at[0] = <int> (writer.end - writer.begin)
                writer.end = put_unescaped(writer.end, base + entry.start, base + entry.end)
                writer.at[1] = <int> (writer.end - writer.begin)
            writer.at += 2
    finally:
        free(writers)
    return batches


def is_utf8(buffer, Py_ssize_t start, Py_ssize_t stop):
    """Whether `buffer[start:stop]` is UTF-8."""
    cdef Py_buffer view
    cdef const uint8_t* at
    cdef Py_ssize_t left = stop - start, size
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        if start < 0 or stop > view.len:
            raise IndexError("the scan range is outside its buffer")
        at = <const uint8_t*> view.buf + start
        while left > 0:
            size = 8 if left >= 8 and ascii8(at) else utf8_size(at, left)
            if size == 0:
                return False
            at += size
            left -= size
        return True
    finally:
        PyBuffer_Release(&view)


cdef inline Py_ssize_t measure(
    const uint8_t* base, const int* at, Py_ssize_t count, Py_ssize_t* sizes
) noexcept nogil:
    """Set the size of each value in its line (-1: as base64); return the size of all of them."""
    cdef Py_ssize_t index, size, total = 0
    for index in range(count):
        size = at[2 * index + 1] - at[2 * index]
        sizes[index] = escaped_size(base + at[2 * index], size)
        total += (size + 2) // 3 * 4 + 20 if sizes[index] < 0 else sizes[index]
    return total


def encode_lines(
    bytes head not None, buffer, array.array spans not None, int64_t epoch=-1,
    int64_t first_offset=0,
):
    """Each span of `buffer` as a line: `head`, the offset if `epoch` is not -1, the data."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index, size, head_bytes = len(head), count = len(spans) // 2
    cdef const char* head_at = PyBytes_AS_STRING(head)
    cdef Py_ssize_t* sizes = NULL
    cdef uint8_t* to
    cdef uint8_t* begin
    if epoch >= 0 and first_offset < 0:
        raise ValueError("an offset cannot be negative")
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        check_spans(&view, spans)
        sizes = <Py_ssize_t*> malloc((count + 1) * sizeof(Py_ssize_t))
        if sizes == NULL:
            raise MemoryError()
        base = <const uint8_t*> view.buf
        size = measure(base, at, count, sizes)
        # 12 for `,"data":""}` and the newline; 57 for `,"offsets":["` to `"]` with its numbers.
        size += count * (head_bytes + 12 + (57 if epoch >= 0 else 0))
        lines = PyBytes_FromStringAndSize(NULL, size)
        begin = to = <uint8_t*> PyBytes_AS_STRING(lines)
        for index in range(count):
            size = at[2 * index + 1] - at[2 * index]
            to = put(to, head_at, head_bytes)
            if epoch >= 0:
                to = put(to, b',"offsets":["', 13)
                to = put_decimal(to, epoch)
                to = put(to, b":", 1)
                to = put_decimal(to, first_offset + index)
                to = put(to, b'"]', 2)
            if sizes[index] < 0:
                to = put(to, b',"encoding":"base64","data":"', 29)
                to = put_base64(to, base + at[2 * index], size)
            else:
                to = put(to, b',"data":"', 9)
                if sizes[index] == size:
                    to = put(to, base + at[2 * index], size)
                else:
                    to = put_escaped(to, base + at[2 * index], size)
            to = put(to, b'"}\n', 3)
        if epoch < 0:
            return lines
        return lines[: to - begin]
    finally:
        free(sizes)
        PyBuffer_Release(&view)


# The verdicts, as in goms_py.py.
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
