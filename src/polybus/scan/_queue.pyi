from array import array

from polybus.scan.queue_py import Buffer

def scan_queue(
    buffer: Buffer, start: int, stop: int, message_bytes_max: int
) -> tuple[int, array[int]]: ...
def split_queue(
    buffer: Buffer, start: int, stop: int, message_bytes_max: int
) -> tuple[int, list[bytes]]: ...
def encode_queue(buffer: Buffer, spans: array[int]) -> bytes: ...
def join_queue(
    messages: list[bytes], first: int, run_bytes_max: int, message_bytes_max: int
) -> tuple[int, bytes]: ...
