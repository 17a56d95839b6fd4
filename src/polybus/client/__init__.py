"""The asyncio client: `async with polybus.connect(url) as c` over every protocol.

client      connect, Client                  publisher      sending, receipts
urls        addresses                        subscription   messages, resuming
connection  keeps a link up                  tracker        positions and gaps
link        one socket                       transports/    one module per protocol
"""

from polybus.client.client import Client, connect
from polybus.client.message import Message, Position
from polybus.client.subscription import Subscription

__all__ = ["Client", "Message", "Position", "Subscription", "connect"]
