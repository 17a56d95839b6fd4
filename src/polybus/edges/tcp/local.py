"""TCP with peers on this machine: there is no network to be careful with."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

NARROW_BYTES = 32 << 10
"""Linux doubles it. Much less, and a packet of loopback, up to 64 KiB, has no room at all."""
WIDE_BYTES = 1 << 20
# Linux 5.14 and newer; Python has no name for it.
_SO_BUF_LOCK = 72


def is_local(extra_info: Callable[[str], Any]) -> bool:
    """Whether both ends of a connection have the same address; asks like a transport does."""
    peer, own = extra_info("peername"), extra_info("sockname")
    return isinstance(peer, tuple) and isinstance(own, tuple) and bool(peer[0] == own[0])


def narrow(connected: socket.socket) -> None:
    """Receive into a small buffer, and send without pacing.

    A peer that writes one message at a time sends a packet for each, which costs it more than all
    we do. While its window is full, TCP puts what it writes into few large packets; so a window
    that gets full when the loop rests (`pace`) makes such a peer several times as fast.

    What paces packets for the sake of a network, like BBR, costs a tenth of the throughput here.
    """
    with contextlib.suppress(OSError, AttributeError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BYTES)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def widen(connected: socket.socket) -> None:
    """Receive into a large buffer, and let it grow: the peer sends a lot at once."""
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WIDE_BYTES)
        connected.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
