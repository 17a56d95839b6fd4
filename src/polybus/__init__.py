"""Polybus: one message bus, five wire protocols, one durable log.

async def main():
    async with polybus.connect("boson://127.0.0.1:55545") as c:
        await c.publish("news", "hello", receipt=True)
        async for message in c.subscribe("news", start="earliest"):
            print(message.position, message.text)
"""

from __future__ import annotations

from polybus.version import __version__

# Not from typing: a command must get to its signal handlers soon (polybus.entry).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from polybus.client import Client, Message, Position, Subscription, connect

__all__ = ["Client", "Message", "Position", "Subscription", "__version__", "connect"]


def __getattr__(name: str) -> Any:
    """Import the client on first use: the bus itself does not need it."""
    import importlib

    if name in __all__:
        return getattr(importlib.import_module("polybus.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
