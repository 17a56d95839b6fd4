"""What is above an HTTP connection: requests, or a WebSocket, or nothing when it is lost."""

import asyncio


class UpperLayer(asyncio.Protocol):
    """Takes the bytes of an HTTP connection. As it is here, it ignores them."""

    __slots__ = ()

    def let_go(self) -> None:
        """The connection is lost, or another takes its bytes: break reference cycles."""
