"""Listening sockets, on systems that lack a family of addresses."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from polybus.edges.tcp.listener import bind

IPV4, IPV6 = socket.AF_INET, socket.AF_INET6


def remove_families(monkeypatch: pytest.MonkeyPatch, *missing: int) -> None:
    class FewerFamilies(socket.socket):
        def __init__(self, family: int = IPV4, *options: Any, **named: Any) -> None:
            if family in missing:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *options, **named)

    monkeypatch.setattr(socket, "socket", FewerFamilies)


@pytest.mark.parametrize(("missing", "left"), [(IPV6, IPV4), (IPV4, IPV6)])
async def test_all_addresses_are_those_of_the_family_that_there_is(
    monkeypatch: pytest.MonkeyPatch, missing: int, left: int
) -> None:
    with monkeypatch.context() as patched:
        remove_families(patched, missing)
        try:
            sockets = await bind("", 0)
        except OSError as error:
            # This machine has no IPv6 either.
            assert left == IPV6
            assert error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
            return
    assert [one.family for one in sockets] == [left]
    for one in sockets:
        one.close()


async def test_no_family_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        remove_families(patched, IPV4, IPV6)
        with pytest.raises(OSError, match="not supported"):
            await bind("", 0)
