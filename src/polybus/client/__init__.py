"""The asyncio client: `async with polybus.connect(url) as c` over every protocol.

client      connect, Client                  publisher      sending, receipts
urls        addresses                        subscription   messages, as readers see them
connection  keeps a link up                  stream_subscription  resuming on a link
link        one socket                       tracker        positions and gaps
transports/ one module per stream protocol   http/          the same over HTTP and WebSocket
msgstream   events by dotted names
"""

from polybus.client.client import Client, connect
from polybus.client.message import Message, Position
from polybus.client.subscription import Subscription

__all__ = ["Client", "Message", "Position", "Subscription", "connect"]
