"""Helpers that the scanners call for every message: all are inlined, with few branches."""

from cpython cimport array
from cpython.object cimport Py_SIZE
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    #if defined(__GNUC__)
    #define POLYBUS_PREFETCH(at) __builtin_prefetch(at)
    #else
    #define POLYBUS_PREFETCH(at) ((void)(at))
    #endif

    static inline uint64_t polybus_load(const uint8_t *at) {
        uint64_t word;
        memcpy(&word, at, 8);
        return word;
    }

    static inline uint64_t polybus_mix(uint64_t word) {
        word ^= word >> 32;
        word *= 0xd6e8feb86659fd93ULL;
        word ^= word >> 32;
        word *= 0xd6e8feb86659fd93ULL;
        return word ^ (word >> 32);
    }

    /* The last word of a long name may overlap the previous one. */
    static inline uint64_t polybus_hash(const uint8_t *at, size_t size, uint64_t seed) {
        uint64_t hash = seed ^ size, word = 0;
        size_t done;
        if (size < 8) {
            memcpy(&word, at, size);
            return polybus_mix(hash ^ word);
        }
        for (done = 0; done + 8 < size; done += 8)
            hash = polybus_mix(hash ^ polybus_load(at + done));
        return polybus_mix(hash ^ polybus_load(at + size - 8));
    }

    /* Names mostly differ at their ends, so the ends are compared first. */
    static inline int polybus_same(const uint8_t *one, const uint8_t *other, size_t size) {
        if (size < 8 || size > 16)
            return memcmp(one, other, size) == 0;
        return polybus_load(one + size - 8) == polybus_load(other + size - 8)
            && polybus_load(one) == polybus_load(other);
    }

    /* Messages to copy lie far apart; this loads the next one into the cache. */
    static inline void polybus_prefetch(const char *at, size_t size) {
        POLYBUS_PREFETCH(at);
        if (size > 64)
            POLYBUS_PREFETCH(at + 64);
    }
    """
    uint64_t hash_bytes "polybus_hash"(const uint8_t* at, size_t size, uint64_t seed) noexcept nogil
    bint same_bytes "polybus_same"(
        const uint8_t* one, const uint8_t* other, size_t size
    ) noexcept nogil
    void prefetch "polybus_prefetch"(const char* at, size_t size) noexcept nogil


cdef inline int32_t get_int32(const uint8_t* at) noexcept nogil:
    """Read a big-endian int32."""
    return <int32_t> (
        (<uint32_t> at[0] << 24) | (<uint32_t> at[1] << 16) | (<uint32_t> at[2] << 8) | at[3]
    )


cdef inline void put_int32(uint8_t* at, uint32_t number) noexcept nogil:
    at[0] = <uint8_t> (number >> 24)
    at[1] = <uint8_t> (number >> 16)
    at[2] = <uint8_t> (number >> 8)
    at[3] = <uint8_t> number


cdef inline uint8_t* put(uint8_t* to, const void* source, Py_ssize_t size) noexcept nogil:
    """Copy bytes; return the position after them."""
    memcpy(to, source, size)
    return to + size


cdef inline uint8_t* put_decimal(uint8_t* at, uint64_t number) noexcept nogil:
    """Write a number in decimal; return the position after it."""
    cdef uint8_t digits[20]
    cdef Py_ssize_t size = 0, index
    # Unsigned, because this header has no cdivision directive.
    while True:
        digits[size] = <uint8_t> (48 + number % 10)
        size += 1
        number //= 10
        if number == 0:
            break
    for index in range(size):
        at[index] = digits[size - 1 - index]
    return at + size


cdef inline int check_scan(const Py_buffer* view, Py_ssize_t start, Py_ssize_t stop) except -1:
    """Refuse a range outside the buffer, and offsets that do not fit a C int."""
    if stop > 0x7FFFFFFF:
        raise OverflowError("a scan covers at most 2 GiB")
    if start < 0 or stop > view.len:
        raise IndexError("the scan range is outside its buffer")
    return 0


cdef inline int64_t check_spans(const Py_buffer* view, array.array spans) except -1:
    """The total size of the spans; refuse spans outside the buffer."""
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index
    cdef int64_t total = 0
    for index in range(0, len(spans) - 1, 2):
        if at[index] < 0 or at[index + 1] < at[index] or at[index + 1] > view.len:
            raise IndexError("a span is outside its buffer")
        total += at[index + 1] - at[index]
    return total


cdef inline Py_ssize_t count_of(array.array spans) noexcept:
    """The number of spans; `len` of an array is a call."""
    return Py_SIZE(spans) // 2


cdef inline int64_t bytes_of(array.array spans) noexcept:
    """The total size of the spans."""
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index
    cdef int64_t total = 0
    for index in range(0, Py_SIZE(spans) - 1, 2):
        total += at[index + 1] - at[index]
    return total


cdef inline Py_ssize_t count_filled(array.array spans) noexcept:
    """The number of spans that are not empty."""
    cdef const int* at = spans.data.as_ints
    cdef Py_ssize_t index, count = 0
    for index in range(0, Py_SIZE(spans) - 1, 2):
        count += at[index + 1] > at[index]
    return count


# Values

cdef struct Part:
    Py_buffer view
    const int* spans
    Py_ssize_t length


cdef inline bint copy_parts(
    Part* all_parts, Py_ssize_t parts, char* target, int32_t* ends
) noexcept nogil:
    """Copy all spans, whose sizes are checked; False if one is outside its buffer."""
    cdef Py_ssize_t part, index
    cdef const char* source
    cdef const int* at
    cdef int32_t end = 0
    cdef int size
    for part in range(parts):
        at = all_parts[part].spans
        source = <const char*> all_parts[part].view.buf
        for index in range(0, all_parts[part].length, 2):
            if at[index + 1] > all_parts[part].view.len:
                return False
            # Four messages ahead.
            if index + 8 < all_parts[part].length:
                prefetch(source + at[index + 8], at[index + 1] - at[index])
            size = at[index + 1] - at[index]
            memcpy(target, source + at[index], size)
            target += size
            end += size
            ends[0] = end
            ends += 1
    return True


cdef inline void end_parts(Part* all_parts, Py_ssize_t parts, int32_t* ends) noexcept nogil:
    """Only the ends of the spans, as if they were copied."""
    cdef Py_ssize_t part, index
    cdef const int* at
    cdef int32_t end = 0
    for part in range(parts):
        at = all_parts[part].spans
        for index in range(0, all_parts[part].length, 2):
            end += at[index + 1] - at[index]
            ends[0] = end
            ends += 1


# 64-bit numbers

cdef inline int append_long(array.array numbers, int64_t number) except -1:
    array.resize_smart(numbers, Py_SIZE(numbers) + 1)
    numbers.data.as_longlongs[Py_SIZE(numbers) - 1] = number
    return 0


cdef inline object field(part, Py_ssize_t index):
    """An item of a tuple, which exists; for a named tuple, `part[index]` is slow."""
    return <object> PyTuple_GET_ITEM(part, index)


cdef inline int add_entry(array.array entries, part, int64_t position, int64_t size) except -1:
    """Add a commit to a topic's index; the time is the maximum so far: clocks may be set back."""
    cdef int64_t latest = field(part, 7)
    cdef Py_ssize_t end = Py_SIZE(entries)
    cdef int64_t* entry
    if end and entries.data.as_longlongs[end - 1] > latest:
        latest = entries.data.as_longlongs[end - 1]
    array.resize_smart(entries, end + 6)
    entry = <int64_t*> entries.data.as_longlongs + end
    entry[0] = field(part, 3)
    entry[1] = field(part, 4)
    entry[2] = position
    entry[3] = size
    entry[4] = field(part, 5)
    entry[5] = latest
    return 0
