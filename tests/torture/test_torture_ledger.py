"""The ledgers find every kind of broken promise, and nothing else."""

from __future__ import annotations

import pytest

from polybus.client.http.sources import Pack, StreamEvent
from polybus.torture.load.ledger import DIRECT, MessageLedger, SessionLedger, parse_value, value_of
from polybus.torture.report import INVARIANTS, Findings


def sent() -> tuple[MessageLedger, list[str]]:
    """Five values of one writer; those before the last have receipts up to offset 3."""
    ledger = MessageLedger()
    values = ledger.take("news", "boson0", 5)
    ledger.receipt("news", values[:4], 3)
    return ledger, values


def found(ledger: MessageLedger, values: list[str]) -> dict[str, int]:
    findings = Findings()
    ledger.check("news", list(enumerate(values)), findings)
    return dict(findings.broken)


def test_a_value_says_who_wrote_it() -> None:
    assert parse_value(value_of("goms1", 77)) == ("goms1", 77)
    assert parse_value(value_of("goms1", 77)[:-1]) is None
    assert parse_value("hello") is None


def test_messages_with_a_receipt_must_be_there_and_others_may() -> None:
    ledger, values = sent()
    assert found(ledger, values) == {}
    assert found(ledger, values[:4]) == {}
    # The last one with a receipt is missing.
    assert found(ledger, values[:3]) == {"lost": 1}


@pytest.mark.parametrize(
    ("offsets", "in_a_file", "in_a_cluster"),
    [([0, 1, 2, 3], [], []), ([0, 1, 3, 4], ["order"], []), ([0, 1, 1, 2], ["order"], ["order"])],
    ids=["whole", "gap", "repeated"],
)
def test_offsets_of_a_cluster_ascend_with_gaps(
    offsets: list[int], in_a_file: list[str], in_a_cluster: list[str]
) -> None:
    ledger = MessageLedger()
    values = ledger.take("news", "boson0", 4)
    for of_cluster, expected in ((False, in_a_file), (True, in_a_cluster)):
        findings = Findings()
        messages = zip(offsets, values, strict=True)
        ledger.check("news", messages, findings, of_cluster=of_cluster)
        assert list(findings.broken) == expected


@pytest.mark.parametrize(
    ("order", "broken"),
    [
        ("0123456", 0),
        # A node stored what had no receipt after its client had gone on at another.
        ("0134256", 0),
        ("0156342", 0),
        # Not in order within a connection.
        ("1023456", 1),
        ("0124356", 1),
        # Published when another had its receipt, and before it.
        ("0123465", 1),
        ("01233456", 1),
    ],
)
def test_the_order_of_a_writer_in_a_cluster_is_that_of_its_connections_and_receipts(
    order: str, broken: int
) -> None:
    ledger = MessageLedger()
    # Connections: 0 and 1; 2; 3 and 4; 5, which gets its receipt, and 6.
    values = ledger.take("news", "boson0", 2)
    for count in (1, 2, 1):
        ledger.connected("boson0")
        values += ledger.take("news", "boson0", count)
    ledger.receipt("news", values[-1:], None)
    values += ledger.take("news", "boson0", 1)
    findings = Findings()
    messages = enumerate(values[int(number)] for number in order)
    ledger.check("news", messages, findings, of_cluster=True)
    assert findings.broken["order"] == broken, findings.texts


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda values: [*values, values[4]], {"order"}),
        (lambda values: [values[1], values[0], *values[2:]], {"order"}),
        (lambda values: [*values, value_of("boson0", 5)], {"phantoms"}),
        (lambda values: [*values, value_of("boson1", 0)], {"phantoms"}),
        (lambda values: [*values[:2], "l" + values[2][1:], *values[3:]], {"phantoms", "lost"}),
        (lambda values: [*values[:2], values[3]], {"lost", "order"}),
    ],
    ids=["twice", "turned", "never sent", "no such writer", "flipped", "missing"],
)
def test_a_broken_promise_is_found(change, expected) -> None:  # type: ignore[no-untyped-def]
    ledger, values = sent()
    assert set(found(ledger, change(values))) == expected


def test_offsets_have_no_gap() -> None:
    ledger, values = sent()
    findings = Findings()
    ledger.check("news", [(0, values[0]), (2, values[1])], findings)
    assert findings.broken["order"] == 1


def pack(number: int, *events: tuple[str, str]) -> Pack:
    return Pack(number, [StreamEvent(name, text.encode(), number) for name, text in events])


def test_the_number_of_a_pack_keeps_its_meaning() -> None:
    messages, values = sent()
    session, findings = SessionLedger("key", messages), Findings()
    session.tried = 2
    session.pushed.add("1")
    session.see(pack(1, ("news", values[0])), findings)
    session.see(pack(2, (DIRECT, "1")), findings)
    # Repeated, or empty after a crash.
    session.see(pack(1, ("news", values[0])), findings)
    session.see(pack(2), findings)
    assert not findings.broken
    assert session.missing(["news"]) == [("news", value) for value in sorted(values[1:4])]

    session.see(pack(1, ("news", values[1])), findings)
    assert findings.broken == {"packs": 1}
    session.see(pack(4, ("news", values[2])), findings)
    assert findings.broken == {"packs": 2}
    session.see(pack(3, (DIRECT, "1")), findings)
    assert findings.broken == {"packs": 3}
    session.see(pack(5, (DIRECT, "2"), ("news", "never")), findings)
    assert findings.broken == {"packs": 3, "phantoms": 2}


def test_findings_of_rounds_add_up_to_a_row() -> None:
    total, one = Findings(), Findings(count=3)
    one.violated("lost", "a message")
    total.add(one)
    total.add(Findings(count=2))
    assert total.row("kills")[:2] == ["kills", 5]
    assert dict(zip(INVARIANTS, total.row("kills")[2:], strict=True))["lost"] == 1
    row = dict(zip(INVARIANTS, total.row("kills", ("packs", "lost"))[2:], strict=True))
    assert row["packs"] is None and row["order"] == 0
    assert row["lost"] == 1, "what was found is reported in any case"
