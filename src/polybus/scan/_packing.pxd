"""Packing runs of equal values as LZ4 without searching for matches: see `pack_runs` in rows_py.py.

Nothing here needs the interpreter's lock.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

# As in rows_py.py, whose results a test compares with these.
cdef enum:
    BLOCK_BYTES_MAX = 2097152
    PACKED_BYTES_MIN = 64
    MATCH_DISTANCE_MAX = 65535
    MATCH_BYTES_MIN = 4
    LITERALS_LAST = 12


cdef struct Run:
    const char* value
    Py_ssize_t size
    Py_ssize_t count


cdef struct Column:
    Run* runs
    Py_ssize_t length
    int64_t size
    Py_ssize_t longest


cdef inline bint is_packable(const Column* column) noexcept nogil:
    return column.size >= PACKED_BYTES_MIN and column.longest <= MATCH_DISTANCE_MAX


@cython.cdivision(True)
cdef inline Py_ssize_t literals_max(const Column* column) noexcept nogil:
    """The most bytes that a packed column has beside the lengths of its matches."""
    cdef Py_ssize_t index, most = 0
    # Only a run that two blocks share has its value in both.
    cdef Py_ssize_t blocks = column.size // (BLOCK_BYTES_MAX - MATCH_DISTANCE_MAX) + 1
    for index in range(column.length):
        most += column.runs[index].size + 32
    return most + blocks * (column.longest + 128)


@cython.cdivision(True)
cdef inline Py_ssize_t packed_max(const Column* column) noexcept nogil:
    cdef Py_ssize_t most
    if not is_packable(column):
        return column.size + 8
    # A length takes a byte per 255.
    most = literals_max(column)
    return most + most // 255 + column.size // 255 + 64


cdef inline char* put(char* target, const void* source, Py_ssize_t size) noexcept nogil:
    """Copy bytes; return the position after them."""
    memcpy(target, source, size)
    return target + size


@cython.cdivision(True)
cdef inline char* put_length(char* target, Py_ssize_t length) noexcept nogil:
    """The rest of a length that does not fit the token."""
    if length < 15:
        return target
    memset(target, 0xFF, (length - 15) // 255)
    target += (length - 15) // 255
    target[0] = <char> ((length - 15) % 255)
    return target + 1


cdef inline char* put_literals(
    char* target, const char* literals, Py_ssize_t size, Py_ssize_t match
) noexcept nogil:
    """The token of a sequence, which holds both lengths if small, and its literals."""
    target[0] = <char> (min(size, 15) << 4 | min(match, 15))
    return put(put_length(target + 1, size), literals, size)


cdef inline char* put_repeated(char* target, const Run* run) noexcept nogil:
    cdef Py_ssize_t index
    for index in range(run.count):
        memcpy(target, run.value, run.size)
        target += run.size
    return target


@cython.cdivision(True)
cdef inline Py_ssize_t pack_block(
    const Run* runs, Py_ssize_t length, char* target, char* literals
) noexcept nogil:
    """An LZ4 block: each value is one literal, and its repetitions are one match."""
    cdef int64_t size = 0, at = 0
    cdef Py_ssize_t run, value_bytes, repeated, matched, index, literal_bytes = 0
    cdef const char* source
    cdef char* end = target
    for run in range(length):
        size += <int64_t> runs[run].size * runs[run].count
    for run in range(length):
        value_bytes = runs[run].size
        if value_bytes == 0 or runs[run].count == 0:
            continue
        source = runs[run].value
        memcpy(literals + literal_bytes, source, value_bytes)
        literal_bytes += value_bytes
        at += value_bytes
        repeated = value_bytes * (runs[run].count - 1)
        matched = min(repeated, size - LITERALS_LAST - at)
        if matched >= MATCH_BYTES_MIN:
            end = put_literals(end, literals, literal_bytes, matched - MATCH_BYTES_MIN)
            literal_bytes = 0
            end[0] = <char> (value_bytes & 0xFF)
            end[1] = <char> (value_bytes >> 8)
            end = put_length(end + 2, matched - MATCH_BYTES_MIN)
        else:
            matched = 0
        for index in range(matched, repeated):
            literals[literal_bytes] = source[index % value_bytes]
            literal_bytes += 1
        at += repeated
    return put_literals(end, literals, literal_bytes, 0) - target


@cython.cdivision(True)
cdef inline Py_ssize_t pack_frame(Column* column, char* target, char* literals) noexcept nogil:
    """An LZ4 frame of the runs, in one or more blocks; return its size."""
    cdef char* end = put(target, b"\x04\x22\x4d\x18\x60\x70\x73", 7)
    cdef Run* runs = column.runs
    # `taken` rows of the first run are in the blocks before.
    cdef Py_ssize_t first = 0, stop, taken = 0, first_count, last_count, fits
    cdef int64_t room
    cdef int32_t size
    while first < column.length:
        first_count = runs[first].count
        runs[first].count -= taken
        room = BLOCK_BYTES_MAX
        stop = first
        while stop < column.length and runs[stop].size * runs[stop].count <= room:
            room -= runs[stop].size * runs[stop].count
            stop += 1
        if stop < column.length:
            # This run continues in the next block; no value is longer than a block.
            last_count = runs[stop].count
            fits = room // runs[stop].size
            runs[stop].count = fits
            size = <int32_t> pack_block(runs + first, stop - first + 1, end + 4, literals)
            runs[stop].count = last_count
            taken = fits + taken if stop == first else fits
        else:
            size = <int32_t> pack_block(runs + first, stop - first, end + 4, literals)
        runs[first].count = first_count
        memcpy(end, &size, 4)
        end += 4 + size
        first = stop
    memset(end, 0, 4)
    return end + 4 - target


cdef inline Py_ssize_t pack_column(Column* column, char* target, char* literals) noexcept nogil:
    """Write a column with its length, in `packed_max` bytes at most; return the size."""
    cdef Py_ssize_t index, size
    if column.size == 0:
        return 0
    if is_packable(column):
        size = pack_frame(column, target + 8, literals)
        if size < column.size:
            memcpy(target, &column.size, 8)
            return size + 8
    memset(target, 0xFF, 8)
    target += 8
    for index in range(column.length):
        target = put_repeated(target, &column.runs[index])
    return column.size + 8
