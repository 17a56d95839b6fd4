# cython: boundscheck=False, wraparound=False, cdivision=True
"""goMS lines, compiled. Contract and twin: lines_py.py.

A scan reads the bytes once. It records each message's position and the number of its topic's group,
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
    BACKSLASH, QUOTE, ascii8, escape_size, escaped_size, is_space, plain8, put_base64, put_escaped,
    put_unescaped, utf8_size,
)

cdef array.array INTS = array.array("i")
cdef Groups groups
groups.seed = int.from_bytes(os.urandom(8), "little")


cdef inline const uint8_t* string_end(
    const uint8_t* at, const uint8_t* stop, int32_t* escaped
) noexcept nogil:
    """The quote that ends the string whose text begins at `at`; NULL if it is not valid JSON."""
    cdef Py_ssize_t size
    escaped[0] = 0
    while at < stop:
        if stop - at >= 8 and plain8(at):
            at += 8
        elif at[0] == QUOTE:
            return at
        elif at[0] == BACKSLASH:
            size = escape_size(at, stop - at)
            if size == 0:
                return NULL
            escaped[0] = 1
            at += size
        elif at[0] < 0x20:
            return NULL
        else:
            size = utf8_size(at, stop - at)
            if size == 0:
                return NULL
            at += size
    return NULL


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


cdef list make_batches(buffer, const uint8_t* base):
    """One Batch per topic that has messages, in the order of their first ones."""
    cdef list batches = []
    cdef Py_ssize_t index, group
    cdef array.array spans
    cdef const Entry* entry
    cdef int** at = <int**> calloc(groups.count + 1, sizeof(int*))
    cdef uint8_t** begins = <uint8_t**> calloc(groups.count + 1, sizeof(uint8_t*))
    cdef uint8_t** ends = <uint8_t**> calloc(groups.count + 1, sizeof(uint8_t*))
    try:
        if at == NULL or begins == NULL or ends == NULL:
            raise MemoryError()
        for group in range(groups.count):
            if groups.found[group].count == 0:
                continue
            spans = array.clone(INTS, 2 * groups.found[group].count, zero=False)
            at[group] = spans.data.as_ints
            values = buffer
            if groups.found[group].marked:
                values = PyBytes_FromStringAndSize(NULL, groups.found[group].value_bytes)
                begins[group] = ends[group] = <uint8_t*> PyBytes_AS_STRING(values)
            topic = PyUnicode_DecodeASCII(
                <const char*> groups.found[group].topic, groups.found[group].topic_bytes, NULL
            )
            batches.append(new_batch(topic, values, spans))
        for index in range(groups.entries_count):
            entry = &groups.entries[index]
            group = entry.group
            if ends[group] == NULL:
                at[group][0] = entry.start
                at[group][1] = entry.end
            else:
                at[group][0] = <int> (ends[group] - begins[group])
                ends[group] = put_unescaped(ends[group], base + entry.start, base + entry.end)
                at[group][1] = <int> (ends[group] - begins[group])
            at[group] += 2
    finally:
        free(at)
        free(begins)
        free(ends)
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
