# cython: boundscheck=False, wraparound=False, cdivision=True
"""The binary protocols, compiled. Contract and twin: binary_py.py.

A scan of Boson frames reads the bytes once. It records each message's position and the number of its topic's group,
then distributes the positions to one array per group. Consecutive frames of one topic skip the hash
table, because each frame is first compared with the previous one.
"""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memchr, memcmp

import array
import os

from polybus.scan.batch cimport Batch, new_batch
from polybus.scan._bytes cimport (
    check_scan, check_spans, get_int32, prefetch, put, put_decimal, put_int32, same_bytes,
)
from polybus.scan._groups cimport (
    Entry, Groups, PyGC_Disable, PyGC_Enable, begin_scan, group_of, new_entry,
)

cdef enum:
    HEADER_BYTES = 7
    LENGTH_BYTES = 4
    MARK_BYTES = 9
    RECEIPT_ID_BYTES_MAX = 255
    RECEIPT_TOPIC_BYTES = 8
    # A colon and two numbers of up to 19 digits.
    POSITION_BYTES_MAX = 39
    AHEAD = 8  # four messages

cdef const char* MARK = b"?receipt="
cdef array.array INTS = array.array("i")
cdef Groups groups
groups.seed = int.from_bytes(os.urandom(8), "little")


cdef inline void put_header(
    uint8_t* at, uint32_t length, uint32_t topic_bytes
) noexcept nogil:
    put_int32(at, length)
    at[4] = 0
    at[5] = <uint8_t> (topic_bytes >> 8)
    at[6] = <uint8_t> topic_bytes


def scan_frames(
    buffer,
    Py_ssize_t start,
    Py_ssize_t stop,
    int64_t message_bytes_max,
    int64_t topic_bytes_max,
    dict names not None,
    protocol,
):
    """Scan for plain frames; return (end, batches, unnamed), see the twin."""
    cdef Py_buffer view
    cdef bint collects
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    collects = PyGC_Disable()
    try:
        stop = scan(&view, start, stop, message_bytes_max, topic_bytes_max)
        unnamed = []
        return stop, make_batches(buffer, names, protocol, unnamed), unnamed
    finally:
        if collects:
            PyGC_Enable()
        PyBuffer_Release(&view)


cdef Py_ssize_t scan(
    Py_buffer* view,
    Py_ssize_t start,
    Py_ssize_t stop,
    int64_t message_bytes_max,
    int64_t topic_bytes_max,
) except -1:
    """Record the position and group of each frame; return where the scan stopped."""
    cdef const uint8_t* base
    cdef const uint8_t* topic
    cdef const uint8_t* last_topic = NULL
    cdef const uint8_t* mark
    cdef int32_t last_bytes = -1, topic_bytes, base_bytes, group = -1, receipt
    cdef int32_t length
    cdef int64_t content, end
    cdef Py_ssize_t count = 0
    cdef Entry* entry
    check_scan(view, start, stop)
    base = <const uint8_t*> view.buf
    begin_scan(&groups)
    while stop - start >= HEADER_BYTES:
        length = get_int32(base + start)
        topic_bytes = (<int32_t> base[start + 5] << 8) | base[start + 6]
        content = start + HEADER_BYTES + topic_bytes
        end = content + length
        if (
            base[start + 4] != 0 or length < 0 or length > message_bytes_max
            or topic_bytes == 0 or end > stop
        ):
            break
        topic = base + start + HEADER_BYTES
        receipt = <int32_t> content
        if topic_bytes == last_bytes and same_bytes(topic, last_topic, topic_bytes):
            pass
        else:
            base_bytes = topic_bytes
            mark = <const uint8_t*> memchr(topic, c"?", topic_bytes)
            if mark != NULL:
                base_bytes = <int32_t> (mark - topic)
                if (
                    topic_bytes - base_bytes <= MARK_BYTES
                    or topic_bytes - base_bytes > MARK_BYTES + RECEIPT_ID_BYTES_MAX
                    or memcmp(mark, MARK, MARK_BYTES) != 0
                ):
                    break
                receipt = <int32_t> (mark - base) + MARK_BYTES
            if base_bytes == 0 or base_bytes > topic_bytes_max or topic[0] == c"$":
                break
            if not (
                group >= 0
                and base_bytes == groups.found[group].topic_bytes
                and same_bytes(topic, groups.found[group].topic, base_bytes)
            ):
                group = group_of(&groups, topic, base_bytes)
            if mark != NULL:
                groups.found[group].marked = 1
                last_bytes = -1
            else:
                last_topic = topic
                last_bytes = topic_bytes
        entry = new_entry(&groups, count, group)
        count += 1
        entry.start = <int32_t> content
        entry.end = <int32_t> end
        entry.extra = receipt
        start = end
    groups.entries_count = count
    return start


cdef list make_batches(object buffer, dict names, object protocol, list unnamed):
    """One Batch per topic, in the order of their first messages."""
    cdef list batches = []
    cdef Py_ssize_t group, count = groups.count
    cdef Batch batch
    cdef int** at
    cdef int** receipt_at
    if count == 0:
        return batches
    at = <int**> calloc(2 * count, sizeof(int*))
    if at == NULL:
        raise MemoryError()
    receipt_at = at + count
    try:
        for group in range(count):
            topic = PyBytes_FromStringAndSize(
                <const char*> groups.found[group].topic, groups.found[group].topic_bytes
            )
            name = names.get(topic)
            batch = new_batch(
                name, buffer, array.clone(INTS, 2 * groups.found[group].count, zero=False)
            )
            if name is None:
                batch.topic = ""
                unnamed.append((batch, topic))
            batch.protocol = protocol
            at[group] = batch.spans.data.as_ints
            if groups.found[group].marked:
                batch.receipt_ids = array.clone(INTS, 2 * groups.found[group].count, zero=False)
                receipt_at[group] = batch.receipt_ids.data.as_ints
            batches.append(batch)
        distribute(at, receipt_at)
    finally:
        free(at)
    return batches


cdef void distribute(int** at, int** receipt_at) noexcept:
    """Write each position to its group's spans, and to its receipts if the group has any."""
    cdef Py_ssize_t index, group
    cdef const Entry* entry
    for index in range(groups.entries_count):
        entry = &groups.entries[index]
        group = entry.group
        at[group][0] = entry.start
        at[group][1] = entry.end
        at[group] += 2
        if receipt_at[group] != NULL:
            receipt_at[group][0] = entry.extra
            # The receipt id ends where the content begins.
            receipt_at[group][1] = entry.start
            receipt_at[group] += 2


def encode_frames(batches):
    """Each message of the batches as a frame with flag 0 and the topic of its batch."""
    cdef Batch batch
    cdef Py_buffer view
    cdef Py_ssize_t topic_bytes
    cdef const char* topic
    cdef const char* base
    cdef int64_t total = 0
    cdef uint8_t* target
    for batch in batches:
        PyUnicode_AsUTF8AndSize(batch.topic, &topic_bytes)
        total += spans_bytes(batch.buffer, batch.spans)
        total += (len(batch.spans) // 2) * (HEADER_BYTES + topic_bytes)
    frames = PyBytes_FromStringAndSize(NULL, total)
    target = <uint8_t*> PyBytes_AS_STRING(frames)
    for batch in batches:
        topic = PyUnicode_AsUTF8AndSize(batch.topic, &topic_bytes)
        PyObject_GetBuffer(batch.buffer, &view, PyBUF_SIMPLE)
        base = <const char*> view.buf
        target = put_messages(target, topic, topic_bytes, base, batch.spans)
        PyBuffer_Release(&view)
    return frames


cdef int64_t spans_bytes(object buffer, array.array spans) except -1:
    """The total size of the spans; refuse spans outside the buffer."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        return check_spans(&view, spans)
    finally:
        PyBuffer_Release(&view)


cdef inline uint8_t* put_messages(
    uint8_t* target, const char* topic, Py_ssize_t topic_bytes, const char* base, array.array spans
) noexcept:
    """Each span of `base` with its length, and as a frame if there is a topic."""
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index, last = len(spans) - 1
    cdef uint32_t size
    for index in range(0, last, 2):
        size = <uint32_t> (at[index + 1] - at[index])
        if topic == NULL:
            put_int32(target, size)
            target += LENGTH_BYTES
        else:
            if index + AHEAD < last:
                prefetch(base + at[index + AHEAD], size)
            put_header(target, size, <uint32_t> topic_bytes)
            target = put(target + HEADER_BYTES, topic, topic_bytes)
        target = put(target, base + at[index], size)
    return target


def encode_receipts(batches):
    """A `$receipt` frame with `ID EPOCH:OFFSET` for each receipt id of the batches."""
    cdef Batch batch
    cdef int64_t total = 0
    cdef uint8_t* target
    for batch in batches:
        if batch.receipt_ids is not None:
            total += receipts_bytes_max(batch)
    frames = PyBytes_FromStringAndSize(NULL, total)
    target = <uint8_t*> PyBytes_AS_STRING(frames)
    for batch in batches:
        if batch.receipt_ids is not None:
            target = put_receipts(target, batch)
    return frames[: target - <uint8_t*> PyBytes_AS_STRING(frames)]


cdef int64_t receipts_bytes_max(Batch batch) except -1:
    """The size of the receipts at most; refuse ids outside the buffer."""
    cdef uint8_t digits[40]
    cdef Py_ssize_t each, count = len(batch.receipt_ids) // 2
    if batch.epoch < 0 or batch.first_offset < 0:
        raise ValueError("a receipt needs a position")
    # A space, a colon and two numbers; no offset has more digits than the one after the last.
    each = HEADER_BYTES + RECEIPT_TOPIC_BYTES + 2
    each += put_decimal(put_decimal(digits, batch.epoch), batch.first_offset + count) - digits
    return spans_bytes(batch.buffer, batch.receipt_ids) + count * each


cdef uint8_t* put_receipts(uint8_t* target, Batch batch) except NULL:
    cdef Py_buffer view
    cdef const int* at = batch.receipt_ids.data.as_ints
    cdef Py_ssize_t index, same_size
    cdef uint8_t* content
    cdef uint8_t* end
    cdef uint8_t same[24]
    # ` EPOCH:` is the same in all of them.
    same[0] = c" "
    end = put_decimal(same + 1, batch.epoch)
    end[0] = c":"
    same_size = end + 1 - same
    PyObject_GetBuffer(batch.buffer, &view, PyBUF_SIMPLE)
    for index in range(0, len(batch.receipt_ids) - 1, 2):
        if at[index] == at[index + 1]:
            continue
        content = put(target + HEADER_BYTES, b"$receipt", RECEIPT_TOPIC_BYTES)
        end = put(content, <const char*> view.buf + at[index], at[index + 1] - at[index])
        end = put(end, same, same_size)
        end = put_decimal(end, batch.first_offset + index // 2)
        put_header(target, <uint32_t> (end - content), RECEIPT_TOPIC_BYTES)
        target = end
    PyBuffer_Release(&view)
    return target


# Messages that are a head, which they all share, a length and a value: those of Boson properties,
# and of queues, whose head is empty.


cdef inline int64_t value_end(
    const uint8_t* base, int64_t start, int64_t stop, const char* head, Py_ssize_t head_bytes,
    int64_t value_bytes_max,
) noexcept nogil:
    """Where the message at `start` ends; -1 if it is incomplete, too long or has another head."""
    cdef int64_t value = start + head_bytes + LENGTH_BYTES
    cdef int64_t length
    if value > stop or (head_bytes and memcmp(base + start, head, head_bytes) != 0):
        return -1
    length = get_int32(base + value - LENGTH_BYTES)
    if length < 0 or length > value_bytes_max or length > stop - value:
        return -1
    return value + length


def scan_values(
    buffer, Py_ssize_t start, Py_ssize_t stop, bytes head not None, int64_t value_bytes_max
):
    """Scan `buffer[start:stop]` for messages of `head` and one more value (see the twin)."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef const char* shared = PyBytes_AS_STRING(head)
    cdef Py_ssize_t head_bytes = len(head), count = 0, room = 2
    cdef int64_t end
    # Most often there is one message.
    cdef array.array spans = array.clone(INTS, room, zero=False)
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        check_scan(&view, start, stop)
        base = <const uint8_t*> view.buf
        while True:
            end = value_end(base, start, stop, shared, head_bytes, value_bytes_max)
            if end < 0:
                break
            if count == room:
                room = 4 * room + 120
                array.resize(spans, room)
            spans.data.as_ints[count] = <int> (start + head_bytes + LENGTH_BYTES)
            spans.data.as_ints[count + 1] = <int> end
            count += 2
            start = end
    finally:
        PyBuffer_Release(&view)
    if count != room:
        array.resize(spans, count)
    return start, spans


def encode_properties(
    bytes head not None,
    bytes middle not None,
    buffer,
    array.array spans not None,
    int64_t epoch,
    int64_t first_offset,
):
    """Each span of `buffer` as a message: `head`, its position as a value, `middle`, its value."""
    cdef Py_buffer view
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index, size, count = len(spans)
    cdef Py_ssize_t head_bytes = len(head), middle_bytes = len(middle)
    cdef const char* before = PyBytes_AS_STRING(head)
    cdef const char* between = PyBytes_AS_STRING(middle)
    cdef int64_t total
    cdef uint8_t* target
    cdef uint8_t* position
    if epoch < 0 or first_offset < 0:
        raise ValueError("a message needs a position")
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        total = check_spans(&view, spans) + (count // 2) * (
            head_bytes + middle_bytes + 2 * LENGTH_BYTES + POSITION_BYTES_MAX
        )
        messages = bytearray(total)
        target = <uint8_t*> <char*> messages
        for index in range(0, count - 1, 2):
            position = put(target, before, head_bytes) + LENGTH_BYTES
            target = put_decimal(position, epoch)
            target[0] = c":"
            target = put_decimal(target + 1, first_offset + index // 2)
            put_int32(position - LENGTH_BYTES, <uint32_t> (target - position))
            target = put(target, between, middle_bytes)
            size = at[index + 1] - at[index]
            put_int32(target, <uint32_t> size)
            target = put(target + LENGTH_BYTES, <const char*> view.buf + at[index], size)
        return bytes(messages[: target - <uint8_t*> <char*> messages])
    finally:
        PyBuffer_Release(&view)


def split_queue(buffer, Py_ssize_t start, Py_ssize_t stop, int64_t message_bytes_max):
    """Like `scan_values` without a head, with each message as bytes."""
    cdef Py_buffer view
    cdef const char* base
    cdef int64_t end
    cdef list messages = []
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        check_scan(&view, start, stop)
        base = <const char*> view.buf
        while True:
            end = value_end(<const uint8_t*> base, start, stop, NULL, 0, message_bytes_max)
            if end < 0:
                return start, messages
            start += LENGTH_BYTES
            messages.append(PyBytes_FromStringAndSize(base + start, end - start))
            start = end
    finally:
        PyBuffer_Release(&view)


def encode_queue(buffer, array.array spans not None):
    """Each span of `buffer` as a message of a queue."""
    cdef Py_buffer view
    cdef int64_t total
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        total = check_spans(&view, spans) + (len(spans) // 2) * LENGTH_BYTES
        encoded = PyBytes_FromStringAndSize(NULL, total)
        put_messages(
            <uint8_t*> PyBytes_AS_STRING(encoded), NULL, 0, <const char*> view.buf, spans
        )
        return encoded
    finally:
        PyBuffer_Release(&view)


def join_queue(
    list messages not None, Py_ssize_t first, int64_t run_bytes_max, int64_t message_bytes_max
):
    """Encode a run of `messages` from `first` on; return where it ended, and its bytes."""
    cdef Py_ssize_t index, size, stop = first, count = PyList_GET_SIZE(messages)
    cdef int64_t total = 0
    cdef uint8_t* target
    if first < 0:
        raise IndexError("a run must begin inside its list")
    while stop < count:
        message = <object> PyList_GET_ITEM(messages, stop)
        if not isinstance(message, bytes):
            raise TypeError("a message must be bytes")
        size = PyBytes_GET_SIZE(message)
        if size > message_bytes_max or total + LENGTH_BYTES + size > run_bytes_max:
            break
        total += LENGTH_BYTES + size
        stop += 1
    run = PyBytes_FromStringAndSize(NULL, total)
    target = <uint8_t*> PyBytes_AS_STRING(run)
    for index in range(first, stop):
        message = <object> PyList_GET_ITEM(messages, index)
        size = PyBytes_GET_SIZE(message)
        put_int32(target, <uint32_t> size)
        target = put(target + LENGTH_BYTES, PyBytes_AS_STRING(message), size)
    return stop, run
