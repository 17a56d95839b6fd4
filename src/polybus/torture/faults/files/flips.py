"""Flips, cuts, zeros and removals in every kind of file of a stopped bus.

Afterwards the bus must start and serve nothing wrong. `verify` must name exactly what is missing:
the topic and its offsets, the session's packs or the producer. Everything that a file does not
affect is complete, and a session is notified of lost messages.
"""

import asyncio
import contextlib
import importlib.util
import random
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from polybus.client.http.sources import WebSocketSource
from polybus.errors import PolybusError
from polybus.log.layout import exposed_folder, topic_folder
from polybus.log.verify.verify import VerifyReport
from polybus.services.state_rows import NAME as STATE
from polybus.services.transactions.commits import TOPIC as COMMITS
from polybus.torture.bus.child import NOT_SERVED, TOPICS, BusChild, shown
from polybus.torture.chances import split
from polybus.torture.checks import check_log
from polybus.torture.faults.files.corruptions import Corruption, kinds, owners_of, together
from polybus.torture.load.ledger import DIRECT, MessageLedger, value_of
from polybus.torture.load.load import LOADED, PRODUCER, Load
from polybus.torture.load.stores import (
    EXPOSED,
    PAYLOADS,
    RIGHT,
    SHARED,
    WRONG,
    position,
    served_blobs,
    table_rows,
)
from polybus.torture.report import Findings

LOAD_S = 1.5
# Each copy is verified, read and compared as a whole: few messages, in all kinds of file.
LOAD_PAUSE_S = 0.5
# A bus that lost packs is waited for, as long as a busy machine may need. Others do their work
# meanwhile.
COPIES = 4
PACKS_S_MAX = 10.0
# What a deleted topic takes with it.
SWEEP_S = 0.1
# It comes with the extras that read and write tables.
HAS_DELTA = importlib.util.find_spec("deltalake") is not None
LAKE = "lake"
LAKE_BATCHES = 4
# A hand-over takes much longer than the rest of a flip: one bus in this many has them.
HANDOVERS_EVERY = 10


@dataclass
class Holdings:
    """The data of a bus: topics' messages, the session's packs, the last transaction's number."""

    messages: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    packs: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    """The packs that a client has seen: only their numbers may not change their meaning."""
    batch: int | None = None
    refused: dict[str, str] = field(default_factory=dict)
    """Topics that the bus refuses to serve, system topics too, with its reason."""
    blobs: dict[str, str] = field(default_factory=dict)
    """Large payloads by their SHA-256: RIGHT, WRONG, or why they are not served."""
    accounts: dict[str, str] = field(default_factory=dict)
    """Named accounts, with their message and payload: RIGHT, WRONG, or what is missing."""
    shared: dict[str, str] = field(default_factory=dict)
    """Large payloads as above, after one of the topics with messages of them was deleted."""
    position: int | None = None
    """Where the consumer is."""
    tables: dict[str, list[tuple[int, str]] | str] = field(default_factory=dict)
    """The rows of each Delta table, a topic's and a lake's; a text if they cannot be read."""
    notices: set[tuple[str, str | None]] = field(default_factory=set)
    """The notices of the session, with the topic that it concerns."""


class NamedDamages:
    """The report of `verify` for a folder."""

    def __init__(self, report: VerifyReport) -> None:
        self.notes = report.notes
        self._log = [one for one in report.damages if one.file != STATE]
        self._state = [one.reason.split()[0] for one in report.damages if one.file == STATE]
        self.topics = {one.topic for one in self._log if one.topic is not None}
        # It is unknown whose messages were in damaged bytes of the journal.
        self.has_unknown = any("topics unknown" in one.reason for one in self._log)

    @property
    def is_torn(self) -> bool:
        """A commit without an index record, as after a crash, looks like a truncated one."""
        return any("an unfinished write" in note for note in self.notes)

    def has_topic(self, topic: str) -> bool:
        return topic in self.topics or self.has_unknown

    def has_offset(self, topic: str, offset: int) -> bool:
        return self.has_unknown or any(
            one.topic == topic
            and (one.first is None or one.first <= offset <= (one.last or one.first))
            for one in self._log
        )

    def has_blob(self, blob_id: str) -> bool:
        """Whether it names a large payload, or messages that may refer to it."""
        # Those that a missing blob concerns are named with it.
        lost = {one.topic for one in self._log if "/blobs/" not in one.file}
        is_lost = self.has_unknown or PAYLOADS in lost
        return is_lost or any(blob_id in one.file for one in self._log)

    def has_table(self, table: str) -> bool:
        """Whether it names a file of a Delta table, or its topic."""
        return self.has_topic(table) or bool(self._files_of(table))

    def has_rows(self, table: str) -> bool:
        """Whether it names a file with rows of a Delta table.

        Polybus does not serve these files. Whoever reads them does not know their checksums.
        """
        return any(
            file.endswith(".parquet") and "/_delta_log/" not in file
            for file in self._files_of(table)
        )

    def _files_of(self, table: str) -> list[str]:
        paths = {EXPOSED: f"topics/{EXPOSED}/", LAKE: f"tables/{LAKE}/"}
        return [one.file for one in self._log if paths[table] in one.file]

    def has_account(self, name: str) -> bool:
        """Whether it names a file of an account, or messages of it."""
        return self.has_unknown or any(
            f"accounts/{name}/" in one.file or (one.topic or "").startswith(f"{name}/")
            for one in self._log
        )

    def has_state(self, *kinds: str) -> bool:
        """Whether it names one of these, or a part of state.db that may have had some."""
        others = {"session", "pack", "direct", "consumer", "producer"}
        return any(kind in kinds or kind not in others for kind in self._state)


async def flip_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Fill a data folder once, then corrupt `count` copies of it, one file each."""
    findings = Findings()
    child = BusChild(folder, settings=LOADED)
    load = Load(child, split(chance), findings, pause_s=LOAD_PAUSE_S)
    is_killed = chance.random() < 0.5
    try:
        if not await child.start():
            findings.violated("starts", f"no start; see {folder}/bus.log")
            return findings
        await _fill(load)
        if is_killed:
            child.kill()
        else:
            await child.stop()
    finally:
        child.kill()
    await asyncio.to_thread(child.await_orphans)
    _write_table(child.data)
    _copy(child.data, folder / "whole" / "data")
    # Without hand-overs: they would add rows to the exposed table that a corrupted copy may lack.
    expected = await _serve_copy(load, "whole", [], Holdings(), handovers=False)
    for state in (*expected.blobs.values(), *expected.accounts.values()):
        if state != RIGHT:
            findings.violated("lost", f"a large payload or account of an intact copy: {state}")
    _check_whole(load, expected)
    expected.seen = set() if load.session is None else set(load.session.contents)
    corruptions = [Corruption.draw(split(chance)) for _ in range(count)]
    found = kinds(child.data)
    files = [one.path(found).relative_to(child.data) for one in corruptions]
    waiting = list(enumerate(together(map(str, files))))[::-1]

    async def work() -> None:
        while waiting:
            number, members = waiting.pop()
            handovers = number % HANDOVERS_EVERY == 0
            done = [(corruptions[one], files[one]) for one in members]
            is_good = await _corrupt_copy(load, f"corrupted-{number}", done, expected, handovers)
            if not is_good and len(done) > 1:
                # Which of them it was, and whether it was one.
                for part, one in enumerate(done):
                    await _corrupt_copy(
                        load, f"corrupted-{number}-{part}", [one], expected, handovers
                    )
            findings.count += len(done)

    await asyncio.gather(*(work() for _ in range(COPIES)))
    return findings


async def _corrupt_copy(
    load: Load, name: str, done: list[tuple[Corruption, Path]], expected: Holdings, handovers: bool
) -> bool:
    """Corrupt files of a copy, serve it, and compare; whether no promise was broken."""
    copy = load.child.folder / name
    _copy(load.child.data, copy / "data")
    corrupted = [corruption.apply(copy / "data", copy / "data" / path) for corruption, path in done]
    await _serve_copy(load, name, corrupted, expected, handovers=handovers)
    return not copy.exists()


def _write_table(data: Path) -> None:
    """A lake table of some versions and a checkpoint, as a pipeline makes it, without Spark."""
    if not HAS_DELTA:
        return
    from polybus.lake.compact import checkpoint
    from polybus.lake.table import open_table

    table = open_table(data, LAKE)
    for batch in range(LAKE_BATCHES):
        rows = {"offset": [batch], "value": [value_of(LAKE, batch).encode()]}
        table.append(pa.table(rows), writer=LAKE, batch_id=batch)
        if batch == LAKE_BATCHES - 2:
            checkpoint(table)


def _tables(data: Path, messages: MessageLedger) -> dict[str, list[tuple[int, str]] | str]:
    """The rows of both tables, as a reader finds them."""
    found: dict[str, list[tuple[int, str]] | str] = {}
    try:
        rows = table_rows(exposed_folder(topic_folder(data, EXPOSED)))
        found[EXPOSED] = [(offset, messages.resolved(text)) for offset, text in rows]
    except Exception as error:  # Of damaged files, and of any kind.
        found[EXPOSED] = repr(error)
    if not HAS_DELTA:
        return found
    from deltalake import DeltaTable

    try:
        rows = DeltaTable(data / "tables" / LAKE).to_pyarrow_table().to_pylist()
        found[LAKE] = sorted((one["offset"], one["value"].decode()) for one in rows)
    except Exception as error:  # Of another library, and of any kind.
        found[LAKE] = repr(error)
    return found


def _check_whole(load: Load, stored: Holdings) -> None:
    """Check that uncorrupted data has everything that was promised."""
    if len(stored.tables.get(LAKE, range(LAKE_BATCHES))) != LAKE_BATCHES:
        load.findings.violated("lost", f"the table {LAKE}: {stored.tables[LAKE]}")
    for topic, messages in stored.messages.items():
        load.messages.check(topic, messages, load.findings)
    # The load has stopped: at most the answer to its last transaction did not come.
    last = load.batch - 1 if load.batch else None
    if stored.batch not in (last, load.batch):
        text = f"the last batch is {stored.batch} and was {last} in an intact copy"
        load.findings.violated("transactions", text)


def _copy(data: Path, to: Path) -> None:
    # It takes a tenth of the time of a copy in Python.
    to.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(data), str(to)], check=True)


async def _fill(load: Load) -> None:
    running = asyncio.create_task(load.run())
    await asyncio.sleep(LOAD_S)
    load.stopping.set()
    await running
    # Every message is in a pack, and no more packs come later.
    await load.drain(confirm=False)


async def _serve_copy(
    load: Load, name: str, corrupted: list[str], expected: Holdings, *, handovers: bool = True
) -> Holdings:
    """Verify a copy, serve it, and compare its data with the expected data."""
    findings = Findings()
    folder = load.child.folder / name
    child = BusChild(folder, handovers=handovers, settings=LOADED)
    report = await child.verified()
    stored = Holdings()
    try:
        if isinstance(report, str):
            findings.violated("verify", report)
        if not await child.start():
            findings.violated("starts", child.log_text[-300:].replace("\n", " | "))
            return stored
        stored = await _stored(child, load, expected)
        named = NamedDamages(VerifyReport() if isinstance(report, str) else report)
        if corrupted:
            compare(stored, expected, named, corrupted, findings)
        elif stored.refused or isinstance(report, str) or not report.intact:
            findings.violated("verify", f"damage in an intact copy: {report} {stored.refused}")
        await load.check_deleted(child, findings, named.topics)
        code = await child.stop()
        if code != 0:
            findings.violated("starts", f"exit code {code} after SIGTERM")
        await check_log(child, findings)
    except PolybusError as error:
        findings.violated("errors", f"the bus does not answer: {shown(error)}")
    finally:
        child.kill()
        done = "; ".join(corrupted) or "intact"
        findings.texts = [f"{text} ({done}, {name})" for text in findings.texts]
        load.findings.add(findings)
        load.findings.texts += findings.texts
        if not findings.broken:
            shutil.rmtree(folder)
    return stored


async def _stored(child: BusChild, load: Load, expected: Holdings) -> Holdings:
    """Read everything. Refused topics are recorded and skipped."""
    stored = Holdings()
    listed = (await child.ask("GET", "/v1/topics?system=true"))["topics"]
    stored.refused = {one["name"]: one["damaged"] for one in listed if one.get("damaged")}
    for topic in TOPICS:
        stored.messages[topic] = []
        try:
            stored.messages[topic] = (await child.messages(topic))[1]
        except PolybusError as error:
            stored.refused[topic] = shown(error)
    assert load.stores is not None
    stored.blobs = await served_blobs(child, load.stores.blobs)
    stored.accounts = await load.stores.served_accounts(child)
    with contextlib.suppress(PolybusError):
        stored.position = await position(child)
    stored.tables = await asyncio.to_thread(_tables, child.data, load.messages)
    with contextlib.suppress(PolybusError):
        stored.batch = (await child.ask("GET", f"/v1/commits/{PRODUCER}"))["batch"]
    assert load.session is not None
    wanted = set(expected.packs or load.session.contents)
    with contextlib.suppress(PolybusError, TimeoutError):
        source = await WebSocketSource.open(child.options("ws"), load.session.key)
        try:
            async with asyncio.timeout(PACKS_S_MAX):
                while wanted - stored.packs.keys():
                    for pack in await source.receive():
                        if pack.pack_id:
                            events = [(event.name, event.value.decode()) for event in pack.events]
                            stored.packs[pack.pack_id] = events
                            continue
                        for event in pack.events:
                            about = event.data if event.raw[:1] == b"{" else {}
                            stored.notices.add((event.name, about.get("topic")))
        finally:
            await source.close()
    # It may be damaged, and then stays listed, or it may be gone.
    with contextlib.suppress(PolybusError):
        await child.ask("DELETE", f"/v1/topics/{SHARED}")
        await asyncio.sleep(SWEEP_S)
    stored.shared = await served_blobs(child, load.stores.blobs)
    return stored


def compare(
    stored: Holdings,
    expected: Holdings,
    named: NamedDamages,
    corrupted: Sequence[str],
    findings: Findings,
) -> None:
    """Check that nothing is wrong, and that exactly the missing data is `named`.

    Each text of `corrupted` begins with the name of a file.
    """
    owners = owners_of(text.split(" ")[0] for text in corrupted)
    for topic in stored.refused.keys() | named.topics:
        if owners is not None and topic not in owners:
            findings.violated("verify", f"{topic} is damaged too: {stored.refused.get(topic)}")
    for topic, reason in stored.refused.items():
        if not named.has_topic(topic):
            findings.violated(
                "verify", f"{topic} is refused, and verify does not report it: {reason}"
            )
    for topic, right in expected.messages.items():
        _compare_topic(topic, stored, dict(right), named, findings)
    _compare_packs(stored, expected, named, findings)
    for blob_id, state in (*stored.blobs.items(), *stored.shared.items()):
        is_named = named.has_blob(blob_id)
        _compare_store(f"blob {blob_id[:12]}", state, findings, is_named=is_named)
    _compare_tables(stored, expected, named, findings)
    if stored.position != expected.position and not named.has_state("consumer"):
        text = f"the consumer is at {stored.position} and was at {expected.position}"
        findings.violated("lost", text)
    for name, state in stored.accounts.items():
        is_named = named.has_account(name) or named.is_torn
        _compare_store(f"account {name}", state, findings, is_named=is_named)
    is_named = named.has_state("producer") or named.has_topic(COMMITS)
    if stored.batch != expected.batch and not is_named:
        text = f"the last batch is {stored.batch} and was {expected.batch}"
        findings.violated("transactions", text)


def _compare_store(what: str, state: str, findings: Findings, *, is_named: bool) -> None:
    if state == WRONG:
        findings.violated("phantoms", f"{what} has content that was never sent")
    elif state != RIGHT and not is_named:
        findings.violated(
            "verify", f"{what} is not served ({state}), and verify does not report it"
        )


def _compare_tables(
    stored: Holdings, expected: Holdings, named: NamedDamages, findings: Findings
) -> None:
    for table, rows in stored.tables.items():
        right = expected.tables.get(table)
        is_more = table == EXPOSED and rows[: len(right or ())] == right
        # A hand-over of the copy may have added rows, which are those of the topic.
        if rows == right or (is_more and set(rows) <= set(expected.messages[EXPOSED])):
            continue
        is_wrong = isinstance(rows, list) and not set(rows) <= set(right or ())
        if is_wrong and not named.has_rows(table):
            findings.violated("phantoms", f"the table {table} has wrong rows")
        elif not named.has_table(table):
            reason = rows if isinstance(rows, str) else f"{len(rows)} rows"
            findings.violated(
                "verify", f"the table {table}: {reason}, and verify does not report it"
            )


def _compare_topic(
    topic: str, stored: Holdings, right: dict[int, str], named: NamedDamages, findings: Findings
) -> None:
    found = dict(stored.messages[topic])
    for offset, text in list(found.items()):
        if text.startswith(NOT_SERVED) and named.has_blob(text.split()[-1]):
            del found[offset], right[offset]
        elif right.get(offset) != text:
            findings.violated("phantoms", f"{topic} {offset}: {text[:40]!r} is wrong")
    missing = sorted(right.keys() - found.keys())
    if topic in stored.refused:
        return
    # Only what comes after all that is there.
    torn = max(found, default=-1) + 1 if named.is_torn else max(right, default=-1) + 1
    silent = [one for one in missing if one < torn and not named.has_offset(topic, one)]
    if silent:
        text = f"{len(silent)} messages of {topic} are missing without a report, {silent[0]} first"
        findings.violated("verify", text)


def _compare_packs(
    stored: Holdings, expected: Holdings, named: NamedDamages, findings: Findings
) -> None:
    sent = {event for events in expected.packs.values() for event in events}
    for number, events in stored.packs.items():
        before = expected.packs.get(number)
        if events and before is not None and number in expected.seen and events != before:
            findings.violated("packs", f"pack {number} has changed")
        elif not sent.issuperset(events):
            findings.violated("phantoms", f"pack {number} has content that was never sent")
    lost = sent - {event for events in stored.packs.values() for event in events}
    told = {topic for _, topic in stored.notices}
    is_gone = ("session.unset", None) in stored.notices
    for topic in sorted({topic for topic, _ in lost}):
        is_named = named.has_state("session", "pack", "direct")
        is_named |= topic != DIRECT and named.has_topic(topic)
        if not is_named:
            findings.violated(
                "packs", f"events of {topic} are missing, and verify does not report it"
            )
        if not is_gone and (None if topic == DIRECT else topic) not in told and None not in told:
            findings.violated(
                "packs", f"events of {topic} are missing, and the session gets no notice"
            )
