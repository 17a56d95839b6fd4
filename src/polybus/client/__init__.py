"""The asyncio client: `async with polybus.connect(url) as c` over every protocol.

client      connect, Client                  publisher      sending over a stream protocol
urls        addresses                        receipts       pending receipts, base of publishers
connection  reconnects one link              subscription   messages for readers
link        one socket                       stream_subscription  positions, gaps, resuming
retry       back-off, the retry loop         message        messages, positions, starts
transports/ the stream protocols             http/          HTTP and WebSocket, async and blocking
msgstream   events by dotted names           options        settings
"""

from polybus.client.client import Client, connect
from polybus.client.message import Message, Position
from polybus.client.subscription import Subscription

__all__ = ["Client", "Message", "Position", "Subscription", "connect"]
