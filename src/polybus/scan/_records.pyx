# cython: boundscheck=False, wraparound=False, cdivision=True
"""Messages as records of Kafka, compiled. Contract and twin: records_py.py."""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy

import array

from polybus.scan.batch cimport Batch, new_batch

from polybus.scan import records_py

cdef enum:
    # Attributes, and the longest numbers: size, time, offset, key, value, count of headers.
    RECORD_BYTES = 1 + 5 + 10 + 5 + 5 + 5 + 5

cdef array.array INTS = array.array("i")
cdef bytes PROTOCOL_HEADER = records_py.PROTOCOL_HEADER
cdef bytes SENDER_HEADER = records_py.SENDER_HEADER
cdef str FOREIGN_PROTOCOL = records_py.FOREIGN_PROTOCOL
cdef str MALFORMED = records_py.MALFORMED


cdef inline uint8_t* put_varint(uint8_t* at, int64_t number) noexcept nogil:
    cdef uint64_t rest = (<uint64_t> number << 1) ^ <uint64_t> (number >> 63)
    while rest >= 0x80:
        at[0] = <uint8_t> (rest | 0x80)
        rest >>= 7
        at += 1
    at[0] = <uint8_t> rest
    return at + 1


cdef inline int size_of_varint(int64_t number) noexcept nogil:
    cdef uint64_t rest = (<uint64_t> number << 1) ^ <uint64_t> (number >> 63)
    cdef int size = 1
    while rest >= 0x80:
        rest >>= 7
        size += 1
    return size


cdef inline uint8_t* put_bytes(uint8_t* at, const void* value, Py_ssize_t size) noexcept nogil:
    at = put_varint(at, size)
    memcpy(at, value, size)
    return at + size


cdef bytes header_of(bytes name, bytes value):
    cdef Py_ssize_t size = PyBytes_GET_SIZE(name) + PyBytes_GET_SIZE(value)
    size += size_of_varint(PyBytes_GET_SIZE(name)) + size_of_varint(PyBytes_GET_SIZE(value))
    cdef bytes header = PyBytes_FromStringAndSize(NULL, size)
    cdef uint8_t* at = <uint8_t*> PyBytes_AS_STRING(header)
    at = put_bytes(at, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
    put_bytes(at, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
    return header


cdef int64_t bytes_max(Batch batch, bytes reserved) except -1:
    """The size that the batch's records have at most; refuses spans outside the buffer."""
    cdef const int* spans = batch.spans.data.as_ints
    cdef Py_ssize_t index, count = len(batch.spans) // 2
    cdef int64_t total = count * (RECORD_BYTES + PyBytes_GET_SIZE(reserved))
    cdef Py_ssize_t inside = memoryview(batch.buffer).nbytes
    for index in range(count):
        if not 0 <= spans[2 * index] <= spans[2 * index + 1] <= inside:
            raise IndexError("a span is outside its buffer")
        total += spans[2 * index + 1] - spans[2 * index]
    if batch.keys is not None:
        for key in batch.keys:
            total += 0 if key is None else len(key)
    return total


cdef list own_headers(Batch batch):
    """For each message the number of its headers and their bytes; None if there are none."""
    if batch.headers is None:
        return None
    found = []
    for headers in batch.headers:
        if headers:
            parts = [header_of(name.encode(), bytes(one)) for name, one in headers.items()]
            found.append((len(parts), b"".join(parts)))
        else:
            found.append((0, b""))
    return found


cdef uint8_t* put_batch(
    uint8_t* at, Batch batch, bytes reserved, list extra, int64_t time, int64_t first
) except NULL:
    cdef const int* spans = batch.spans.data.as_ints
    cdef Py_ssize_t index, count = len(batch.spans) // 2, key_size, size, value_size
    cdef Py_ssize_t reserved_size = PyBytes_GET_SIZE(reserved), extra_size = 0
    cdef int64_t header_count = 2
    cdef const char* reserved_at = PyBytes_AS_STRING(reserved)
    cdef int time_size = size_of_varint(time)
    cdef bytes key = None, own = None
    cdef Py_buffer view
    PyObject_GetBuffer(batch.buffer, &view, PyBUF_SIMPLE)
    try:
        for index in range(count):
            key_size = -1
            if batch.keys is not None:
                key = batch.keys[index]
                if key is not None:
                    key_size = PyBytes_GET_SIZE(key)
            if extra is not None:
                header_count, own = extra[index]
                header_count += 2
                extra_size = PyBytes_GET_SIZE(own)
            value_size = spans[2 * index + 1] - spans[2 * index]
            size = 1 + time_size + size_of_varint(first + index) + size_of_varint(key_size)
            size += max(key_size, 0) + size_of_varint(value_size) + value_size
            size += size_of_varint(header_count) + reserved_size + extra_size
            at = put_varint(at, size)
            at[0] = 0
            at = put_varint(at + 1, time)
            at = put_varint(at, first + index)
            if key_size < 0:
                at = put_varint(at, -1)
            else:
                at = put_bytes(at, PyBytes_AS_STRING(key), key_size)
            at = put_bytes(at, <char*> view.buf + spans[2 * index], value_size)
            at = put_varint(at, header_count)
            memcpy(at, reserved_at, reserved_size)
            at += reserved_size
            if extra_size:
                memcpy(at, PyBytes_AS_STRING(own), extra_size)
                at += extra_size
    finally:
        PyBuffer_Release(&view)
    return at


def encode_records(batches, int64_t base_ms):
    """The messages of batches as records, one after the other; times count from `base_ms`."""
    cdef Batch batch
    cdef bytes reserved
    cdef int64_t total = 0, first = 0
    cdef list parts = []
    cdef list extra
    for batch in batches:
        reserved = header_of(PROTOCOL_HEADER, batch.protocol.encode())
        reserved += header_of(SENDER_HEADER, batch.sender.encode())
        extra = own_headers(batch)
        total += bytes_max(batch, reserved)
        if extra is not None:
            for _, own in extra:
                total += len(own)
        parts.append((batch, reserved, extra))
    out = bytearray()
    PyByteArray_Resize(out, total)
    cdef uint8_t* start = <uint8_t*> PyByteArray_AS_STRING(out)
    cdef uint8_t* at = start
    for batch, reserved, extra in parts:
        at = put_batch(at, batch, reserved, extra, batch.timestamp_us // 1000 - base_ms, first)
        first += len(batch.spans) // 2
    PyByteArray_Resize(out, at - start)
    return out


cdef class Walk:
    """A position in the records; whatever lies outside them is malformed."""

    cdef const uint8_t* start
    cdef const uint8_t* at
    cdef const uint8_t* end

    cdef int64_t varint(self) except? -1:
        cdef uint64_t number = 0
        cdef int shift = 0
        cdef uint8_t byte
        while True:
            if self.at >= self.end or shift > 63:
                raise ValueError(MALFORMED)
            byte = self.at[0]
            self.at += 1
            number |= <uint64_t> (byte & 0x7F) << shift
            if byte < 0x80:
                return <int64_t> (number >> 1) ^ -<int64_t> (number & 1)
            shift += 7

    cdef const uint8_t* sized(self, Py_ssize_t* size) except? NULL:
        """The next bytes; `size` is -1 if they are null."""
        cdef int64_t length = self.varint()
        cdef const uint8_t* found = self.at
        if length < -1 or length > self.end - self.at:
            raise ValueError(MALFORMED)
        size[0] = length
        if length > 0:
            self.at += length
        return found


cdef bytes copied(const uint8_t* at, Py_ssize_t size):
    return PyBytes_FromStringAndSize(<char*> at, max(size, 0))


cdef str text_of(const uint8_t* at, Py_ssize_t size):
    return PyUnicode_DecodeUTF8(<char*> at, max(size, 0), "replace")


cdef class RecordRun:
    """Messages of equal protocol, sender and time without a gap, which become one batch."""

    cdef array.array spans
    cdef Py_ssize_t count
    cdef list keys, headers
    cdef const uint8_t* protocol
    cdef const uint8_t* sender
    cdef Py_ssize_t protocol_size, sender_size
    cdef int64_t time_us, first_offset

    cdef bint continues(self, RecordRun other) noexcept:
        """Whether `other`, with no messages yet, is the same run."""
        if self.time_us != other.time_us or self.first_offset + self.count != other.first_offset:
            return False
        if self.protocol_size != other.protocol_size or self.sender_size != other.sender_size:
            return False
        if self.protocol_size > 0 and memcmp(self.protocol, other.protocol, self.protocol_size):
            return False
        return self.sender_size <= 0 or not memcmp(self.sender, other.sender, self.sender_size)

    cdef Batch batch(self, topic, data):
        array.resize(self.spans, 2 * self.count)
        cdef Batch batch = new_batch(topic, data, self.spans)
        batch.timestamp_us = self.time_us
        batch.first_offset = self.first_offset
        batch.protocol = FOREIGN_PROTOCOL
        if self.protocol_size >= 0:
            batch.protocol = text_of(self.protocol, self.protocol_size)
            batch.sender = text_of(self.sender, self.sender_size)
        if self.keys is not None:
            batch.keys = self.keys + [None] * (self.count - len(self.keys))
        if self.headers is not None:
            batch.headers = self.headers + [None] * (self.count - len(self.headers))
        return batch


cdef bint is_named(const uint8_t* at, Py_ssize_t size, bytes name) noexcept:
    return size == PyBytes_GET_SIZE(name) and not memcmp(at, PyBytes_AS_STRING(name), size)


cdef dict read_headers(Walk walk, RecordRun record):
    """Set the record's protocol and sender; return its own headers."""
    cdef int64_t count = walk.varint(), index
    cdef const uint8_t* name
    cdef const uint8_t* value
    cdef const uint8_t* first
    cdef Py_ssize_t name_size, value_size, first_size
    cdef dict own = None
    record.protocol_size = record.sender_size = -1
    if count < 0 or count > walk.end - walk.at:
        raise ValueError(MALFORMED)
    cdef bint is_ours = False
    for index in range(count):
        name = walk.sized(&name_size)
        value = walk.sized(&value_size)
        if index == 0 and count > 1 and is_named(name, name_size, PROTOCOL_HEADER):
            # Ours only if the sender comes next.
            first, first_size, is_ours = value, value_size, True
            continue
        if index == 1 and is_ours:
            if is_named(name, name_size, SENDER_HEADER):
                record.protocol, record.protocol_size = first, max(first_size, 0)
                record.sender, record.sender_size = value, max(value_size, 0)
                continue
            own = {PROTOCOL_HEADER.decode(): copied(first, first_size)}
        if own is None:
            own = {}
        own[text_of(name, name_size)] = copied(value, value_size)
    return own


def decode_records(str topic, data, Py_ssize_t count, int64_t first_offset, int64_t base_ms):
    """Records as batches over `data`: one for each run of equal protocol, sender and time."""
    cdef Py_buffer view
    cdef Walk walk = Walk.__new__(Walk)
    cdef RecordRun run = None, record = RecordRun.__new__(RecordRun)
    cdef Py_ssize_t key_size, value_size, index
    cdef int64_t size
    cdef const uint8_t* key
    cdef const uint8_t* value
    cdef const uint8_t* end
    cdef dict own
    found = []
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        walk.start = walk.at = <const uint8_t*> view.buf
        walk.end = walk.start + view.len
        for index in range(count):
            size = walk.varint()
            if size < 1 or size > walk.end - walk.at:
                raise ValueError(MALFORMED)
            end = walk.at + size
            walk.at += 1
            record.time_us = (base_ms + walk.varint()) * 1000
            record.first_offset = first_offset + walk.varint()
            key = walk.sized(&key_size)
            value = walk.sized(&value_size)
            own = read_headers(walk, record)
            if walk.at != end:
                raise ValueError(MALFORMED)
            if run is None or not run.continues(record):
                if run is not None:
                    found.append(run.batch(topic, data))
                run, record = record, RecordRun.__new__(RecordRun)
                run.spans = array.clone(INTS, 2 * min(count - index, view.len), zero=False)
            run.spans.data.as_ints[2 * run.count] = value - walk.start
            run.spans.data.as_ints[2 * run.count + 1] = value - walk.start + max(value_size, 0)
            if key_size >= 0:
                if run.keys is None:
                    run.keys = []
                run.keys += [None] * (run.count - len(run.keys))
                run.keys.append(copied(key, key_size))
            if own:
                if run.headers is None:
                    run.headers = []
                run.headers += [None] * (run.count - len(run.headers))
                run.headers.append(own)
            run.count += 1
        if run is not None:
            found.append(run.batch(topic, data))
    finally:
        PyBuffer_Release(&view)
    return found
