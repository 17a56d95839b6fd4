from array import array
from collections.abc import Iterable

from polybus.scan.batch_py import Batch
from polybus.scan.frames_py import Buffer, Group

def scan_frames(
    buffer: Buffer, start: int, stop: int, message_bytes_max: int, topic_bytes_max: int
) -> tuple[int, list[Group]]: ...
def scan_batches(
    buffer: Buffer,
    start: int,
    stop: int,
    message_bytes_max: int,
    topic_bytes_max: int,
    names: dict[bytes, str],
    protocol: str,
) -> tuple[int, list[Batch] | None]: ...
def encode_frames(topic: bytes, buffer: Buffer, spans: array[int]) -> bytes: ...
def encode_frames_of(batches: Iterable[Batch]) -> bytes: ...
def encode_receipts(buffer: Buffer, ids: array[int], epoch: int, first_offset: int) -> bytes: ...
def encode_receipts_of(batches: Iterable[Batch]) -> bytes: ...
