"""Detects the protocol of a connection by its first bytes.

    16 03                            TLS; look again inside
    1f 8b                            gzip; look again inside for Boson
    GET, POST, ... and a space       HTTP
    { or white space                 goMS
    bytes 4 to 9 are 00 04 h b f v   Boson properties
    a plausible header               Boson frames

Each rule answers yes, no, or None if it needs more bytes. It answers as early as possible, because
a Boson frame may be only 7 bytes and the peer may wait for its answer. No bytes satisfy two rules
as long as messages are at most 256 MiB. A connector that speaks one protocol detects only TLS and
gzip; one that speaks goMS also HTTP, to refuse it.
"""

from collections.abc import Callable, Sequence

from polybus.batch import Buffer

TLS = "tls"
GZIP = "gzip"
UNKNOWN = "unknown"

_TLS_MAGIC = b"\x16\x03"
_GZIP_MAGIC = b"\x1f\x8b"
_METHODS = (
    *(b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT "),
    *(b"TRACE ", b"PRI "),
)
_WHITE = b" \t\r\n"
_VERSION_FIRST = b"\x00\x04hbfv"
_COUNT_MAX = (1 << 16) - 1
_FLAG_MAX = 3
# A topic name, `?receipt=` and a receipt id.
_FRAME_TOPIC_BYTES_MAX = 255 + 9 + 255
_FRAME_HEADER_BYTES = 7

Verdict = bool | None


def detect(head: Buffer, speaks: Sequence[str], message_bytes_max: int) -> str | None:
    """The protocol of a connection that began with `head`.

    Returns one of `speaks`, "tls", "gzip" or "unknown"; None if more bytes are needed. More bytes
    never change an answer.
    """
    head = bytes(head[:512])
    if not head:
        return None
    wrappers = [(TLS, _TLS_MAGIC)]
    if any(protocol.startswith("boson") for protocol in speaks):
        wrappers.append((GZIP, _GZIP_MAGIC))
    for name, magic in wrappers:
        if head.startswith(magic):
            return name
        if magic.startswith(head):
            return None
    if list(speaks) == ["goms"]:
        # A web page can make its visitor's browser send HTTP here. goMS skips lines that it does
        # not understand, and would take the body for goMS lines.
        is_http = _is_http(head, speaks, message_bytes_max)
        return None if is_http is None else UNKNOWN if is_http else "goms"
    if len(speaks) == 1:
        return speaks[0]
    for name, rule in _RULES.items():
        if name in speaks:
            answer = rule(head, speaks, message_bytes_max)
            if answer is None:
                return None
            if answer:
                return name
    return UNKNOWN


def _is_http(head: bytes, _speaks: Sequence[str], _limit: int) -> Verdict:
    if head.startswith(_METHODS):
        return True
    return None if any(method.startswith(head) for method in _METHODS) else False


def _is_goms(head: bytes, speaks: Sequence[str], message_bytes_max: int) -> Verdict:
    if head[0] != ord("{") and head[0] not in _WHITE:
        return False
    # With a large limit, a tab or newline may begin the length of a frame. The flag decides, since
    # JSON text has no byte that small.
    length_min = head[0] << 24
    if length_min <= message_bytes_max and "boson-frames" in speaks:
        return None if len(head) < 5 else head[4] > _FLAG_MAX
    return True


def _is_boson_properties(head: bytes, _speaks: Sequence[str], message_bytes_max: int) -> Verdict:
    after_count = head[4:10]
    if after_count == _VERSION_FIRST:
        return True
    # As a frame, these bytes are a flag and a topic of 1,128 bytes, so more bytes will follow.
    if _VERSION_FIRST.startswith(after_count):
        return None
    return _is_properties_without_version(head, message_bytes_max)


def _is_properties_without_version(head: bytes, message_bytes_max: int) -> Verdict:
    """Whether this is a message whose version is not first; the codec then reports that error.

    Only a first key of 1 to 255 bytes can be distinguished from a frame, whose topic would then
    have 256 bytes or more: where the property has a length, the frame has printable text.
    """
    if head[4] != 0:
        return False
    key_bytes = head[5]
    count = _int32(head, 0)
    if key_bytes == 0 or not 0 < count <= _COUNT_MAX:
        return False
    length_at = 6 + key_bytes
    if len(head) < length_at + 4:
        return None
    return 0 <= _int32(head, length_at) <= message_bytes_max


def _is_boson_frames(head: bytes, _speaks: Sequence[str], message_bytes_max: int) -> Verdict:
    if len(head) < 5:
        return None
    length_fits = 0 <= _int32(head, 0) <= message_bytes_max
    flag_fits = head[4] <= _FLAG_MAX
    if length_fits == flag_fits:
        return length_fits
    # A frame with one error: the codec can report it in the peer's own protocol.
    if len(head) < _FRAME_HEADER_BYTES:
        return None
    return int.from_bytes(head[5:7]) <= _FRAME_TOPIC_BYTES_MAX


def _int32(head: bytes, at: int) -> int:
    return int.from_bytes(head[at : at + 4], signed=True)


_RULES: dict[str, Callable[[bytes, Sequence[str], int], Verdict]] = {
    "http": _is_http,
    "goms": _is_goms,
    "boson-properties": _is_boson_properties,
    "boson-frames": _is_boson_frames,
}
