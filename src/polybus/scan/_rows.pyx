# cython: boundscheck=False, wraparound=False, cdivision=True
"""The columns of a commit, compiled. Contract and twin: rows_py.py."""

from cpython cimport array
from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport Py_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcmp, memcpy, memset

import array

from polybus.scan._bytes cimport Part, copy_parts, end_parts
from polybus.scan._packing cimport (
    Column, Run, literals_max, pack_column, packed_max,
)
from polybus.scan.batch cimport Batch

cdef array.array LONGS = array.array("q")
cdef int64_t COLUMN_BYTES_MAX = 0x7FFFFFFF
cdef const char* ZEROS = b"\0\0\0\0"


# Runs

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


cdef int measure_column(Column* column) except -1:
    """Set the sizes of a column whose runs are set."""
    cdef Py_ssize_t index
    column.size = column.longest = 0
    for index in range(column.length):
        column.size += <int64_t> column.runs[index].size * column.runs[index].count
        column.longest = max(column.longest, column.runs[index].size)
    if column.size > COLUMN_BYTES_MAX:
        raise OverflowError("a column holds at most 2 GiB")
    return 0


cdef int set_run(Run* run, value) except -1:
    """Point a run at its value: text or bytes that the caller keeps."""
    if isinstance(value, bytes):
        run.value = PyBytes_AS_STRING(value)
        run.size = PyBytes_GET_SIZE(value)
    else:
        run.value = PyUnicode_AsUTF8AndSize(value, &run.size)
    return 0


cdef int set_runs(Column* column, values, array.array counts) except -1:
    """The runs of a column, in memory that the caller has allocated for `counts`."""
    cdef Py_ssize_t index
    cdef array.array numbers
    column.length = len(counts)
    if len(values) != column.length:
        raise ValueError("values and counts must have the same length")
    rows_of(counts)
    if isinstance(values, array.array):
        numbers = values
        check_longs(numbers)
        for index in range(column.length):
            column.runs[index].value = <const char*> &numbers.data.as_longlongs[index]
            column.runs[index].size = sizeof(int64_t)
    else:
        for index in range(column.length):
            set_run(&column.runs[index], values[index])
    for index in range(column.length):
        column.runs[index].count = counts.data.as_longlongs[index]
    return measure_column(column)


def pack_runs(values, array.array counts not None):
    """Each value repeated `count` times, for a compressed Arrow message (see the twin)."""
    cdef Column column
    cdef char* literals = NULL
    column.runs = <Run*> PyMem_Malloc((len(counts) + 1) * sizeof(Run))
    if column.runs == NULL:
        raise MemoryError
    try:
        set_runs(&column, values, counts)
        literals = <char*> PyMem_Malloc(literals_max(&column))
        if literals == NULL:
            raise MemoryError
        packed = PyBytes_FromStringAndSize(NULL, packed_max(&column))
        return packed[:pack_column(&column, PyBytes_AS_STRING(packed), literals)]
    finally:
        PyMem_Free(literals)
        PyMem_Free(column.runs)


# The body of a message

cdef enum:
    ACCOUNTS, TOPICS, TIMES, PROTOCOLS, SENDERS, COLUMNS
    KEY_BUFFERS = 3
    HEADER_BUFFERS = 9
    BUFFERS = 31
    RELEASED_BYTES_MIN = 32768


cdef struct Body:
    char* at
    const char* start
    int64_t* place
    Py_ssize_t beside
    char* literals


cdef struct Extra:
    Py_buffer view
    bint is_held


cdef class Rows:
    """What `write_rows` reads: pointers into objects that its caller keeps."""

    cdef Column columns[COLUMNS]
    cdef Column zeros[2]
    cdef Run zero_runs[2]
    cdef Part* parts
    cdef Py_ssize_t part_count
    cdef Py_ssize_t held
    cdef int64_t* times
    cdef Extra keys[KEY_BUFFERS]
    cdef Extra headers[HEADER_BUFFERS]
    cdef bint has_keys
    cdef bint has_headers
    cdef array.array firsts
    cdef array.array topic_counts
    cdef Py_ssize_t count
    cdef int64_t value_bytes
    cdef bint is_beside
    cdef list kept

    def __cinit__(self, Py_ssize_t batches, Py_ssize_t accounts, Py_ssize_t topics):
        cdef Py_ssize_t runs = accounts + topics + 3 * batches
        cdef Py_ssize_t size = batches * (sizeof(Part) + sizeof(int64_t)) + runs * sizeof(Run)
        self.parts = <Part*> PyMem_Malloc(size + 1)
        if self.parts == NULL:
            raise MemoryError
        self.times = <int64_t*> (self.parts + batches)
        self.columns[ACCOUNTS].runs = <Run*> (self.times + batches)
        self.columns[TOPICS].runs = self.columns[ACCOUNTS].runs + accounts
        self.columns[TIMES].runs = self.columns[TOPICS].runs + topics
        self.columns[PROTOCOLS].runs = self.columns[TIMES].runs + batches
        self.columns[SENDERS].runs = self.columns[PROTOCOLS].runs + batches

    def __dealloc__(self):
        cdef Py_ssize_t index
        for index in range(self.held):
            PyBuffer_Release(&self.parts[index].view)
        for index in range(KEY_BUFFERS):
            if self.keys[index].is_held:
                PyBuffer_Release(&self.keys[index].view)
        for index in range(HEADER_BUFFERS):
            if self.headers[index].is_held:
                PyBuffer_Release(&self.headers[index].view)
        PyMem_Free(self.parts)

    cdef int add(self, Batch batch) except -1:
        """Add a batch: its values, and its time, protocol and sender as runs."""
        cdef Part* part = &self.parts[self.held]
        cdef Column* column
        cdef Py_ssize_t index, rows = Py_SIZE(batch.spans) // 2
        cdef const int* at = batch.spans.data.as_ints
        PyObject_GetBuffer(batch.buffer, &part.view, PyBUF_SIMPLE)
        self.held += 1
        part.spans = at
        part.length = 2 * rows - 1
        for index in range(0, part.length, 2):
            if at[index] < 0 or at[index + 1] < at[index] or at[index + 1] > part.view.len:
                raise IndexError("a span is outside its buffer")
            self.value_bytes += at[index + 1] - at[index]
        if self.value_bytes > COLUMN_BYTES_MAX:
            raise OverflowError("a column holds at most 2 GiB")
        self.count += rows
        column = &self.columns[TIMES]
        if not column.length or self.times[column.length - 1] != batch.timestamp_us:
            self.times[column.length] = batch.timestamp_us
            column.runs[column.length].value = <const char*> &self.times[column.length]
            column.runs[column.length].size = sizeof(int64_t)
            column.runs[column.length].count = 0
            column.length += 1
        column.runs[column.length - 1].count += rows
        self.add_text(&self.columns[PROTOCOLS], batch.protocol, rows)
        self.add_text(&self.columns[SENDERS], batch.sender, rows)
        return 0

    cdef int add_text(self, Column* column, text, Py_ssize_t rows) except -1:
        cdef Run run
        cdef Run* last = &column.runs[column.length - 1]
        try:
            set_run(&run, text)
        except UnicodeEncodeError:
            text = text.encode(errors="replace")
            self.kept.append(text)
            set_run(&run, text)
        if column.length and last.size == run.size and (
            last.value == run.value or memcmp(last.value, run.value, run.size) == 0
        ):
            last.count += rows
        else:
            run.count = rows
            column.runs[column.length] = run
            column.length += 1
        return 0

    cdef int hold(self, Extra* extras, parts, Py_ssize_t count) except -1:
        """Buffers of a column that pyarrow has made."""
        cdef Py_ssize_t index
        if len(parts) != count:
            raise ValueError("the column has another number of buffers")
        for index in range(count):
            if parts[index] is not None:
                PyObject_GetBuffer(parts[index], &extras[index].view, PyBUF_SIMPLE)
                extras[index].is_held = True
        return 0

    cdef int finish(self) except -1:
        """Measure all columns, and those of no keys and no headers."""
        cdef int index
        for index in range(COLUMNS):
            measure_column(&self.columns[index])
        self.zero_runs[0].count, self.zero_runs[0].size = (self.count + 7) // 8, 1
        self.zero_runs[1].count, self.zero_runs[1].size = self.count + 1, 4
        for index in range(2):
            self.zero_runs[index].value = ZEROS
            self.zeros[index].runs = &self.zero_runs[index]
            self.zeros[index].length = 1
            measure_column(&self.zeros[index])
        return 0

    cdef Py_ssize_t literals_max(self) noexcept:
        cdef int index
        cdef Py_ssize_t most = max(literals_max(&self.zeros[0]), literals_max(&self.zeros[1]))
        for index in range(COLUMNS):
            most = max(most, literals_max(&self.columns[index]))
        return most

    cdef Py_ssize_t bytes_max(self) noexcept:
        """The most bytes that the body has."""
        # Five columns' lengths of 4 bytes and an offset of 8; a length and padding per buffer.
        cdef Py_ssize_t most = 28 * (self.count + 1) + 24 * BUFFERS
        cdef int index
        if not self.is_beside:
            most += self.value_bytes
        for index in range(COLUMNS):
            most += packed_max(&self.columns[index])
        for index in range(2):
            most += 2 * packed_max(&self.zeros[index])
        for index in range(KEY_BUFFERS):
            if self.keys[index].is_held:
                most += self.keys[index].view.len
        for index in range(HEADER_BUFFERS):
            if self.headers[index].is_held:
                most += self.headers[index].view.len
        return most

    cdef void write(self, Body* body) noexcept nogil:
        """Write all buffers, in the order of the schema."""
        cdef int index
        write_text(body, &self.columns[ACCOUNTS], self.count)
        write_text(body, &self.columns[TOPICS], self.count)
        end_buffer(body, 0)
        self.write_offsets(body)
        end_buffer(body, 0)
        end_buffer(body, pack_column(&self.columns[TIMES], body.at, body.literals))
        if self.has_keys:
            write_extras(body, self.keys, KEY_BUFFERS)
        else:
            self.write_no_rows(body)
        end_buffer(body, 0)
        self.write_values(body)
        if self.has_headers:
            write_extras(body, self.headers, HEADER_BUFFERS)
        else:
            self.write_no_rows(body)
            for index in range(2):
                end_buffer(body, 0)
                memset(body.at, 0xFF, 8)
                memset(body.at + 8, 0, 4)
                end_buffer(body, 12)
                end_buffer(body, 0)
        write_text(body, &self.columns[PROTOCOLS], self.count)
        write_text(body, &self.columns[SENDERS], self.count)

    cdef void write_no_rows(self, Body* body) noexcept nogil:
        """The validity and lengths of a column of nulls, and no values."""
        end_buffer(body, pack_column(&self.zeros[0], body.at, body.literals))
        end_buffer(body, pack_column(&self.zeros[1], body.at, body.literals))
        end_buffer(body, 0)

    cdef void write_offsets(self, Body* body) noexcept nogil:
        cdef int64_t* to = <int64_t*> (body.at + 8)
        cdef int64_t* first = <int64_t*> self.firsts.data.as_longlongs
        cdef Py_ssize_t run, index
        for run in range(self.columns[TOPICS].length):
            for index in range(self.topic_counts.data.as_longlongs[run]):
                to[index] = first[run] + index
            to += self.topic_counts.data.as_longlongs[run]
        end_stored(body, 8 * self.count)

    cdef void write_values(self, Body* body) noexcept nogil:
        cdef int32_t* ends = <int32_t*> (body.at + 8)
        end_stored(body, 4 * (self.count + 1))
        ends[0] = 0
        if self.is_beside:
            end_parts(self.parts, self.held, ends + 1)
            memset(body.at, 0xFF, 8)
            body.place[0] = body.at - body.start
            body.place[1] = 8 + self.value_bytes
            body.place += 2
            body.at += 8
            body.beside = padded(self.value_bytes)
        else:
            copy_parts(self.parts, self.held, body.at + 8, ends + 1)
            end_stored(body, self.value_bytes)


cdef void end_buffer(Body* body, Py_ssize_t size) noexcept nogil:
    """A buffer of this size was written: record its position, and continue after its padding."""
    cdef Py_ssize_t stop = padded(size)
    body.place[0] = body.at - body.start + body.beside
    body.place[1] = size
    body.place += 2
    memset(body.at + size, 0, stop - size)
    body.at += stop


cdef void end_stored(Body* body, Py_ssize_t size) noexcept nogil:
    """The same for an uncompressed buffer, which is written after its length field."""
    memset(body.at, 0xFF, 8)
    end_buffer(body, size + 8 if size else 0)


cdef void write_text(Body* body, Column* column, Py_ssize_t rows) noexcept nogil:
    """A column of repeated text: its lengths uncompressed, its characters packed."""
    cdef int32_t* ends = <int32_t*> (body.at + 8)
    cdef int32_t end = 0
    cdef Py_ssize_t run, index
    end_buffer(body, 0)
    ends[0] = 0
    ends += 1
    for run in range(column.length):
        for index in range(column.runs[run].count):
            end += <int32_t> column.runs[run].size
            ends[index] = end
        ends += column.runs[run].count
    end_stored(body, 4 * (rows + 1))
    end_buffer(body, pack_column(column, body.at, body.literals))


cdef void write_extras(Body* body, Extra* extras, int count) noexcept nogil:
    cdef int index
    for index in range(count):
        if extras[index].is_held:
            memcpy(body.at + 8, extras[index].view.buf, extras[index].view.len)
            end_stored(body, extras[index].view.len)
        else:
            end_buffer(body, 0)


cdef Py_ssize_t padded(Py_ssize_t size) noexcept nogil:
    return (size + 7) & ~<Py_ssize_t> 7


def write_rows(
    list batches not None, list accounts not None, array.array account_counts not None,
    tuple topics not None, keys, headers, bint is_beside, Py_ssize_t start, room,
):
    """The columns of the rows of batches (see the twin)."""
    cdef Rows rows = Rows(len(batches), len(account_counts), len(topics[2]))
    cdef array.array places = array.clone(LONGS, 2 * BUFFERS, zero=False)
    cdef Py_ssize_t bytes_max
    cdef Batch batch
    cdef Py_buffer view
    cdef Body body
    rows.kept = []
    names, rows.firsts, rows.topic_counts = topics
    check_longs(rows.firsts)
    set_runs(&rows.columns[ACCOUNTS], accounts, account_counts)
    set_runs(&rows.columns[TOPICS], names, rows.topic_counts)
    for batch in batches:
        rows.add(batch)
    if (
        rows_of(rows.topic_counts) != rows.count or rows_of(account_counts) != rows.count
        or len(rows.firsts) != len(rows.topic_counts)
    ):
        raise ValueError("the topics and accounts are not those of the batches")
    if keys is not None:
        rows.hold(rows.keys, keys, KEY_BUFFERS)
        rows.has_keys = True
    if headers is not None:
        rows.hold(rows.headers, headers, HEADER_BUFFERS)
        rows.has_headers = True
    rows.is_beside = is_beside
    rows.finish()
    bytes_max = rows.bytes_max()
    literals = PyBytes_FromStringAndSize(NULL, rows.literals_max())
    target = room(start + bytes_max)
    PyObject_GetBuffer(target, &view, PyBUF_WRITABLE)
    try:
        if start < 0 or start + bytes_max > view.len:
            raise IndexError("the columns do not fit into their target")
        if (<size_t> view.buf + <size_t> start) % 8:
            raise ValueError("the columns' target is not aligned")
        body.at = <char*> view.buf + start
        body.start = body.at
        body.place = <int64_t*> places.data.as_longlongs
        body.beside = 0
        body.literals = PyBytes_AS_STRING(literals)
        # To get the lock of the interpreter back may take longer than a small copy.
        if bytes_max < RELEASED_BYTES_MIN:
            rows.write(&body)
        else:
            with nogil:
                rows.write(&body)
    finally:
        PyBuffer_Release(&view)
    return target, places


cdef char* field_at(char* header, Py_ssize_t size, int64_t at, Py_ssize_t bytes_) except NULL:
    if at < 0 or bytes_ > size or at > size - bytes_:
        raise IndexError("a field is outside the header")
    return header + at


def write_header(
    target, bytes template not None, bytes note not None, array.array fields not None,
    array.array nodes not None, int64_t rows, array.array places not None,
):
    """Write the header of a message (see the twin)."""
    cdef Py_ssize_t size = len(template), index, node_count = len(nodes)
    cdef int64_t* at = <int64_t*> fields.data.as_longlongs
    cdef int64_t* place = <int64_t*> places.data.as_longlongs
    cdef int64_t body_bytes, number
    cdef char* header
    cdef char* to
    cdef Py_buffer view
    check_longs(fields)
    check_longs(nodes)
    check_longs(places)
    if len(fields) != 5 or len(places) < 2:
        raise ValueError("the header has five fields, and the body has places")
    body_bytes = place[len(places) - 2] + padded(place[len(places) - 1])
    PyObject_GetBuffer(target, &view, PyBUF_WRITABLE)
    try:
        if size > view.len:
            raise IndexError("the header does not fit into its target")
        header = <char*> view.buf
        memcpy(header, PyBytes_AS_STRING(template), size)
        to = field_at(header, size, at[0], len(note))
        memcpy(to, PyBytes_AS_STRING(note), len(note))
        memcpy(field_at(header, size, at[1], 8), &body_bytes, 8)
        memcpy(field_at(header, size, at[2], 8), &rows, 8)
        to = field_at(header, size, at[3], 8 * node_count)
        for index in range(node_count):
            number = rows * nodes.data.as_longlongs[index]
            memcpy(to + 8 * index, &number, 8)
        to = field_at(header, size, at[4], 8 * len(places))
        memcpy(to, place, 8 * len(places))
    finally:
        PyBuffer_Release(&view)
    return body_bytes
