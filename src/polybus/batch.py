"""Batch: many messages of one topic in one buffer, the unit of work from codec to subscriber.

A batch never holds a Python object per message. Its messages are spans of `buffer`: message `i` is
`buffer[spans[2*i]:spans[2*i + 1]]`. The buffer is whatever the messages arrived in (a socket read,
an Arrow column) and is never written to once a batch refers to it.

With a thousand topics a read is a thousand batches, so the class is compiled, and the loops over
many batches with it; its twin `polybus.scan.batch_py` has its attributes and methods in words.
"""

from __future__ import annotations

from polybus.scan import Batch
from polybus.scan.batch_py import Buffer, Headers

__all__ = ["Batch", "Buffer", "Headers"]
