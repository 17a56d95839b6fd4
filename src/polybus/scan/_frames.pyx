# cython: boundscheck=False, wraparound=False, cdivision=True
"""Boson frames, the loops over every message, compiled. Contract and twin: frames_py.py.

The scan goes over the bytes once. It notes each message's place and the number of its topic's group
in scratch tables, then deals the places out to one array per group. A table of slots finds a topic's group by hash; a
run of one topic never gets there, because each frame is first compared with the one before it.
"""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memchr, memcmp, memcpy, memset

import array
import os

from polybus.scan._batch cimport Batch, new_batch
from polybus.scan._bytes cimport hash_bytes, prefetch, same_bytes

from polybus.scan.frames_py import Group

cdef enum:
    HEADER_BYTES = 7
    MARK_BYTES = 9
    RECEIPT_ID_BYTES_MAX = 255
    RECEIPT_TOPIC_BYTES = 8
    SLOTS_MIN = 64
    AHEAD = 8  # four messages

cdef const char* MARK = b"?receipt="
cdef array.array INTS = array.array("i")
# Nobody outside can choose topics that all land in one slot.
cdef uint64_t SEED = int.from_bytes(os.urandom(8), "little")

cdef struct Place:
    int32_t group
    int32_t start
    int32_t end
    int32_t receipt

cdef struct Found:
    const uint8_t* topic
    int32_t topic_bytes
    uint64_t hash
    int32_t count
    int32_t asked

# Scratch tables, kept between scans. The interpreter lock makes them ours for the time of a scan.
cdef Place* places = NULL
cdef Py_ssize_t places_max = 0
cdef Found* found = NULL
cdef Py_ssize_t found_max = 0
cdef int32_t* slots = NULL
cdef Py_ssize_t slots_max = 0


cdef inline uint32_t be32(const uint8_t* at) noexcept nogil:
    return (<uint32_t> at[0] << 24) | (<uint32_t> at[1] << 16) | (<uint32_t> at[2] << 8) | at[3]


cdef inline void put_header(
    uint8_t* at, uint32_t length, uint32_t topic_bytes
) noexcept nogil:
    at[0] = <uint8_t> (length >> 24)
    at[1] = <uint8_t> (length >> 16)
    at[2] = <uint8_t> (length >> 8)
    at[3] = <uint8_t> length
    at[4] = 0
    at[5] = <uint8_t> (topic_bytes >> 8)
    at[6] = <uint8_t> topic_bytes


cdef int grow_places() except -1:
    global places, places_max
    cdef Py_ssize_t wanted = 4096 if places_max == 0 else places_max * 2
    cdef Place* grown = <Place*> realloc(places, wanted * sizeof(Place))
    if grown == NULL:
        raise MemoryError()
    places = grown
    places_max = wanted
    return 0


cdef int grow_found() except -1:
    global found, found_max
    cdef Py_ssize_t wanted = 32 if found_max == 0 else found_max * 2
    cdef Found* grown = <Found*> realloc(found, wanted * sizeof(Found))
    if grown == NULL:
        raise MemoryError()
    found = grown
    found_max = wanted
    return 0


cdef int rehash(Py_ssize_t groups) except -1:
    """Make the slots at least four times the groups, and enter all groups anew."""
    global slots, slots_max
    cdef Py_ssize_t wanted = SLOTS_MIN if slots_max == 0 else slots_max
    cdef Py_ssize_t group
    cdef uint32_t slot
    while wanted < 4 * groups:
        wanted *= 2
    if wanted != slots_max:
        free(slots)
        slots = NULL
        slots_max = 0
        slots = <int32_t*> calloc(wanted, sizeof(int32_t))
        if slots == NULL:
            raise MemoryError()
        slots_max = wanted
    memset(slots, 0xFF, slots_max * sizeof(int32_t))
    for group in range(groups):
        slot = <uint32_t> found[group].hash & <uint32_t> (slots_max - 1)
        while slots[slot] >= 0:
            slot = (slot + 1) & <uint32_t> (slots_max - 1)
        slots[slot] = <int32_t> group
    return 0


cdef int32_t group_of(
    const uint8_t* topic, int32_t topic_bytes, Py_ssize_t* groups
) except -1:
    """The number of the topic's group, a new one if the scan has not met it."""
    cdef uint64_t hashed = hash_bytes(topic, topic_bytes, SEED)
    cdef uint32_t slot
    cdef Found* one
    if groups[0] == 0 or 2 * groups[0] >= slots_max:
        rehash(groups[0])
    slot = <uint32_t> hashed & <uint32_t> (slots_max - 1)
    while slots[slot] >= 0:
        one = &found[slots[slot]]
        if (
            one.hash == hashed
            and one.topic_bytes == topic_bytes
            and same_bytes(one.topic, topic, topic_bytes)
        ):
            return slots[slot]
        slot = (slot + 1) & <uint32_t> (slots_max - 1)
    if groups[0] == found_max:
        grow_found()
    slots[slot] = <int32_t> groups[0]
    one = &found[groups[0]]
    one.topic = topic
    one.topic_bytes = topic_bytes
    one.hash = hashed
    one.count = 0
    one.asked = 0
    groups[0] += 1
    return <int32_t> (groups[0] - 1)


def scan_frames(
    buffer, Py_ssize_t start, Py_ssize_t stop, int64_t message_bytes_max, int64_t topic_bytes_max
):
    """Scan `buffer[start:stop]` for plain frames; return where it stopped, and them by topic."""
    cdef Py_buffer view
    cdef Py_ssize_t count = 0, groups = 0
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        stop = scan(&view, start, stop, message_bytes_max, topic_bytes_max, &count, &groups)
        return stop, deal(count, groups)
    finally:
        PyBuffer_Release(&view)


def scan_batches(
    buffer,
    Py_ssize_t start,
    Py_ssize_t stop,
    int64_t message_bytes_max,
    int64_t topic_bytes_max,
    dict names not None,
    protocol,
):
    """`scan_frames` with a batch for each topic; None instead if one has no name in `names`."""
    cdef Py_buffer view
    cdef Py_ssize_t count = 0, groups = 0
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        stop = scan(&view, start, stop, message_bytes_max, topic_bytes_max, &count, &groups)
        return stop, deal_batches(count, groups, buffer, names, protocol)
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t scan(
    Py_buffer* view,
    Py_ssize_t start,
    Py_ssize_t stop,
    int64_t message_bytes_max,
    int64_t topic_bytes_max,
    Py_ssize_t* counted,
    Py_ssize_t* grouped,
) except -1:
    """Note the place and group of each frame in the tables; return where the scan stopped."""
    cdef const uint8_t* base
    cdef const uint8_t* topic
    cdef const uint8_t* last_topic = NULL
    cdef const uint8_t* mark
    cdef int32_t last_bytes = -1, topic_bytes, base_bytes, group = -1, receipt
    cdef int32_t length
    cdef int64_t content, end
    cdef Py_ssize_t count = 0, groups = 0
    cdef Place* place
    if stop > 0x7FFFFFFF:
        raise OverflowError("a scan covers at most 2 GiB")
    if start < 0 or stop > view.len:
        raise IndexError("the scan lies outside its buffer")
    base = <const uint8_t*> view.buf
    while stop - start >= HEADER_BYTES:
        length = <int32_t> be32(base + start)
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
                and base_bytes == found[group].topic_bytes
                and same_bytes(topic, found[group].topic, base_bytes)
            ):
                group = group_of(topic, base_bytes, &groups)
            if mark != NULL:
                found[group].asked = 1
                last_bytes = -1
            else:
                last_topic = topic
                last_bytes = topic_bytes
        if count == places_max:
            grow_places()
        place = &places[count]
        place.group = group
        place.start = <int32_t> content
        place.end = <int32_t> end
        place.receipt = receipt
        found[group].count += 1
        count += 1
        start = end
    counted[0] = count
    grouped[0] = groups
    return start


cdef list deal(Py_ssize_t count, Py_ssize_t groups):
    """One Group per topic, in the order of their first messages."""
    cdef list result = []
    cdef Py_ssize_t group
    cdef array.array spans
    cdef array.array receipts
    cdef int** at = NULL
    cdef int** receipt_at = NULL
    if groups == 0:
        return result
    at = <int**> calloc(2 * groups, sizeof(int*))
    if at == NULL:
        raise MemoryError()
    receipt_at = at + groups
    try:
        for group in range(groups):
            spans = array.clone(INTS, 2 * found[group].count, zero=False)
            at[group] = spans.data.as_ints
            receipts = None
            if found[group].asked:
                receipts = array.clone(INTS, 2 * found[group].count, zero=False)
                receipt_at[group] = receipts.data.as_ints
            topic = PyBytes_FromStringAndSize(
                <const char*> found[group].topic, found[group].topic_bytes
            )
            result.append(Group(topic, spans, receipts))
        put_places(count, at, receipt_at)
    finally:
        free(at)
    return result


cdef list deal_batches(
    Py_ssize_t count, Py_ssize_t groups, object buffer, dict names, object protocol
):
    """One Batch per topic, in the order of their first messages; None if one has no name."""
    cdef list result = []
    cdef Py_ssize_t group
    cdef Batch batch
    cdef int** at
    cdef int** receipt_at
    if groups == 0:
        return result
    at = <int**> calloc(2 * groups, sizeof(int*))
    if at == NULL:
        raise MemoryError()
    receipt_at = at + groups
    try:
        for group in range(groups):
            name = names.get(
                PyBytes_FromStringAndSize(
                    <const char*> found[group].topic, found[group].topic_bytes
                )
            )
            if name is None:
                return None
            batch = new_batch(
                name, buffer, array.clone(INTS, 2 * found[group].count, zero=False)
            )
            batch.protocol = protocol
            at[group] = batch.spans.data.as_ints
            if found[group].asked:
                batch.receipt_ids = array.clone(INTS, 2 * found[group].count, zero=False)
                receipt_at[group] = batch.receipt_ids.data.as_ints
            result.append(batch)
        put_places(count, at, receipt_at)
    finally:
        free(at)
    return result


cdef void put_places(Py_ssize_t count, int** at, int** receipt_at) noexcept:
    """Deal the places out to their groups' spans, and receipts' to those that have any."""
    cdef Py_ssize_t index, group
    for index in range(count):
        group = places[index].group
        at[group][0] = places[index].start
        at[group][1] = places[index].end
        at[group] += 2
        if receipt_at[group] != NULL:
            receipt_at[group][0] = places[index].receipt
            # The receipt's id ends where the content begins: the topic is what lies between.
            receipt_at[group][1] = places[index].start
            receipt_at[group] += 2


def encode_frames(bytes topic not None, buffer, array.array spans not None):
    """Each span of `buffer` as a frame with flag 0."""
    frames = PyBytes_FromStringAndSize(NULL, frames_bytes(len(topic), buffer, spans))
    put_frames(
        <uint8_t*> PyBytes_AS_STRING(frames), PyBytes_AS_STRING(topic), len(topic), buffer, spans
    )
    return frames


def encode_frames_of(batches):
    """Each message of the batches as a frame with flag 0 and the topic of its batch."""
    cdef Batch batch
    cdef Py_ssize_t topic_bytes
    cdef const char* topic
    cdef int64_t total = 0
    cdef uint8_t* target
    for batch in batches:
        PyUnicode_AsUTF8AndSize(batch.topic, &topic_bytes)
        total += frames_bytes(topic_bytes, batch.buffer, batch.spans)
    frames = PyBytes_FromStringAndSize(NULL, total)
    target = <uint8_t*> PyBytes_AS_STRING(frames)
    for batch in batches:
        topic = PyUnicode_AsUTF8AndSize(batch.topic, &topic_bytes)
        target = put_frames(target, topic, topic_bytes, batch.buffer, batch.spans)
    return frames


cdef int64_t frames_bytes(Py_ssize_t topic_bytes, object buffer, array.array spans) except -1:
    """The size of messages as frames; refuses spans that lie outside the buffer."""
    cdef Py_ssize_t count = len(spans) // 2
    return spans_bytes(buffer, spans) + count * (HEADER_BYTES + topic_bytes)


cdef int64_t spans_bytes(object buffer, array.array spans) except -1:
    cdef Py_buffer view
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index
    cdef int64_t total = 0
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        for index in range(0, len(spans) - 1, 2):
            if at[index] < 0 or at[index + 1] < at[index] or at[index + 1] > view.len:
                raise IndexError("a span lies outside its buffer")
            total += at[index + 1] - at[index]
    finally:
        PyBuffer_Release(&view)
    return total


cdef uint8_t* put_frames(
    uint8_t* target, const char* topic, Py_ssize_t topic_bytes, object buffer, array.array spans
) except NULL:
    cdef Py_buffer view
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index, last = len(spans) - 1
    cdef uint32_t size
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    for index in range(0, last, 2):
        if index + AHEAD < last:
            prefetch(<const char*> view.buf + at[index + AHEAD], at[index + 1] - at[index])
        size = <uint32_t> (at[index + 1] - at[index])
        put_header(target, size, <uint32_t> topic_bytes)
        target += HEADER_BYTES
        memcpy(target, topic, topic_bytes)
        target += topic_bytes
        memcpy(target, <const char*> view.buf + at[index], size)
        target += size
    PyBuffer_Release(&view)
    return target


cdef inline Py_ssize_t put_decimal(uint8_t* at, int64_t number) noexcept nogil:
    cdef uint8_t digits[20]
    cdef Py_ssize_t size = 0, index
    while True:
        digits[size] = <uint8_t> (48 + number % 10)
        size += 1
        number //= 10
        if number == 0:
            break
    for index in range(size):
        at[index] = digits[size - 1 - index]
    return size


def encode_receipts(buffer, array.array ids not None, int64_t epoch, int64_t first_offset):
    """A `$receipt` frame with `ID EPOCH:OFFSET` for each id; an empty id gives none."""
    cdef uint8_t* target
    frames = PyBytes_FromStringAndSize(NULL, receipts_bytes_max(buffer, ids, epoch, first_offset))
    target = <uint8_t*> PyBytes_AS_STRING(frames)
    target = put_receipts(target, buffer, ids, epoch, first_offset)
    return frames[: target - <uint8_t*> PyBytes_AS_STRING(frames)]


def encode_receipts_of(batches):
    """`encode_receipts` for every batch that owes any, end to end."""
    cdef Batch batch
    cdef int64_t total = 0
    cdef uint8_t* target
    for batch in batches:
        if batch.receipt_ids is not None:
            total += receipts_bytes_max(
                batch.buffer, batch.receipt_ids, batch.epoch, batch.first_offset
            )
    frames = PyBytes_FromStringAndSize(NULL, total)
    target = <uint8_t*> PyBytes_AS_STRING(frames)
    for batch in batches:
        if batch.receipt_ids is not None:
            target = put_receipts(
                target, batch.buffer, batch.receipt_ids, batch.epoch, batch.first_offset
            )
    return frames[: target - <uint8_t*> PyBytes_AS_STRING(frames)]


cdef int64_t receipts_bytes_max(
    object buffer, array.array ids, int64_t epoch, int64_t first_offset
) except -1:
    """What the receipts take at most; refuses ids that lie outside the buffer."""
    cdef uint8_t digits[20]
    cdef Py_ssize_t each, count = len(ids) // 2
    if epoch < 0 or first_offset < 0:
        raise ValueError("a receipt needs a position")
    # A space, a colon and two numbers; no offset has more digits than one past the last.
    each = HEADER_BYTES + RECEIPT_TOPIC_BYTES + 2
    each += put_decimal(digits, epoch) + put_decimal(digits, first_offset + count)
    return spans_bytes(buffer, ids) + count * each


cdef uint8_t* put_receipts(
    uint8_t* target, object buffer, array.array ids, int64_t epoch, int64_t first_offset
) except NULL:
    cdef Py_buffer view
    cdef const int* at = ids.data.as_ints
    cdef Py_ssize_t index, size, same_size
    cdef uint8_t* content
    cdef uint8_t same[24]
    # ` EPOCH:` is the same in all of them.
    same[0] = c" "
    same_size = 1 + put_decimal(same + 1, epoch)
    same[same_size] = c":"
    same_size += 1
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    for index in range(0, len(ids) - 1, 2):
        size = at[index + 1] - at[index]
        if size == 0:
            continue
        content = target + HEADER_BYTES + RECEIPT_TOPIC_BYTES
        memcpy(target + HEADER_BYTES, b"$receipt", RECEIPT_TOPIC_BYTES)
        memcpy(content, <const char*> view.buf + at[index], size)
        memcpy(content + size, same, same_size)
        size += same_size
        size += put_decimal(content + size, first_offset + index // 2)
        put_header(target, <uint32_t> size, RECEIPT_TOPIC_BYTES)
        target = content + size
    PyBuffer_Release(&view)
    return target
