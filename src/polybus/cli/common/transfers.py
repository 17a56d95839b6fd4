"""Transfers of large payloads: progress, and how long to wait after an interruption.

A transfer that has moved bytes is continued when its connection breaks, as long as the bus is back
within TRIES_MAX attempts. One that never began fails at once: the address may be wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from polybus.cli.common.output import progress_bar, say
from polybus.client.blobs import BROKEN_OFF, BlobProgress
from polybus.client.retry import Backoff
from polybus.errors import PolybusError

T = TypeVar("T")
TRIES_MAX = 10


async def transferred(
    label: str, transfer: Callable[[BlobProgress], Awaitable[T]], *, hidden: bool
) -> T:
    """Run a transfer to its end, with a progress bar. Raises what it raises."""
    with progress_bar(label[:40], hidden=hidden) as update:
        moved, tries = -1, 0

        def progress(done_bytes: int, total_bytes: int | None) -> None:
            nonlocal moved, tries
            moved, tries = done_bytes, 0
            update(completed=done_bytes, total=total_bytes)

        backoff = Backoff()
        while True:
            try:
                return await transfer(progress)
            except PolybusError as error:
                has_begun = moved >= 0 or error.code == "blob.arriving"
                tries += 1
                if error.code not in BROKEN_OFF or not has_begun or tries > TRIES_MAX:
                    raise
                if tries == 1:
                    say(f"{label}: the connection was interrupted, trying to continue")
            await asyncio.sleep(backoff.next_s())
