"""Work of a service on its own threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from polybus.errors import StorageError

T = TypeVar("T")


async def in_thread(threads: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    """Run blocking work. Raises what it raises, and StorageError `log.closed` after a close."""
    try:
        done = asyncio.get_running_loop().run_in_executor(threads, work, *arguments)
    except RuntimeError:
        # A request that is still running when the bus stops.
        raise StorageError("log.closed", "the bus is stopping") from None
    return await done
