"""Message queues on an event pump, in process and over TCP (docs/protocols/queues.md)."""

from polybus.queues.broker import Broker, ChannelAcceptListener, ChannelConnectListener
from polybus.queues.channel import Channel, ChannelListener
from polybus.queues.limits import QueueLimits
from polybus.queues.message_queue import MessageListener, MessageQueue
from polybus.queues.pump import EventPump
from polybus.queues.queue_broker import AcceptListener, ConnectListener, QueueBroker
from polybus.queues.registry import Registry
from polybus.queues.task import Task
from polybus.queues.tcp import TcpTransport

__all__ = [
    "AcceptListener",
    "Broker",
    "Channel",
    "ChannelAcceptListener",
    "ChannelConnectListener",
    "ChannelListener",
    "ConnectListener",
    "EventPump",
    "MessageListener",
    "MessageQueue",
    "QueueBroker",
    "QueueLimits",
    "Registry",
    "Task",
    "TcpTransport",
]
