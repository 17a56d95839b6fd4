# cython: boundscheck=False, wraparound=False, cdivision=True
"""A batch as a msgstream pack's content, compiled. Contract, rules and twin: packs_py.py."""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.math cimport isinf
from libc.stdint cimport int32_t, uint8_t
from libc.stdlib cimport free, malloc, strtod
from libc.string cimport memcmp, memcpy

from polybus.scan._bytes cimport check_spans, put
from polybus.scan._text cimport (
    QUOTE, escaped_size, is_space, put_base64, put_escaped, string_end,
)

cdef enum:
    NUMBER_BYTES_MAX = 300
    # The largest double has 309 digits before its point.
    DOUBLE_DIGITS_MAX = 309

cdef enum Expected:
    VALUE
    VALUE_OR_END
    KEY
    KEY_OR_END
    COLON
    AFTER

cdef enum Kind:
    JSON
    SPACED_JSON
    TEXT
    BASE64

cdef struct Payload:
    Kind kind
    Py_ssize_t size


cdef inline bint is_digit(uint8_t byte) noexcept nogil:
    return c"0" <= byte <= c"9"


cdef inline Py_ssize_t string_size(const uint8_t* at, Py_ssize_t left) noexcept nogil:
    """The length of the JSON string at `at`, quotes included; 0 if it is invalid."""
    cdef int32_t escaped
    cdef const uint8_t* end = string_end(at + 1, at + left, &escaped)
    return 0 if end == NULL else end + 1 - at


cdef bint is_finite(const uint8_t* at, Py_ssize_t size) noexcept nogil:
    """Whether a number, given as text of limited length, is finite as a double."""
    cdef char text[NUMBER_BYTES_MAX + 1]
    memcpy(text, at, size)
    text[size] = 0
    return not isinf(strtod(text, NULL))


cdef Py_ssize_t number_size(const uint8_t* at, Py_ssize_t left) noexcept nogil:
    """The length of the JSON number at `at`; 0 if it is invalid, too long or too large."""
    cdef Py_ssize_t done = 0, digits, exponent = 0, begin
    cdef bint negative = False
    if at[0] == c"-":
        done = 1
    begin = done
    while done < left and is_digit(at[done]):
        done += 1
    digits = done - begin
    if digits == 0 or (digits > 1 and at[begin] == c"0"):
        return 0
    if done < left and at[done] == c".":
        begin = done + 1
        done = begin
        while done < left and is_digit(at[done]):
            done += 1
        if done == begin:
            return 0
    if done < left and (at[done] | 0x20) == c"e":
        done += 1
        if done < left and (at[done] == c"+" or at[done] == c"-"):
            negative = at[done] == c"-"
            done += 1
        begin = done
        while done < left and is_digit(at[done]):
            if exponent < 100_000:
                exponent = exponent * 10 + at[done] - c"0"
            done += 1
        if done == begin:
            return 0
    if done > NUMBER_BYTES_MAX:
        return 0
    if not negative and digits + exponent >= DOUBLE_DIGITS_MAX and not is_finite(at, done):
        return 0
    return done


cdef inline Py_ssize_t literal_size(const uint8_t* at, Py_ssize_t left) noexcept nogil:
    """The length of `true`, `false` or `null`; 0 for anything else."""
    if left >= 4 and (memcmp(at, b"true", 4) == 0 or memcmp(at, b"null", 4) == 0):
        return 4
    if left >= 5 and memcmp(at, b"false", 5) == 0:
        return 5
    return 0


cdef inline Py_ssize_t scalar_size(const uint8_t* at, Py_ssize_t left) noexcept nogil:
    if at[0] == QUOTE:
        return string_size(at, left)
    if at[0] == c"-" or is_digit(at[0]):
        return number_size(at, left)
    return literal_size(at, left)


cdef Py_ssize_t compact_size(
    const uint8_t* at, Py_ssize_t left, uint8_t* opened, Py_ssize_t depth_max
) noexcept nogil:
    """The length of a JSON value without white space; -1 if it is not JSON, or too deep."""
    cdef Py_ssize_t total = 0, depth = 0, size
    cdef Expected expected = VALUE
    cdef uint8_t byte
    while left > 0:
        byte = at[0]
        size = 1
        if is_space(byte):
            at += 1
            left -= 1
            continue
        if expected == AFTER:
            if depth == 0:
                return -1
            if byte == c",":
                expected = KEY if opened[depth - 1] == c"{" else VALUE
            elif opened[depth - 1] + 2 == byte:
                # `{` and `}` are two apart in ASCII, and so are `[` and `]`.
                depth -= 1
            else:
                return -1
        elif expected == COLON:
            if byte != c":":
                return -1
            expected = VALUE
        elif (expected == KEY_OR_END and byte == c"}") or (
            expected == VALUE_OR_END and byte == c"]"
        ):
            depth -= 1
            expected = AFTER
        elif expected == KEY or expected == KEY_OR_END:
            size = string_size(at, left) if byte == QUOTE else 0
            expected = COLON
        elif byte == c"{" or byte == c"[":
            if depth == depth_max:
                return -1
            opened[depth] = byte
            depth += 1
            expected = KEY_OR_END if byte == c"{" else VALUE_OR_END
        else:
            size = scalar_size(at, left)
            expected = AFTER
        if size == 0:
            return -1
        at += size
        left -= size
        total += size
    return total if depth == 0 and expected == AFTER else -1


cdef uint8_t* put_compact(uint8_t* to, const uint8_t* at, Py_ssize_t size) noexcept nogil:
    """Write a valid JSON value without white space; return the position after it."""
    cdef const uint8_t* end = at + size
    cdef Py_ssize_t string
    while at < end:
        if at[0] == QUOTE:
            string = string_size(at, end - at)
            memcpy(to, at, string)
            at += string
            to += string
        else:
            if not is_space(at[0]):
                to[0] = at[0]
                to += 1
            at += 1
    return to


cdef Payload measure(
    const uint8_t* at, Py_ssize_t size, uint8_t* opened, Py_ssize_t depth_max
) noexcept nogil:
    """The kind and size of a value's payload."""
    cdef Payload payload
    payload.size = compact_size(at, size, opened, depth_max)
    if payload.size >= 0:
        payload.kind = JSON if payload.size == size else SPACED_JSON
        return payload
    payload.size = escaped_size(at, size)
    if payload.size >= 0:
        payload.kind = TEXT
        payload.size += 2
        return payload
    payload.kind = BASE64
    # `{"base64":"` and `"}` are 13 bytes.
    payload.size = (size + 2) // 3 * 4 + 13
    return payload


cdef uint8_t* put_payload(
    uint8_t* to, Payload* payload, const uint8_t* at, Py_ssize_t size
) noexcept nogil:
    if payload.kind == JSON:
        return put(to, at, size)
    if payload.kind == SPACED_JSON:
        return put_compact(to, at, size)
    if payload.kind == BASE64:
        to = put(to, b'{"base64":"', 11)
        return put(put_base64(to, at, size), b'"}', 2)
    to = put(to, b'"', 1)
    if payload.size == size + 2:
        to = put(to, at, size)
    else:
        to = put_escaped(to, at, size)
    return put(to, b'"', 1)


def encode_pack(
    bytes head not None, buffer, array.array spans not None, Py_ssize_t depth_max
):
    """Each span of `buffer` as a message, in one list: `[`, `head` payload `]`, …, `]`."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index, total = 2, head_bytes = len(head), count = len(spans) // 2
    cdef const char* head_at = PyBytes_AS_STRING(head)
    cdef Payload* payloads = NULL
    cdef uint8_t* opened = NULL
    cdef uint8_t* to
    if depth_max < 0:
        raise ValueError("depth_max cannot be negative")
    if count == 0:
        return b"[]"
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        payloads = <Payload*> malloc(count * sizeof(Payload))
        opened = <uint8_t*> malloc(depth_max + 1)
        if payloads == NULL or opened == NULL:
            raise MemoryError()
        check_spans(&view, spans)
        base = <const uint8_t*> view.buf
        for index in range(count):
            payloads[index] = measure(
                base + at[2 * index], at[2 * index + 1] - at[2 * index], opened, depth_max
            )
            total += payloads[index].size
        # A bracket after each message, a comma between two.
        total += count * (head_bytes + 2) - 1
        pack = PyBytes_FromStringAndSize(NULL, total)
        to = put(<uint8_t*> PyBytes_AS_STRING(pack), b"[", 1)
        for index in range(count):
            if index:
                to = put(to, b",", 1)
            to = put(to, head_at, head_bytes)
            to = put_payload(
                to, &payloads[index], base + at[2 * index], at[2 * index + 1] - at[2 * index]
            )
            to = put(to, b"]", 1)
        put(to, b"]", 1)
        return pack
    finally:
        free(payloads)
        free(opened)
        PyBuffer_Release(&view)


def compact_json(bytes value not None, Py_ssize_t depth_max):
    """The value without white space if it is JSON, else None."""
    cdef const uint8_t* at = <const uint8_t*> PyBytes_AS_STRING(value)
    cdef Py_ssize_t size
    cdef uint8_t* opened
    if depth_max < 0:
        raise ValueError("depth_max cannot be negative")
    opened = <uint8_t*> malloc(depth_max + 1)
    if opened == NULL:
        raise MemoryError()
    size = compact_size(at, len(value), opened, depth_max)
    free(opened)
    if size < 0:
        return None
    if size == len(value):
        return value
    compact = PyBytes_FromStringAndSize(NULL, size)
    put_compact(<uint8_t*> PyBytes_AS_STRING(compact), at, len(value))
    return compact
