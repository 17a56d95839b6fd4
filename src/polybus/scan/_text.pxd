"""JSON text byte by byte: white space, strings, escapes in both directions, UTF-8, base64."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    /* The character that a letter encodes after a backslash, and the reverse; 0 if there is none. */
    static const unsigned char polybus_characters[256] = {
        ['"'] = '"', [92] = 92, ['/'] = '/', ['b'] = 8, ['f'] = 12, ['n'] = 10, ['r'] = 13, ['t'] = 9
    };
    static const unsigned char polybus_letters[256] = {
        ['"'] = '"', [92] = 92, [8] = 'b', [12] = 'f', [10] = 'n', [13] = 'r', [9] = 't'
    };
    """
    const uint8_t CHARACTERS "polybus_characters"[256]
    const uint8_t LETTERS "polybus_letters"[256]

cdef enum:
    QUOTE = 0x22
    BACKSLASH = 0x5C


cdef inline bint is_space(uint8_t byte) noexcept nogil:
    return byte == c" " or byte == c"\n" or byte == c"\r" or byte == c"\t"


cdef inline bint plain8(const uint8_t* at) noexcept nogil:
    """Whether the next eight bytes are all ASCII that a JSON string need not escape."""
    cdef uint64_t word, quote, backslash
    memcpy(&word, at, 8)
    quote = word ^ 0x2222222222222222u
    backslash = word ^ 0x5C5C5C5C5C5C5C5Cu
    return (
        (
            (word - 0x2020202020202020u)
            | (quote - 0x0101010101010101u)
            | (backslash - 0x0101010101010101u)
            | word
        )
        & 0x8080808080808080u
    ) == 0


cdef inline bint ascii8(const uint8_t* at) noexcept nogil:
    cdef uint64_t word
    memcpy(&word, at, 8)
    return (word & 0x8080808080808080u) == 0


cdef inline bint follows(uint8_t byte) noexcept nogil:
    """Whether this is a continuation byte of UTF-8."""
    return (byte & 0xC0) == 0x80


cdef inline Py_ssize_t utf8_size(const uint8_t* at, Py_ssize_t left) noexcept nogil:
    """The length of the character at `at`, 0 if it is not UTF-8 (RFC 3629) or incomplete."""
    cdef uint8_t first = at[0]
    if first < 0x80:
        return 1
    if first < 0xC2 or left < 2 or not follows(at[1]):
        return 0
    if first < 0xE0:
        return 2
    if left < 3 or not follows(at[2]):
        return 0
    if first < 0xF0:
        if (first == 0xE0 and at[1] < 0xA0) or (first == 0xED and at[1] > 0x9F):
            return 0
        return 3
    if left < 4 or not follows(at[3]) or first > 0xF4:
        return 0
    if (first == 0xF0 and at[1] < 0x90) or (first == 0xF4 and at[1] > 0x8F):
        return 0
    return 4


cdef inline int hex4(const uint8_t* at) noexcept nogil:
    """Four hex digits as a number, -1 if they are not hex digits."""
    cdef int value = 0, index
    cdef uint8_t byte
    for index in range(4):
        byte = at[index]
        if c"0" <= byte <= c"9":
            value = value * 16 + byte - c"0"
        elif c"a" <= (byte | 0x20) <= c"f":
            value = value * 16 + (byte | 0x20) - c"a" + 10
        else:
            return -1
    return value


cdef inline Py_ssize_t escape_size(const uint8_t* at, Py_ssize_t left) noexcept nogil:
    """The length of the escape at `at`, 0 if it is invalid (so is a lone surrogate)."""
    cdef int code, low
    if left < 2:
        return 0
    if at[1] != c"u":
        return 2 if CHARACTERS[at[1]] else 0
    if left < 6:
        return 0
    code = hex4(at + 2)
    if code < 0 or 0xDC00 <= code <= 0xDFFF:
        return 0
    if code < 0xD800 or code > 0xDFFF:
        return 6
    if left < 12 or at[6] != BACKSLASH or at[7] != c"u":
        return 0
    low = hex4(at + 8)
    return 12 if 0xDC00 <= low <= 0xDFFF else 0


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


cdef inline uint8_t* put_character(uint8_t* to, uint32_t code) noexcept nogil:
    """Write a character as UTF-8; return the position after it."""
    if code < 0x80:
        to[0] = <uint8_t> code
        return to + 1
    if code < 0x800:
        to[0] = <uint8_t> (0xC0 | (code >> 6))
        to[1] = <uint8_t> (0x80 | (code & 0x3F))
        return to + 2
    if code < 0x10000:
        to[0] = <uint8_t> (0xE0 | (code >> 12))
        to[1] = <uint8_t> (0x80 | ((code >> 6) & 0x3F))
        to[2] = <uint8_t> (0x80 | (code & 0x3F))
        return to + 3
    to[0] = <uint8_t> (0xF0 | (code >> 18))
    to[1] = <uint8_t> (0x80 | ((code >> 12) & 0x3F))
    to[2] = <uint8_t> (0x80 | ((code >> 6) & 0x3F))
    to[3] = <uint8_t> (0x80 | (code & 0x3F))
    return to + 4


cdef inline uint8_t* put_unescaped(
    uint8_t* to, const uint8_t* at, const uint8_t* end
) noexcept nogil:
    """Write the text of a valid JSON string; return the position after it."""
    cdef uint32_t code
    while at < end:
        if end - at >= 8 and plain8(at):
            memcpy(to, at, 8)
            at += 8
            to += 8
        elif at[0] != BACKSLASH:
            to[0] = at[0]
            at += 1
            to += 1
        elif at[1] != c"u":
            to[0] = CHARACTERS[at[1]]
            at += 2
            to += 1
        else:
            code = <uint32_t> hex4(at + 2)
            at += 6
            if 0xD800 <= code <= 0xDBFF:
                code = 0x10000 + ((code - 0xD800) << 10) + <uint32_t> (hex4(at + 2) - 0xDC00)
                at += 6
            to = put_character(to, code)
    return to


cdef inline Py_ssize_t escaped_size(const uint8_t* at, Py_ssize_t size) noexcept nogil:
    """The length of the text in a JSON string; -1 if it is not UTF-8."""
    cdef Py_ssize_t total = size, left = size, character
    while left > 0:
        if left >= 8 and plain8(at):
            character = 8
        elif at[0] < 0x80:
            character = 1
            if LETTERS[at[0]]:
                total += 1
            elif at[0] < 0x20:
                total += 5
        else:
            character = utf8_size(at, left)
            if character == 0:
                return -1
        at += character
        left -= character
    return total


cdef inline uint8_t* put_escaped(
    uint8_t* to, const uint8_t* at, Py_ssize_t size
) noexcept nogil:
    """Write text as the content of a JSON string; return the position after it."""
    cdef const uint8_t* end = at + size
    cdef const char* digits = b"0123456789abcdef"
    cdef uint8_t letter
    while at < end:
        if end - at >= 8 and plain8(at):
            memcpy(to, at, 8)
            at += 8
            to += 8
            continue
        letter = LETTERS[at[0]]
        if letter:
            to[0] = BACKSLASH
            to[1] = letter
            to += 2
        elif at[0] < 0x20:
            memcpy(to, b"\\u00", 4)
            to[4] = digits[at[0] >> 4]
            to[5] = digits[at[0] & 15]
            to += 6
        else:
            to[0] = at[0]
            to += 1
        at += 1
    return to


cdef inline uint8_t* put_base64(uint8_t* to, const uint8_t* at, Py_ssize_t size) noexcept nogil:
    """Write bytes as base64 with padding; return the position after it."""
    cdef const char* letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    cdef uint32_t bits
    while size > 0:
        bits = <uint32_t> at[0] << 16
        if size > 1:
            bits |= <uint32_t> at[1] << 8
        if size > 2:
            bits |= at[2]
        to[0] = letters[bits >> 18]
        to[1] = letters[(bits >> 12) & 63]
        to[2] = letters[(bits >> 6) & 63] if size > 1 else c"="
        to[3] = letters[bits & 63] if size > 2 else c"="
        to += 4
        at += 3
        size -= 3
    return to
