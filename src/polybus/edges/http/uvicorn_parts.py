"""Smaller substitutes for two parts of uvicorn's protocol.

uvicorn gives every connection two deques, of 760 bytes each when empty, for rare cases: requests
that wait for the answer of another, and writers that wait for the peer.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

_WRITABLE = asyncio.Event()
_WRITABLE.set()


class ListPipeline(list[Any]):
    """Waiting requests: few enough for a list (PIPELINE_MAX)."""

    __slots__ = ()

    def appendleft(self, request: Any) -> None:
        self.insert(0, request)


class LazyFlowControl(FlowControl):
    """Creates an event only while the peer does not read."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_writable_event = _WRITABLE

    def pause_writing(self) -> None:
        if not self.write_paused:
            self._is_writable_event = asyncio.Event()
        super().pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_writable_event = _WRITABLE
