"""TCP settings for peers on the same machine, where there is no network to protect."""

import contextlib
import socket
from collections.abc import Callable
from typing import Any

NARROW_BYTES = 32 << 10
"""Linux doubles it. With much less, a loopback packet of up to 64 KiB would not fit."""
WIDE_BYTES = 1 << 20
# Linux 5.14 and newer; Python has no name for it.
_SO_BUF_LOCK = 72


def is_local(extra_info: Callable[[str], Any]) -> bool:
    """Whether both ends of a connection have the same address."""
    peer, own = extra_info("peername"), extra_info("sockname")
    return isinstance(peer, tuple) and isinstance(own, tuple) and bool(peer[0] == own[0])


def narrow(connected: socket.socket) -> None:
    """Receive into a small buffer, and send without pacing.

    A peer that writes one message at a time sends a packet for each, which costs it more than all
    our work. While its window is full, TCP joins its writes into few large packets. So a window
    that fills while the loop rests (`pace`) makes such a peer several times as fast.

    Congestion control that paces packets, such as BBR, costs a tenth of the throughput here.
    """
    with contextlib.suppress(OSError, AttributeError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BYTES)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def widen(connected: socket.socket) -> None:
    """Receive into a large buffer that may grow: the peer sends large writes."""
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WIDE_BYTES)
        connected.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
