"""A damaged state.db: the bus starts, what is lost is named, and nothing else is affected."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from polybus.batch import Batch
from polybus.cli import main
from polybus.cli.verify import verify
from polybus.config import Config
from polybus.edges.http.metrics.gather import render
from polybus.edges.node import Node
from polybus.errors import StorageError, UsageError
from polybus.services import state_rows
from polybus.services.consumers import ConsumerPosition, Report
from polybus.services.state_rows import KEYS, examine, open_or_renew, verify_state
from polybus.services.transactions.commits import TransactionKey
from polybus.services.transactions.transactions import CommitRequest

FLIPS = 600
HELLO = b'[["direct","hello"]]'


def on_bus(data: Path, work: Callable[[Node], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        raw = {"data": str(data), "connectors": [], "topics": ["a"], "system": {"events": False}}
        node = Node(msgspec.convert(raw, Config))
        await node.start()
        try:
            return await work(node)
        finally:
            await node.stop()

    return asyncio.run(run())


async def fill(node: Node) -> None:
    """Three sessions with packs of a topic and direct ones, three consumers, three producers."""
    inboxes = node.services.inboxes
    sessions = []
    for number in range(3):
        session = inboxes.find(await inboxes.create(["a"], None, "latest"))
        assert session is not None
        sessions.append(session)
        await inboxes.post([session], b'[["direct","own %d"]]' % number)
    await inboxes.broadcast(HELLO)
    node.bus.commit([Batch.of("a", [b'"m"'])], urgent=True)
    await node.context.durability.wait()
    for session in sessions:
        await inboxes.collect(session, 0)
    epoch = node.bus.log.bounds("a").epoch
    for name in ("one", "two", "three"):
        at = {"a": ConsumerPosition(epoch=epoch, offset=1)}
        node.services.consumers.report(name, Report(positions=at))
        wanted = CommitRequest(TransactionKey(name, "query", 4), [], gaps=True)
        await node.services.transactions.commit(wanted, node.accounts.default)
    await node.services.consumers.save()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("filled") / "data"
    on_bus(data, fill)
    return data


@pytest.fixture
def data(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "data"))


async def shown(node: Node) -> dict[str, Any]:
    """What each session, consumer and producer has."""
    found: dict[str, Any] = {}
    for session in node.services.inboxes.sessions():
        packs = await node.services.inboxes.collect(session, 0)
        found[f"session {session.number}"] = [json for _, json in packs]
    for one in node.services.consumers.views():
        found[f"consumer {one.group}"] = [topic.offset for topic in one.topics]
    for producer in node.services.transactions._producers.values():
        found[f"producer {producer.name}"] = (producer.query, producer.batch)
    return found


def change(data: Path, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(data / "state.db")) as db:
        assert db.execute(sql).rowcount > 0
        db.commit()


def edited(content: bytes, seed: int) -> Iterator[tuple[str, bytes]]:
    """Flips of one byte, mostly where there is something; cuts; zeroed pages."""
    chance = random.Random(seed)
    used = [at for at, byte in enumerate(content) if byte]
    for _ in range(FLIPS):
        at = chance.choice(used) if chance.random() < 0.9 else chance.randrange(len(content))
        flipped = content[at] ^ 1 << chance.randrange(8)
        yield f"byte {at}", content[:at] + bytes([flipped]) + content[at + 1 :]
    for size in (0, 1, 99, 100, 4095, 4096, 5000, 8192, len(content) - 4096, len(content) - 1):
        yield f"cut to {size}", content[:size]
    for at in range(0, len(content), 4096):
        yield f"zeros at {at}", content[:at] + bytes(4096) + content[at + 4096 :]
    yield "text", b"no database " * 1000


def test_no_damage_goes_unnoticed_and_none_keeps_the_file_from_opening(data: Path) -> None:
    path = data / "state.db"
    content = path.read_bytes()
    whole = examine(path).rows
    noticed = 0
    for what, damaged in edited(content, seed=7):
        path.write_bytes(damaged)
        named = verify_state(data)
        assert path.read_bytes() == damaged, what
        lost = open_or_renew(path, fsync=True)
        assert bool(lost) == bool(named), f"{what}: {lost} {named}"
        assert verify_state(data) == [], what
        left = examine(path)
        for table in KEYS:
            assert set(left.rows[table]) <= set(whole[table]), f"{what}: {table}"
            if not named:
                assert left.rows[table] == whole[table], f"{what}: {table}"
        noticed += bool(named)
    assert noticed > FLIPS / 4


def test_a_flip_in_the_definition_of_a_table_is_damage_and_loses_no_intact_row(data: Path) -> None:
    """SQLite would find another column by that name, or none."""
    path = data / "state.db"
    content, whole = path.read_bytes(), examine(path).rows
    query = "SELECT sql FROM sqlite_master WHERE sql NOT NULL"
    with contextlib.closing(sqlite3.connect(path)) as db:
        texts = [sql.encode() for (sql,) in db.execute(query)]
    assert texts and content == path.read_bytes()
    places = [content.index(text) + at for text in texts for at in range(len(text))]
    chance = random.Random(3)
    for at in chance.sample(places, 200):
        flipped = content[at] ^ 1 << chance.randrange(8)
        path.write_bytes(content[:at] + bytes([flipped]) + content[at + 1 :])
        assert verify_state(data), at
    path.write_bytes(
        content.replace(
            b"direct (number INTEGER PRIMARY KEY, json", b"direct (number INTEGER PRIMARY KEY, bson"
        )
    )
    assert open_or_renew(path, fsync=True)
    assert examine(path).rows == {**whole, "producers_read": []}


@pytest.mark.parametrize("number", range(12))
def test_a_bus_starts_on_any_damaged_file(data: Path, number: int) -> None:
    whole = on_bus(data, shown)
    path = data / "state.db"
    cases = list(edited(path.read_bytes(), seed=number))
    path.write_bytes(cases[-number][1] if number % 2 else cases[number][1])
    found = on_bus(data, shown)
    for name, packs in found.items():
        if name.startswith("session"):
            given = {one for one in packs if one.startswith(b'[["direct"')}
            assert given <= set(whole[name]), name


def test_flipped_content_of_a_direct_pack_is_never_delivered(data: Path) -> None:
    whole = on_bus(data, shown)
    path = data / "state.db"
    path.write_bytes(path.read_bytes().replace(HELLO, HELLO.replace(b"hello", b"lello")))
    assert [str(one) for one in verify_state(data)] == ["direct 4: its checksum is wrong"]
    found = on_bus(data, shown)
    for name, packs in whole.items():
        if not name.startswith("session"):
            assert found[name] == packs
            continue
        assert b"lello" not in b"".join(found[name])
        notice, *rest = found[name]
        assert b'"session.overflow"' in notice and b'"count":1' in notice
        assert [one for one in rest if one != b"[]"] == [one for one in packs if one != HELLO]
    assert (data / "state.db.damaged-1").exists()
    # The notice was given: the loss is reported once.
    assert on_bus(data, shown)["session 1"] == found["session 1"][1:]


@pytest.mark.parametrize(
    ("sql", "lost", "named"),
    [
        ("UPDATE sessions SET mark = 0 WHERE number = 2", "session 2", "session 2"),
        ("UPDATE sessions SET digest = x'00' WHERE number = 2", "session 2", "session 2"),
        ("UPDATE sessions SET follows = 'no json' WHERE number = 2", "session 2", "session 2"),
        ("UPDATE consumers SET note = '{}' WHERE name = 'two'", "consumer two", "consumer two"),
    ],
)
def test_damage_is_confined_to_the_one_that_it_concerns(
    data: Path, sql: str, lost: str, named: str
) -> None:
    whole = on_bus(data, shown)
    change(data, sql)
    assert [str(one) for one in verify_state(data)] == [f"{named}: its checksum is wrong"]
    found = on_bus(data, shown)
    assert found == {name: one for name, one in whole.items() if name != lost}


def test_verify_and_the_metrics_name_what_is_lost(data: Path) -> None:
    change(data, "UPDATE sessions SET mark = 0 WHERE number = 2")
    result = CliRunner().invoke(verify, ["--data", str(data)])
    assert result.exit_code == 1
    assert "damaged: state.db: session 2: its checksum is wrong" in result.output

    async def metrics(node: Node) -> str:
        return (await render(node.http)).decode()

    assert 'polybus_state_damages{kind="session"} 1\n' in on_bus(data, metrics)
    assert CliRunner().invoke(verify, ["--data", str(data)]).exit_code == 0


def test_a_removed_file_is_named_once(data: Path) -> None:
    for path in data.glob("state.db*"):
        path.unlink()
    result = CliRunner().invoke(verify, ["--data", str(data)])
    assert result.exit_code == 1 and "damaged: state.db: the file is missing" in result.output

    async def metrics(node: Node) -> str:
        assert "producer one" in await shown(node), "the log has it"
        return (await render(node.http)).decode()

    assert 'polybus_state_damages{kind="file"} 1\n' in on_bus(data, metrics)
    assert CliRunner().invoke(verify, ["--data", str(data)]).exit_code == 0


def test_a_first_start_that_was_cut_short_has_lost_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"

    async def nothing(node: Node) -> list[Any]:
        return list(node.services.state.damages)

    on_bus(data, nothing)
    for path in (*data.glob("state.db*"), data / "accounts/default/topics"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert CliRunner().invoke(verify, ["--data", str(data)]).exit_code == 0
    assert on_bus(data, nothing) == []


def test_a_damaged_pack_leaves_a_notice_and_no_gap_in_the_numbers(data: Path) -> None:
    change(data, "UPDATE packs SET count = 7 WHERE session = 2 AND id = 1")
    assert [str(one) for one in verify_state(data)] == [
        "pack 1 of session 2: its checksum is wrong"
    ]

    async def look(node: Node) -> Any:
        inboxes = node.services.inboxes
        sessions = {one.number: one for one in inboxes.sessions()}
        return [await inboxes.collect(sessions[number], 0) for number in (1, 2)]

    first, second = on_bus(data, look)
    assert [number for number, _ in second] == [0, *(number for number, _ in first)]
    assert second[0][1].count(b'"count":1') == 1
    assert [json for _, json in second[2:]] == [json for _, json in first[1:]]


def test_retention_waits_for_a_consumer_whose_position_is_damaged(data: Path) -> None:
    change(data, "UPDATE consumers SET note = '{}' WHERE name = 'two'")

    async def held(node: Node) -> list[int | None]:
        consumers = node.services.consumers
        before = consumers.held_from("a")
        at = {"a": ConsumerPosition(epoch=node.bus.log.bounds("a").epoch, offset=1)}
        consumers.report("two", Report(positions=at))
        await consumers.save()
        return [before, consumers.held_from("a")]

    assert on_bus(data, held) == [0, 1]


def test_a_damaged_producer_is_read_from_the_log_again(data: Path) -> None:
    whole = on_bus(data, shown)
    change(data, "UPDATE producers SET json = '{}' WHERE name = 'two'")
    assert [str(one) for one in verify_state(data)] == ["producer two: its checksum is wrong"]
    assert on_bus(data, shown) == whole


def test_a_producer_that_the_log_has_forgotten_too_repeats_nothing_in_silence(data: Path) -> None:
    change(data, "INSERT INTO producers VALUES ('old', '{}', x'00')")

    async def commit(node: Node) -> None:
        wanted = CommitRequest(TransactionKey("old", "query", 4), [], gaps=True)
        with pytest.raises(UsageError) as caught:
            await node.services.transactions.commit(wanted, node.accounts.default)
        assert caught.value.code == "commit.query"

    on_bus(data, commit)
    on_bus(data, commit)


@pytest.mark.parametrize("at", [2, 9, 17, 22, 30, 40, 48, 100])
def test_saves_that_are_damaged_in_the_write_ahead_log_are_noticed(data: Path, at: int) -> None:
    path, wal = data / "state.db", data / "state.db-wal"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        for number in range(3):
            db.execute("UPDATE sessions SET mark = ? WHERE number = 1", (number,))
        # As a kill leaves them.
        files = (path.read_bytes(), wal.read_bytes())
    wal.unlink(missing_ok=True)
    flipped = files[1][:at] + bytes([files[1][at] ^ 1]) + files[1][at + 1 :]
    path.write_bytes(files[0])
    wal.write_bytes(flipped)
    assert "saves are damaged" in str(verify_state(data)[0])
    found = on_bus(data, shown)
    assert not any(name.startswith("session") for name in found)
    assert len([name for name in found if name.startswith("consumer")]) == 3


@pytest.mark.parametrize("corrupt", ["last frame flipped", "last frame cut", "removed", "none"])
def test_a_write_ahead_log_that_lost_its_last_save_is_noticed(data: Path, corrupt: str) -> None:
    files = {name: data / f"state.db{name}" for name in ("", "-wal", "-shm")}
    with contextlib.closing(sqlite3.connect(files[""], isolation_level=None)) as db:
        for save in ("CREATE TABLE another (one)", "DROP TABLE another"):
            db.execute(save)
        killed = {name: path.read_bytes() for name, path in files.items()}
    for name, path in files.items():
        path.write_bytes(killed[name])
    wal = killed["-wal"]
    if corrupt == "last frame flipped":
        files["-wal"].write_bytes(wal[:-9] + bytes([wal[-9] ^ 1]) + wal[-8:])
    elif corrupt == "last frame cut":
        files["-wal"].write_bytes(wal[:-9])
    elif corrupt == "removed":
        files["-wal"].unlink()
    is_named = any("saves are damaged or missing" in str(one) for one in verify_state(data))
    assert is_named == (corrupt != "none")
    found = on_bus(data, shown)
    assert any(name.startswith("session") for name in found) == (corrupt == "none")
    assert verify_state(data) == []


def with_lost_saves(data: Path) -> None:
    """The files as a kill leaves them, with a flipped bit in the write-ahead log."""
    files = [data / f"state.db{end}" for end in ("", "-wal", "-shm")]
    with contextlib.closing(sqlite3.connect(files[0], isolation_level=None)) as db:
        for save in ("CREATE TABLE another (one)", "DROP TABLE another"):
            db.execute(save)
        killed = [path.read_bytes() for path in files]
    for path, content in zip(files, killed, strict=True):
        path.write_bytes(content)
    wal = killed[1]
    files[1].write_bytes(wal[:100] + bytes([wal[100] ^ 1]) + wal[101:])


def state_files(data: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.glob("state.db*")}


@pytest.mark.parametrize("command", ["list", "consumers", "describe a"])
def test_no_command_hides_lost_saves(data: Path, command: str) -> None:
    with_lost_saves(data)
    before = state_files(data)
    for _ in range(2):
        result = CliRunner().invoke(main, ["topics", *command.split(), "--data", str(data)])
        assert result.exit_code == 0, result.output
    assert state_files(data) == before
    result = CliRunner().invoke(verify, ["--data", str(data)])
    assert result.exit_code == 1 and "its last saves are damaged" in result.output


def test_a_backup_neither_hides_lost_saves_nor_lacks_them(data: Path, tmp_path: Path) -> None:
    with_lost_saves(data)
    before = state_files(data)
    copy = tmp_path / "copy"
    for arguments in (["backup", str(copy)], ["verify"]):
        result = CliRunner().invoke(main, [*arguments, "--data", str(data)])
        assert result.exit_code == 1 and "its last saves are damaged" in result.output
    assert state_files(data) == state_files(copy) == before
    restored = ["restore", str(copy), "--data", str(tmp_path / "new")]
    assert CliRunner().invoke(main, restored).exit_code == 1
    assert not any(name.startswith("session") for name in on_bus(copy, shown))


def test_forgetting_a_consumer_sets_lost_saves_aside_first(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_lost_saves(data)
    before = state_files(data)
    result = CliRunner().invoke(main, ["topics", "forget", "two", "--data", str(data)])
    assert result.exit_code == 0, result.output
    assert "state.damaged" in caplog.text and "its last saves are damaged" in caplog.text
    for end in ("-wal", "-shm"):
        assert (data / f"state.db.damaged-1{end}").read_bytes() == before[f"state.db{end}"]
    found = on_bus(data, shown)
    assert [name for name in found if name.startswith("consumer")] == [
        "consumer one",
        "consumer three",
    ]
    assert not any(name.startswith("session") for name in found)


def test_saves_after_a_kill_are_read_on_a_full_disk(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_lost_saves(data)
    copyfile = shutil.copyfile

    def full(source: Path, target: Path) -> None:
        if target.is_relative_to(data):
            raise OSError(28, "No space left on device")
        copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    lost = open_or_renew(data / "state.db", fsync=True)
    assert any("its last saves are damaged" in str(one) for one in lost)
    assert not any(path.is_dir() for path in data.glob("state.db*"))


def test_a_start_continues_one_that_was_killed_before_the_new_file_had_its_name(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_lost_saves(data)
    with monkeypatch.context() as patch:
        patch.setattr(state_rows, "_put_in_place", lambda path: None)
        assert open_or_renew(data / "state.db", fsync=True)
    assert verify_state(data) == []
    result = CliRunner().invoke(main, ["topics", "consumers", "--data", str(data)])
    assert result.exit_code == 0 and "three" in result.output
    found = on_bus(data, shown)
    assert "consumer three" in found
    assert not any(name.startswith("session") for name in found)
    assert not [*data.glob("state.db.renewed*")]


def test_a_file_of_format_1_gets_checksums(data: Path) -> None:
    whole = on_bus(data, shown)
    with contextlib.closing(sqlite3.connect(data / "state.db", isolation_level=None)) as db:
        for column in ("sum", "token", "account", "packs", "first_id"):
            db.execute(f"ALTER TABLE sessions DROP COLUMN {column}")
        for table in KEYS:
            if table != "sessions":
                db.execute(f"ALTER TABLE {table} DROP COLUMN sum")
        db.execute("DROP TABLE damages")
        db.execute("PRAGMA user_version = 1")
        db.execute("PRAGMA application_id = 0")
    assert verify_state(data) == []
    assert on_bus(data, shown) == whole
    change(data, "UPDATE direct SET json = 'other'")
    assert len(verify_state(data)) == 4
    assert not (data / "state.db.damaged-1").exists()


def to_format(version: int, data: Path) -> None:
    """Sessions had no token, and before format 3 no account; nor did their checksums cover one."""
    lacked = ("token",) if version == 3 else ("token", "account")
    with contextlib.closing(sqlite3.connect(data / "state.db", isolation_level=None)) as db:
        for row in db.execute("SELECT * FROM sessions").fetchall():
            parsed = [msgspec.json.decode(row[at]) for at in (5, 6)]
            found = state_rows.session_sum((*row[:5], *parsed, *row[7 : -1 - len(lacked)]))
            db.execute("UPDATE sessions SET sum = ? WHERE number = ?", (found, row[0]))
        for column in lacked:
            db.execute(f"ALTER TABLE sessions DROP COLUMN {column}")
        db.execute(f"PRAGMA user_version = {version}")
        db.execute(f"PRAGMA application_id = {0x50420000 | version}")


@pytest.mark.parametrize("version", [2, 3])
def test_the_sessions_of_an_older_file_are_the_default_account_s(version: int, data: Path) -> None:
    whole = on_bus(data, shown)
    to_format(version, data)
    assert verify_state(data) == []

    async def owners_of(node: Node) -> tuple[Any, set[tuple[str, str]]]:
        sessions = node.services.inboxes.sessions()
        return await shown(node), {(one.account, one.token) for one in sessions}

    assert on_bus(data, owners_of) == (whole, {("default", "")})
    assert verify_state(data) == []
    assert not (data / "state.db.damaged-1").exists()


def test_damage_in_a_file_of_format_2_is_found(data: Path) -> None:
    on_bus(data, shown)
    to_format(2, data)
    change(data, "UPDATE sessions SET ttl_s = 5 WHERE number = 2")
    assert [str(one) for one in verify_state(data)] == ["session 2: its checksum is wrong"]
    assert "session 2" not in on_bus(data, shown)
    assert (data / "state.db.damaged-1").exists()


def test_a_session_cannot_be_given_to_another_account(data: Path) -> None:
    on_bus(data, shown)
    change(data, "UPDATE sessions SET account = 'shop' WHERE number = 2")
    assert [str(one) for one in verify_state(data)] == ["session 2: its checksum is wrong"]


def test_a_newer_format_is_refused_and_left_as_it_is(data: Path) -> None:
    with contextlib.closing(sqlite3.connect(data / "state.db")) as db:
        db.execute("PRAGMA user_version = 5")
        db.execute(f"PRAGMA application_id = {0x50420005}")
    before = (data / "state.db").read_bytes()
    with pytest.raises(StorageError) as caught:
        on_bus(data, shown)
    assert caught.value.code == "log.format"
    assert (data / "state.db").read_bytes() == before
