"""The asyncio client: `async with polybus.connect(url) as c` over every protocol.

client      connect, Client                  publisher      sending, pending receipts
options     settings, addresses              subscription   messages for readers, positions, gaps
connection  one socket, reconnects           transport      the contract of stream protocols
retry       back-off, the retry loop         protocols      the stream protocols
message     messages, positions, starts      http/          HTTP and WebSocket, async and blocking
msgstream   events by dotted names
"""

from polybus.client.client import Client, connect
from polybus.client.message import Message, Position
from polybus.client.subscription import Subscription

__all__ = ["Client", "Message", "Position", "Subscription", "connect"]
