"""Every refusal ends the receipt it is about, and none is waited for without end."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest
from client_kit import SCHEMES, url_of

import polybus
from polybus.client.connection import Link
from polybus.client.publisher import PendingReceipts
from polybus.client.transport import PendingPublish, Refusal, refusal
from polybus.edges.node import Node
from polybus.error_codes import CODES
from polybus.errors import BusyError, PeerError, PolybusError, StorageError
from polybus.testing import run_bus

UNKNOWN = "client.receipt-unknown"
LIMITS = {"topic-bytes-max": 80, "message-bytes-max": 200_000}
LONG = "x" * 100
UNNAMED = refusal("topic.invalid", "the topic name is over 20 bytes")


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def refused(node: Node, scheme: str, topic: str, value: bytes = b"x") -> PolybusError:
    async with polybus.connect(url_of(scheme, node.tcp_port)) as c:
        with pytest.raises(PolybusError) as caught:
            async with asyncio.timeout(5):
                await c.publish(topic, value, receipt=True)
    return caught.value


@pytest.mark.parametrize("topic", ["x" * 60, "it's", 'say "no"', "both ' and \""])
async def test_an_unknown_topic_of_any_name_ends_the_receipt(scheme: str, topic: str) -> None:
    async with run_bus("news", limits=LIMITS) as node:
        error = await refused(node, scheme, topic)
    assert error.code == "topic.unknown"


async def test_a_topic_over_the_limit_of_the_bus_ends_the_receipt(scheme: str) -> None:
    async with run_bus("news", limits=LIMITS) as node:
        error = await refused(node, scheme, LONG)
    assert error.code == ("goms.000003" if scheme == "goms" else "topic.invalid")


@pytest.mark.parametrize("size", [200_001, 2_000_000])
async def test_a_message_over_the_limit_certainly_was_not_stored(scheme: str, size: int) -> None:
    async with run_bus("news", limits=LIMITS) as node:
        error = await refused(node, scheme, "news", b"x" * size)
        assert node.bus.log.bounds("news").stop == 0
    assert error.code == ("goms.000003" if scheme == "goms" else "boson.message-too-large")


@pytest.mark.parametrize("code", ["log.full", "log.refused", "log.frozen"])
async def test_a_log_that_takes_no_writes_ends_the_receipt(
    scheme: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise StorageError(code, "why")

    async with run_bus("news") as node:
        monkeypatch.setattr(node.bus.log, "append", fail)
        error = await refused(node, scheme, "news")
        monkeypatch.undo()
    assert (error.code, type(error)) == (code, StorageError)


async def test_boson_properties_tell_each_receipt_its_own_refusal() -> None:
    """More of them in one read than complaints without a receipt are answered."""
    async with run_bus("news", limits=LIMITS) as node:
        async with polybus.connect(url_of("boson+properties", node.tcp_port)) as c:
            topics = ["news", *[LONG, "nowhere"] * 20, "news"]
            calls = [c.publish(topic, "x", receipt=True) for topic in topics]
            async with asyncio.timeout(5):
                results = await asyncio.gather(*calls, return_exceptions=True)
    told = [one.code if isinstance(one, PolybusError) else type(one) for one in results]
    bad = ["topic.invalid", "topic.unknown"] * 20
    assert told == [polybus.Position, *bad, polybus.Position]


@pytest.mark.parametrize("retry", [False, True])
async def test_a_receipt_that_does_not_come_is_given_up(
    scheme: str, retry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first conversion in a process imports pandas, which takes longer than the receipt may.
    pa.scalar(0)
    async with run_bus("news") as node:
        url = url_of(scheme, node.tcp_port)
        async with polybus.connect(url, receipt_timeout_s=0.2) as c:
            monkeypatch.setattr(node.bus, "when_durable", lambda *_: None)
            with pytest.raises(PolybusError, match="no receipt for 0.2 seconds") as caught:
                async with asyncio.timeout(5):
                    await c.publish("news", "x", receipt=True, retry=retry)
            monkeypatch.undo()
            # The next one is distinguished from the one that is missing.
            position = await c.publish("news", "y", receipt=True)
    assert caught.value.code == UNKNOWN
    assert position is not None and position.offset == 1


@pytest.mark.slow
async def test_a_receipt_is_not_given_up_while_the_message_is_still_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsent = iter([9, 8, 7, 6, 6])
    monkeypatch.setattr(Link, "unsent_bytes", property(lambda _: next(unsent)))
    async with run_bus("news") as node:
        async with polybus.connect(url_of("boson", node.tcp_port), receipt_timeout_s=0.01) as c:
            monkeypatch.setattr(node.bus, "when_durable", lambda *_: None)
            with pytest.raises(PolybusError, match=UNKNOWN):
                await c.publish("news", "x", receipt=True)
    assert list(unsent) == []


async def test_after_a_refusal_the_next_message_is_stored(scheme: str) -> None:
    async with run_bus("news", limits=LIMITS) as node:
        async with polybus.connect(url_of(scheme, node.tcp_port)) as c:
            with pytest.raises(PolybusError):
                await c.publish("news", b"x" * 300_000, receipt=True)
            async with asyncio.timeout(5):
                position = await c.publish("news", "y", receipt=True)
    assert position is not None and position.offset == 0


# What an error says when it names no receipt and no topic


def outcome(receipt: asyncio.Future[polybus.Position]) -> str | None:
    """The code of the error that ended the receipt; None while it is still out."""
    if not receipt.done():
        return None
    error = receipt.exception()
    assert isinstance(error, PolybusError)
    return error.code


@pytest.mark.parametrize("code", sorted(CODES))
async def test_every_code_ends_the_only_receipt_but_those_about_reading(code: str) -> None:
    receipts = PendingReceipts()
    asked = receipts.ask(PendingPublish("news", [b"x"]))
    about_reading = code.startswith("outbox.")
    assert receipts.refused(Refusal(refusal(code, "why"))) is not about_reading
    assert outcome(asked) == (None if about_reading else code)


async def test_of_several_receipts_none_is_said_to_be_refused_for_sure() -> None:
    receipts = PendingReceipts()
    several = [receipts.ask(PendingPublish("a", [b"x"])), receipts.ask(PendingPublish("b", [b"x"]))]
    assert receipts.refused(Refusal(UNNAMED))
    assert [outcome(asked) for asked in several] == [UNKNOWN, UNKNOWN]


async def test_the_largest_of_several_is_the_one_that_is_too_large() -> None:
    receipts = PendingReceipts()
    each = [[b"12"], [b"1", b"12345"], [b"123"]]
    several = [receipts.ask(PendingPublish("a", values)) for values in each]
    receipts.refused(Refusal(refusal("boson.message-too-large", "over the limit")))
    told = [outcome(asked) for asked in several]
    assert told == [UNKNOWN, "boson.message-too-large", UNKNOWN]


async def test_a_message_without_a_receipt_may_be_the_one_that_was_refused() -> None:
    receipts = PendingReceipts()
    receipts.sent_without("other")
    asked = receipts.ask(PendingPublish("news", [b"x"]))
    assert not receipts.refused(Refusal(UNNAMED)), "on_error is called, too"
    assert outcome(asked) == UNKNOWN


async def test_a_refusal_that_names_a_topic_sent_to_without_a_receipt_ends_none() -> None:
    receipts = PendingReceipts()
    receipts.sent_without("it's")
    asked = receipts.ask(PendingPublish("news", [b"x"]))
    error = refusal("topic.unknown", "there is no topic 'it's'")
    assert not receipts.refused(Refusal(error))
    assert outcome(asked) is None


async def test_a_later_receipt_proves_that_messages_before_it_were_read() -> None:
    receipts = PendingReceipts()
    early, later = PendingPublish("news", [b"1"]), PendingPublish("news", [b"2"])
    receipts.ask(early)
    receipts.sent_without("other")
    receipts.stored(str(early.receipt_id), polybus.Position(1, 0))
    assert not receipts.all_proven
    receipts.ask(later)
    receipts.stored(str(later.receipt_id), polybus.Position(1, 1))
    assert receipts.all_proven


@pytest.mark.parametrize(
    "error", [PeerError("boson.answer-invalid", "what?"), BusyError("outbox.dropped", "slow")]
)
async def test_what_is_no_refusal_of_a_message_ends_no_receipt(error: PolybusError) -> None:
    receipts = PendingReceipts()
    asked = receipts.ask(PendingPublish("news", [b"x"]))
    assert not receipts.refused(Refusal(error))
    assert outcome(asked) is None
