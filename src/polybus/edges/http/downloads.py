"""Answers that are sent a piece at a time, and end when the client disconnects."""

import asyncio

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class DownloadResponse(StreamingResponse):
    """Like Starlette's, but without a reference cycle when the client disconnects.

    Starlette's task group keeps the error of its cancelled task in a frame that the error's
    traceback refers to, and with it the connection, until the garbage collector runs.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            sending.cancel()
            gone.cancel()
            await asyncio.wait((sending, gone))
            if not sending.cancelled():
                sending.result()
        finally:
            sending.cancel()
            gone.cancel()
            # An error has this frame in its traceback, and its task has the error.
            del sending, gone

    async def _send(self, send: Send) -> None:
        try:
            await self.stream_response(send)
        finally:
            close = getattr(self.body_iterator, "aclose", None)
            if close is not None:
                await close()


async def disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected, whatever it sends before."""
    while (await receive())["type"] != "http.disconnect":
        pass
