"""A forbidden topic is not told from an unknown one by the work that its answer takes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Any

import pytest
import pytest_asyncio
from accounts_kit import PASSWORD, SPEAKERS, bus_with_accounts, peer_of

from polybus.batch import Batch
from polybus.edges.http.calls import Viewer
from polybus.edges.node import Node
from polybus.errors import PolybusError
from polybus.services.accounts.records import RIGHTS
from polybus.services.transactions.rights import check_topics

FORBIDDEN, UNKNOWN = "shop/news", "shop/none"
"""The first exists, and `office` may not use it."""


def work_of(do: Callable[[], object]) -> tuple[str, list[str]]:
    """The code of the error that something raises, and every function that is called on the way."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)
        elif event == "c_call":
            calls.append(called.__qualname__)

    code = ""
    sys.setprofile(note)
    try:
        do()
    except PolybusError as error:
        code = error.code
    finally:
        sys.setprofile(None)
    return code, calls


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node() -> AsyncIterator[Node]:
    """`shop` grants `office` much, and not its `news`."""
    async with bus_with_accounts() as found:
        for number in range(50):
            found.accounts.grant("shop", "office", f"other-{number}*", ["subscribe"])
        yield found


def alike(do: Callable[[str], object]) -> str:
    """The code that both names get, after the same work."""
    # The first error of a peer also makes the bus write to it soon.
    work_of(lambda: do("shop/warm"))
    code, calls = work_of(lambda: do(FORBIDDEN))
    assert len(calls) > 1
    assert work_of(lambda: do(UNKNOWN)) == (code, calls)
    return code


@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.asyncio(loop_scope="module")
async def test_http_does_the_same_for_unknown_and_forbidden_topics(node: Node, right: Any) -> None:
    access = node.accounts.of("office")
    assert access is not None
    viewer = Viewer(node.http, access)
    assert alike(lambda name: viewer.topic_named(name, right)) == "topic.unknown"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_session_does_the_same_for_unknown_and_forbidden_topics(node: Node) -> None:
    access = node.accounts.of("office")
    assert access is not None
    inboxes = node.services.inboxes
    assert alike(lambda name: inboxes._resolved([name], access)) == "topic.unknown"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_transaction_does_the_same_for_unknown_and_forbidden_topics(node: Node) -> None:
    access = node.accounts.of("office")
    assert access is not None
    assert alike(lambda name: check_topics(node.bus, access, [name])) == "topic.unknown"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_download_does_the_same_for_unknown_and_forbidden_payloads(node: Node) -> None:
    shop, access = node.accounts.of("shop"), node.accounts.of("office")
    assert shop is not None and access is not None
    blobs = node.services.blobs
    upload = blobs.upload(shop, FORBIDDEN)
    await upload.write(b"x" * 1000)
    kept = await blobs.keep(upload, [FORBIDDEN])
    batch = kept.batch(FORBIDDEN)
    node.bus.commit([batch])
    blobs.published(kept, [batch])
    forbidden = kept.reference.id
    assert blobs.find(shop, forbidden).size == 1000
    unknown = {FORBIDDEN: forbidden, UNKNOWN: "0" * 64, "shop/warm": "1" * 64}
    assert alike(lambda name: blobs.find(access, unknown[name])) == "blob.unknown"


@pytest.mark.parametrize("protocol", SPEAKERS)
@pytest.mark.asyncio(loop_scope="module")
async def test_streams_do_the_same_for_unknown_and_forbidden_topics(
    node: Node, protocol: str
) -> None:
    speaker = SPEAKERS[protocol]
    async with peer_of(node, speaker, "office", PASSWORD):
        # The bus may not have seen yet that the peer of the test before is gone.
        every = [one.translator for one in node.tcp.connections]
        known = [one for one in every if one is not None and one.is_known]
        [found] = [one for one in known if one.protocol == protocol]
        assert alike(found.subscribe) == "topic.unknown"
        # The error of a publish is sent to the peer.
        assert alike(lambda name: found.publish([Batch.of(name, [b"x"])])) == ""
