"""Settings of glibc's malloc and of imports for the bus, so that it takes little memory.

By default glibc keeps it. Its threshold for separately mapped blocks grows with the largest freed
block, up to 32 MiB; from then on large answers are allocated between small objects in the heap, and
the holes that they leave stay resident. So without this, freed memory does not go back to the
system. Nothing is changed for other C libraries.
"""

import ctypes
import os
import sys
import threading
import time

from polybus.processes import memory_bytes

# Names and numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# A block of this size or more is mapped separately, and unmapped when it is freed. Read buffers and
# commits are smaller: new pages for each of them would cost a tenth of the throughput.
MAPPED_BYTES = 8 << 20
# Free memory at the end of a heap is returned from this size on.
HEAP_END_BYTES = 64 << 20
# Threads share heaps: a separate heap for each worker thread would keep its own holes.
HEAPS = 2
# If the process has grown by this much, holes in the heaps are returned every TRIM_S. That takes
# about a millisecond.
GROWN_BYTES = 16 << 20
TRIM_S = 5.0


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    is_glibc = all(hasattr(library, name) for name in ("mallopt", "malloc_trim"))
    return library if is_glibc else None


def tune() -> None:
    """Set the limits. Call this before there are threads, and before pyarrow is imported."""
    # Arrow's own allocator keeps what was freed, for each thread.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    # pyarrow imports numpy if it can, and a bus uses none of it: 11 MiB, a thread, and a tenth of
    # the processor time of a start.
    sys.modules.setdefault("numpy", None)  # type: ignore[arg-type]
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, HEAP_END_BYTES)
        library.mallopt(_M_ARENA_MAX, HEAPS)


def trim_regularly() -> None:
    """Return holes in the heaps to the system regularly, in a separate thread."""
    library = _glibc()
    start_bytes = memory_bytes()[1]
    if library is None or not start_bytes:
        return
    trim = library.malloc_trim

    def run() -> None:
        while True:
            time.sleep(TRIM_S)
            if memory_bytes()[1] > start_bytes + GROWN_BYTES:
                trim(0)

    threading.Thread(target=run, name="polybus-trim", daemon=True).start()
