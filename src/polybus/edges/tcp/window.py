"""The TCP windows of peers on this machine that write single messages as fast as they can.

While its window is open, each write of such a peer becomes a packet, which costs it more than its
message costs us. While it is full, TCP puts what it writes into few large packets. So the pump
gives it a window that it fills between two reads.

A peer sends nothing into a window below half of the largest that it was ever offered, but for a
probe every 200 ms, so the narrow window depends on that. What was offered cannot be taken back, and
is dropped if it is more than the buffer has room for. So a window that has grown stays as it is.
"""

import contextlib
import socket
import struct

NARROW_BYTES = 32 << 10
"""Half of Linux's first window. Linux doubles a size that it is given, and offers about half."""
OFFERED_MAX = 128 << 10
"""A window that was larger has grown: it is not narrowed."""
WIDE_BYTES = 1 << 20
# The field tcpi_rcv_ssthresh of struct tcp_info: the largest window that is offered.
_OFFERED = struct.Struct("=64xI")
# Linux 5.14 and newer; Python has no name for it.
_SO_BUF_LOCK = 72


def narrow(connected: socket.socket) -> bool:
    """Offer little at once to a peer on this machine, and return True; a network needs more."""
    with contextlib.suppress(OSError, struct.error):
        if connected.family == socket.AF_UNIX:
            return False
        if connected.getpeername()[0] != connected.getsockname()[0]:
            return False
        said = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OFFERED.size)
        (offered,) = _OFFERED.unpack(said)
        if offered <= OFFERED_MAX:
            size = max(offered // 2, NARROW_BYTES)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
            return True
    return False


def widen(connected: socket.socket) -> None:
    """Offer much to a peer that was offered little, and let Linux offer more as by default."""
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WIDE_BYTES)
        connected.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
