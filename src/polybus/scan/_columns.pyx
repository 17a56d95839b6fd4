# cython: boundscheck=False, wraparound=False, cdivision=True
"""Columns from spans and back, compiled. Contract and twin: columns_py.py."""

from cpython cimport array
from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

import array

from polybus.scan import columns_py
from polybus.scan._bytes cimport prefetch
from polybus.scan.columns_py import FRAME_END, FRAME_START, STORED

cdef enum:
    AHEAD = 8  # four messages

cdef array.array INTS = array.array("i")
cdef int64_t COLUMN_BYTES_MAX = 0x7FFFFFFF
cdef int64_t BLOCK_BYTES_MAX = columns_py.BLOCK_BYTES_MAX
cdef Py_ssize_t PACKED_BYTES_MIN = columns_py.PACKED_BYTES_MIN
cdef Py_ssize_t MATCH_DISTANCE_MAX = columns_py.MATCH_DISTANCE_MAX
cdef Py_ssize_t MATCH_BYTES_MIN = columns_py.MATCH_BYTES_MIN
cdef Py_ssize_t LITERALS_LAST = columns_py.LITERALS_LAST


cdef struct Part:
    Py_buffer view
    const int* spans
    Py_ssize_t length


def gather(buffers, spans):
    """Concatenate the spans of several buffers; return (values, int32 offsets)."""
    cdef Py_ssize_t rows = 0
    cdef int64_t total = measure(spans, &rows)
    values = PyBytes_FromStringAndSize(NULL, total)
    ends = PyBytes_FromStringAndSize(NULL, (rows + 1) * 4)
    copy_spans(buffers, spans, PyBytes_AS_STRING(values), <int32_t*> PyBytes_AS_STRING(ends))
    return values, ends


def gather_into(buffers, spans, target, Py_ssize_t ends_at, Py_ssize_t values_at):
    """`gather` into `target`, which must be large enough; return the size of the values."""
    cdef Py_ssize_t rows = 0
    cdef int64_t total = measure(spans, &rows)
    cdef Py_buffer view
    PyObject_GetBuffer(target, &view, PyBUF_WRITABLE)
    try:
        check_place(&view, values_at, total, 1)
        check_place(&view, ends_at, (rows + 1) * 4, 4)
        copy_spans(
            buffers, spans, <char*> view.buf + values_at, <int32_t*> (<char*> view.buf + ends_at)
        )
    finally:
        PyBuffer_Release(&view)
    return total


cdef int64_t measure(spans, Py_ssize_t* rows) except -1:
    """Count spans and bytes; refuse spans that are invalid in any buffer."""
    cdef array.array one
    cdef const int* at
    cdef Py_ssize_t index
    cdef int64_t total = 0
    for one in spans:
        rows[0] += len(one) // 2
        at = one.data.as_ints
        for index in range(0, len(one) - 1, 2):
            # Checked before memory is allocated by the total, which the copy relies on.
            if at[index] < 0 or at[index + 1] < at[index]:
                raise IndexError("a span is outside its buffer")
            total += at[index + 1] - at[index]
    if total > COLUMN_BYTES_MAX:
        raise OverflowError("a column holds at most 2 GiB")
    return total


cdef int check_place(Py_buffer* view, Py_ssize_t at, int64_t size, int alignment) except -1:
    if at < 0 or at > view.len or size > view.len - at:
        raise IndexError("the column does not fit into its target")
    if (<size_t> view.buf + <size_t> at) % alignment:
        raise ValueError("the column's target is not aligned")
    return 0


cdef int copy_spans(buffers, spans, char* target, int32_t* ends) except -1:
    cdef Py_ssize_t parts = len(spans), held = 0, part, inside = 0
    cdef Part* all_parts = <Part*> PyMem_Malloc((parts + 1) * sizeof(Part))
    cdef array.array one
    if all_parts == NULL:
        raise MemoryError
    ends[0] = 0
    try:
        for part in range(parts):
            one = spans[part]
            all_parts[part].spans = one.data.as_ints
            all_parts[part].length = len(one) - 1
            PyObject_GetBuffer(buffers[part], &all_parts[part].view, PyBUF_SIMPLE)
            held += 1
        # The committer's thread runs this beside the event loop, in parallel without the GIL. It
        # is released only once, because acquiring it again may have to wait.
        with nogil:
            inside = copy_parts(all_parts, parts, target, ends + 1)
        if not inside:
            raise IndexError("a span is outside its buffer")
    finally:
        for part in range(held):
            PyBuffer_Release(&all_parts[part].view)
        PyMem_Free(all_parts)
    return 0


cdef bint copy_parts(Part* all_parts, Py_ssize_t parts, char* target, int32_t* ends) noexcept nogil:
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
            if index + AHEAD < all_parts[part].length:
                prefetch(source + at[index + AHEAD], at[index + 1] - at[index])
            size = at[index + 1] - at[index]
            memcpy(target, source + at[index], size)
            target += size
            end += size
            ends[0] = end
            ends += 1
    return True


cdef int check_longs(array.array numbers) except -1:
    if numbers.typecode != "q":
        raise TypeError("numbers must be in an array of type 'q' (64 bits)")
    return 0


cdef Py_ssize_t rows_of(array.array counts) except -1:
    """The number of rows; limited so that sizes in bytes do not overflow."""
    cdef Py_ssize_t index, rows = 0
    check_longs(counts)
    for index in range(len(counts)):
        if counts.data.as_longlongs[index] < 0:
            raise ValueError("a count cannot be negative")
        if counts.data.as_longlongs[index] > COLUMN_BYTES_MAX - rows:
            raise OverflowError("a column has at most 2 Gi rows")
        rows += counts.data.as_longlongs[index]
    return rows


cdef struct Run:
    const char* value
    Py_ssize_t size
    Py_ssize_t count


cdef Run* runs_of(values, array.array counts) except NULL:
    """The runs, to be freed by the caller; they point into `values`."""
    cdef Py_ssize_t index, length = len(counts)
    cdef array.array numbers
    cdef Run* runs
    if len(values) != length:
        raise ValueError("values and counts must have the same length")
    rows_of(counts)
    runs = <Run*> PyMem_Malloc((length + 1) * sizeof(Run))
    if runs == NULL:
        raise MemoryError
    try:
        if isinstance(values, array.array):
            numbers = values
            check_longs(numbers)
            for index in range(length):
                runs[index].value = <const char*> &numbers.data.as_longlongs[index]
                runs[index].size = sizeof(int64_t)
        else:
            for index in range(length):
                value = values[index]
                if isinstance(value, bytes):
                    runs[index].value = PyBytes_AS_STRING(value)
                    runs[index].size = len(value)
                else:
                    runs[index].value = PyUnicode_AsUTF8AndSize(value, &runs[index].size)
        for index in range(length):
            runs[index].count = counts.data.as_longlongs[index]
    except BaseException:
        PyMem_Free(runs)
        raise
    return runs


cdef int64_t bytes_in(const Run* runs, Py_ssize_t length) noexcept:
    cdef Py_ssize_t index
    cdef int64_t total = 0
    for index in range(length):
        total += <int64_t> runs[index].size * runs[index].count
    return total


def ends_into(values, array.array counts not None, target, Py_ssize_t at):
    """Write the int32 offsets of a string column that repeats each value `count` times."""
    cdef Py_ssize_t rows = rows_of(counts), run, index
    cdef int32_t size, end = 0
    cdef int32_t* ends
    cdef Py_buffer view
    cdef Run* runs = runs_of(values, counts)
    try:
        if bytes_in(runs, len(counts)) > COLUMN_BYTES_MAX:
            raise OverflowError("a column holds at most 2 GiB")
        PyObject_GetBuffer(target, &view, PyBUF_WRITABLE)
        try:
            check_place(&view, at, (rows + 1) * 4, 4)
            ends = <int32_t*> (<char*> view.buf + at)
            ends[0] = 0
            ends += 1
            for run in range(len(counts)):
                size = <int32_t> runs[run].size
                for index in range(runs[run].count):
                    ends[index] = end + <int32_t> (index + 1) * size
                ends += runs[run].count
                end += <int32_t> runs[run].count * size
        finally:
            PyBuffer_Release(&view)
    finally:
        PyMem_Free(runs)


def offsets_into(array.array firsts not None, array.array counts not None, target, Py_ssize_t at):
    """Write an int64 column that counts up from each of `firsts`, `count` rows each."""
    cdef Py_ssize_t rows = rows_of(counts), run, index
    cdef int64_t first, count
    cdef int64_t* column
    cdef Py_buffer view
    if len(firsts) != len(counts):
        raise ValueError("firsts and counts must have the same length")
    check_longs(firsts)
    PyObject_GetBuffer(target, &view, PyBUF_WRITABLE)
    try:
        check_place(&view, at, rows * 8, 8)
        column = <int64_t*> (<char*> view.buf + at)
        for run in range(len(counts)):
            first = firsts.data.as_longlongs[run]
            count = counts.data.as_longlongs[run]
            for index in range(count):
                column[index] = first + index
            column += count
    finally:
        PyBuffer_Release(&view)


def pack_runs(values, array.array counts not None):
    """Each value repeated `count` times, for a compressed Arrow message (see the twin)."""
    cdef Py_ssize_t longest = 0, index, length = len(counts)
    cdef Run* runs = runs_of(values, counts)
    cdef int64_t size = bytes_in(runs, length)
    try:
        if size == 0:
            return b""
        for index in range(length):
            longest = max(longest, runs[index].size)
        if size >= PACKED_BYTES_MIN and longest <= MATCH_DISTANCE_MAX:
            packed = pack_frame(runs, length)
            if len(packed) < size:
                return size.to_bytes(8, "little") + packed
        return STORED + b"".join(
            [runs[index].value[:runs[index].size] * counts[index] for index in range(length)]
        )
    finally:
        PyMem_Free(runs)


cdef bytes pack_frame(Run* runs, Py_ssize_t length):
    """An LZ4 frame of the runs, in one or more blocks. Changes the counts of the runs."""
    cdef Py_ssize_t first = 0, stop, left
    cdef int64_t room
    cdef list frame = [FRAME_START]
    while first < length:
        room = BLOCK_BYTES_MAX
        stop = first
        while stop < length and bytes_in(runs + stop, 1) <= room:
            room -= bytes_in(runs + stop, 1)
            stop += 1
        left = 0
        if stop < length:
            # This run continues in the next block; no value is longer than a block.
            left = runs[stop].count - room // runs[stop].size
            runs[stop].count -= left
        packed = pack_block(runs + first, stop - first + (stop < length))
        frame += (len(packed).to_bytes(4, "little"), packed)
        if stop < length:
            runs[stop].count = left
        first = stop
    frame.append(FRAME_END)
    return b"".join(frame)


cdef bytes pack_block(const Run* runs, Py_ssize_t length):
    """An LZ4 block: each value is one literal, and its repetitions are one match."""
    cdef int64_t size = bytes_in(runs, length), at = 0
    cdef Py_ssize_t room = 64, run, value_bytes, repeated, matched, index, literal_bytes = 0
    cdef const char* source
    cdef char* target
    for run in range(length):
        room += runs[run].size + 32
    # A match takes a byte per 255 of its length; literals are the values plus 16 bytes at most.
    packed = PyBytes_FromStringAndSize(NULL, room + room // 255 + size // 255)
    literals = PyBytes_FromStringAndSize(NULL, room)
    cdef char* literal = PyBytes_AS_STRING(literals)
    target = PyBytes_AS_STRING(packed)
    for run in range(length):
        value_bytes = runs[run].size
        if value_bytes == 0 or runs[run].count == 0:
            continue
        source = runs[run].value
        memcpy(literal + literal_bytes, source, value_bytes)
        literal_bytes += value_bytes
        at += value_bytes
        repeated = value_bytes * (runs[run].count - 1)
        matched = min(repeated, size - LITERALS_LAST - at)
        if matched >= MATCH_BYTES_MIN:
            target = put_literals(target, literal, literal_bytes, matched - MATCH_BYTES_MIN)
            literal_bytes = 0
            target[0] = <char> (value_bytes & 0xFF)
            target[1] = <char> (value_bytes >> 8)
            target = put_length(target + 2, matched - MATCH_BYTES_MIN)
        else:
            matched = 0
        for index in range(matched, repeated):
            literal[literal_bytes] = source[index % value_bytes]
            literal_bytes += 1
        at += repeated
    target = put_literals(target, literal, literal_bytes, 0)
    return packed[:target - PyBytes_AS_STRING(packed)]


cdef char* put_literals(char* target, const char* literal, Py_ssize_t size, Py_ssize_t match):
    """The token of a sequence, which holds both lengths if small, and its literals."""
    target[0] = <char> (min(size, 15) << 4 | min(match, 15))
    target = put_length(target + 1, size)
    memcpy(target, literal, size)
    return target + size


cdef char* put_length(char* target, Py_ssize_t length):
    """The rest of a length that does not fit the token."""
    if length < 15:
        return target
    memset(target, 0xFF, (length - 15) // 255)
    target += (length - 15) // 255
    target[0] = <char> ((length - 15) % 255)
    return target + 1


def spans_of_offsets(offsets, Py_ssize_t first, Py_ssize_t count):
    """The spans of `count` messages of a column from its int32 offsets, starting at `first`."""
    cdef Py_buffer view
    cdef array.array spans = array.clone(INTS, 2 * count, zero=False)
    cdef int* at = spans.data.as_ints
    cdef const int32_t* ends
    cdef Py_ssize_t index
    PyObject_GetBuffer(offsets, &view, PyBUF_SIMPLE)
    try:
        if first < 0 or count < 0 or (first + count + 1) * 4 > view.len:
            raise IndexError("the column has fewer offsets than messages")
        ends = <const int32_t*> view.buf + first
        for index in range(count):
            at[2 * index] = ends[index]
            at[2 * index + 1] = ends[index + 1]
    finally:
        PyBuffer_Release(&view)
    return spans
