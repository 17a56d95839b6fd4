from array import array

from polybus.scan.lines_py import Buffer, Group

def scan_lines(
    buffer: Buffer,
    start: int,
    stop: int,
    messagetype: bytes,
    message_bytes_max: int,
    topic_bytes_max: int,
) -> tuple[int, list[Group]]: ...
def is_utf8(buffer: Buffer, start: int, stop: int) -> bool: ...
def encode_lines(
    head: bytes, buffer: Buffer, spans: array[int], epoch: int = -1, first_offset: int = 0
) -> bytes: ...
