from array import array

from polybus.scan.properties_py import Buffer

def scan_properties(
    buffer: Buffer, start: int, stop: int, head: bytes, value_bytes_max: int
) -> tuple[int, array[int]]: ...
def encode_properties(
    head: bytes, middle: bytes, buffer: Buffer, spans: array[int], epoch: int, first_offset: int
) -> bytes: ...
