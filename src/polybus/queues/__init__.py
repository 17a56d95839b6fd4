"""Message queues on an event pump, in process and over TCP (docs/protocols/queues.md).

pump           events, tasks, errors           message_queue  whole messages on a channel
channel        streams of bytes, the limits    broker         names, ports, in-process channels
tcp            the transport over TCP          registry       where brokers are, for TCP
"""

from polybus.queues.broker import (
    AcceptListener,
    Broker,
    ChannelAcceptListener,
    ChannelConnectListener,
    ConnectListener,
    QueueBroker,
)
from polybus.queues.channel import Channel, ChannelListener, QueueLimits
from polybus.queues.message_queue import MessageListener, MessageQueue
from polybus.queues.pump import EventPump, Task
from polybus.queues.registry import Registry
from polybus.queues.tcp import TcpTransport

__all__ = ["AcceptListener", "Broker", "Channel", "ChannelAcceptListener", "ChannelConnectListener"]
__all__ += ["ChannelListener", "ConnectListener", "EventPump", "MessageListener", "MessageQueue"]
__all__ += ["QueueBroker", "QueueLimits", "Registry", "Task", "TcpTransport"]
