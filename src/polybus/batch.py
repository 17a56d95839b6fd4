"""Batch: many messages of one topic in one buffer, the unit of work from codec to subscriber.

A batch has no Python object per message. Its messages are spans of `buffer`: message `i` is
`buffer[spans[2*i]:spans[2*i + 1]]`. The buffer is whatever the messages arrived in (a socket read,
an Arrow column) and is never modified while a batch refers to it.

With a thousand topics a read is a thousand batches, so the class and the loops over many batches
are compiled; `polybus.scan.batch` documents its attributes and methods.
"""

from polybus.scan import Batch
from polybus.scan.batch import Buffer, Headers

__all__ = ["Batch", "Buffer", "Headers"]
