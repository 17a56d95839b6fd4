"""Damage to any file of the log: it is named, confined to its topics, and deletes nothing."""

from __future__ import annotations

import os
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from log_kit import opened_log

from polybus.batch import Batch
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log import checked_json, layout
from polybus.log.files import FileLog
from polybus.log.history.handover import compact, hand_over
from polybus.log.history.manifest import NAME as MANIFEST
from polybus.log.topics import was_deleted
from polybus.log.verify.verify import verify
from polybus.services.backup import _Copy as Copy
from polybus.services.backup import backup, restore

Messages = dict[str, list[bytes]]


class Clock:
    now_us = 1_700_000_000_000_000

    def __call__(self) -> int:
        self.now_us += 1000
        return self.now_us


CLOCK = Clock()


def opened(data: Path) -> FileLog:
    return opened_log(data, CLOCK)


def publish(log: FileLog, topic: str, *values: str) -> None:
    log.append(Batch.of(topic, [value.encode() for value in values]))
    log.sync()


def messages(log: FileLog) -> Messages:
    """Of every topic that can be read to its end; the damaged ones are left out."""
    found: Messages = {}
    for topic in log.topics():
        try:
            bounds = log.bounds(topic)
            values: list[bytes] = []
            while bounds.start + len(values) < bounds.stop:
                for batch in log.read(topic, bounds.start + len(values)):
                    values += batch.values()
            found[topic] = values
        except StorageError:
            continue
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """History, two segments, an empty topic, a deleted one, and one that was created again."""
    data = tmp_path_factory.mktemp("data")
    log = opened(data)
    for topic in ("old", "both", "new", "gone", "again", "empty"):
        log.create_topic(topic)
    for topic in ("old", "both", "again"):
        publish(log, topic, f"{topic} 0", f"{topic} 1")
    log.seal()
    log.after_handover(hand_over(data, grace_s=0))
    for topic in ("both", "new", "gone", "again"):
        publish(log, topic, f"{topic} 2", f"{topic} 3")
    log.seal()
    log.delete_topic("gone")
    log.delete_topic("again")
    log.create_topic("again")
    publish(log, "again", "again 4")
    publish(log, "new", "new 4")
    log.close()
    return data


@pytest.fixture
def data(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "data"))


def folder_of(data: Path, topic: str) -> Path:
    return layout.topic_folder(data, topic)


def damages(content: bytes, draw: random.Random, flips: int) -> Iterator[tuple[str, bytes | None]]:
    yield "removed", None
    yield "emptied", b""
    yield "zeros", bytes(len(content))
    yield "cut", content[: draw.randrange(len(content))]
    yield "cut by one", content[:-1]
    for _ in range(flips):
        at = draw.randrange(len(content))
        changed = bytearray(content)
        changed[at] ^= 1 << draw.randrange(8)
        yield f"flip at {at}", bytes(changed)


def test_no_damage_is_silent_confined_to_its_topics_and_deletes_nothing(
    original: Path, tmp_path: Path
) -> None:
    log = opened(Path(shutil.copytree(original, tmp_path / "intact")))
    expected = messages(log)
    log.close()
    assert {"gone"} & expected.keys() == set() and expected["again"] == [b"again 4"]
    draw = random.Random(11)
    files = sorted(path for path in original.rglob("*") if path.is_file() and path.stat().st_size)
    kinds = {path.suffix for path in files}
    assert kinds == {".json", ".arrows", ".index", ".parquet"}
    for path in files:
        flips = 4 if path.suffix == ".json" else 2
        for what, content in damages(path.read_bytes(), draw, flips):
            data = Path(shutil.copytree(original, tmp_path / "damaged"))
            name = path.relative_to(original)
            if content is None:
                (data / name).unlink()
            else:
                (data / name).write_bytes(content)
            check(data, expected, f"{name}: {what}")
            shutil.rmtree(data)


def check(data: Path, expected: Messages, what: str) -> None:
    named = not verify(data).intact
    for _ in range(2):
        log = opened(data)
        found = messages(log)
        for topic, values in found.items():
            # A torn write at the very end looks like a message that was never confirmed.
            whole = expected.get(topic, [])
            assert values == whole[: len(values)], f"{what}: {topic} has {values}"
            if len(values) < len(whole):
                assert values == whole[:-1] and what.split(":")[0].endswith(".arrows"), what
        lost = expected.keys() - found.keys()
        assert not lost or named, f"{what}: {lost} lost, and verify says intact"
        assert "gone" not in found, what
        for topic in log.frozen:
            with pytest.raises(PolybusError):
                log.create_topic(topic)
        log.seal()
        before = sum(1 for topic in found for _ in found[topic])
        log.after_handover(hand_over(data, grace_s=0))
        after = messages(log)
        assert sum(len(after.get(topic, [])) for topic in found) >= before, what
        log.close()


@pytest.mark.parametrize("topic", ["old", "both", "new"])
def test_rows_survive_the_loss_of_topic_json(data: Path, topic: str) -> None:
    path = folder_of(data, topic) / "topic.json"
    kept = path.read_bytes()
    log = opened(Path(shutil.copytree(data, data.with_name("intact"))))
    expected = messages(log)
    log.close()
    path.unlink()
    assert not verify(data).intact
    log = opened(data)
    assert list(log.frozen) == [topic]
    with pytest.raises(UsageError, match="topic.exists"):
        log.create_topic(topic)
    with pytest.raises(StorageError, match="log.frozen"):
        log.append(Batch.of(topic, [b"x"]))
    log.seal()
    log.after_handover(hand_over(data, grace_s=0))
    log.close()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(kept)
    log = opened(data)
    assert (messages(log), log.frozen) == (expected, {})
    log.close()


def test_a_topic_that_is_lost_can_be_deleted_and_created_again(data: Path) -> None:
    (folder_of(data, "new") / "topic.json").unlink()
    log = opened(data)
    log.delete_topic("new")
    log.create_topic("new")
    publish(log, "new", "other")
    log.close()
    log = opened(data)
    assert not log.frozen
    assert messages(log)["new"] == [b"other"]
    log.close()
    assert verify(data).intact


def test_tombstones_go_with_the_journal_rows_of_their_topics(data: Path) -> None:
    trash = layout.trash_folder(data)

    def tombstones() -> list[Path]:
        # Beside them is the folder where new topics are made.
        return [path for path in trash.iterdir() if path.name.isdigit()]

    assert len(tombstones()) == 2
    log = opened(data)
    log.seal()
    log.after_handover(hand_over(data, grace_s=0))
    log.apply_retention(0)
    log.create_topic("unused")
    log.delete_topic("unused")
    log.close()
    assert not tombstones()


def test_a_backup_has_the_tombstones_of_its_journal(data: Path) -> None:
    backup(data, data.with_name("copy"))
    restore(data.with_name("copy"), data.with_name("restored"))
    assert verify(data.with_name("restored")).intact
    log = opened(data.with_name("restored"))
    assert not log.frozen
    log.close()


def test_a_backup_has_the_tombstones_of_topics_that_are_deleted_meanwhile(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_accounts = Copy.accounts

    def later(copy: Copy) -> None:
        log.delete_topic("new")
        log.after_handover(done)
        log.apply_retention(0)
        copy_accounts(copy)

    monkeypatch.setattr(Copy, "state", lambda _: None)
    monkeypatch.setattr(Copy, "accounts", later)
    log = opened(data)
    log.seal()
    done = hand_over(data, grace_s=0)
    backup(data, data.with_name("copy"))
    log.apply_retention(0)
    log.close()
    assert verify(data.with_name("copy")).damages == []
    assert not [path for path in layout.trash_folder(data).iterdir() if path.name.isdigit()]


def test_an_old_folder_gets_checksums_and_tombstones(data: Path) -> None:
    for path in (data / "polybus.json", *layout.topics_folder(data).glob("*/topic.json")):
        fields = msgspec.json.decode(path.read_bytes())
        del fields["xxh3"]
        path.write_bytes(msgspec.json.encode(fields))
    shutil.rmtree(layout.trash_folder(data))
    assert verify(data).intact
    log = opened(data)
    assert not log.frozen
    assert messages(log)["again"] == [b"again 4"]
    log.close()
    for path in (data / "polybus.json", *layout.topics_folder(data).glob("*/topic.json")):
        assert checked_json.is_checked(path.read_bytes()), path
    [epoch] = [int(path.name) for path in layout.trash_folder(data).iterdir()][:1]
    assert any(was_deleted(folder_of(data, topic), epoch) for topic in ("gone", "again"))
    assert verify(data).intact


def test_a_lost_manifest_freezes_its_topic(data: Path) -> None:
    (folder_of(data, "old") / MANIFEST).unlink()
    found = verify(data).damages
    assert {damage.topic for damage in found} == {"old"}
    assert "is missing" in [damage.reason for damage in found]
    log = opened(data)
    assert list(log.frozen) == ["old"]
    log.close()


@pytest.mark.parametrize("topic", ["old", "both", "new"])
def test_a_lost_folder_is_known_and_may_be_given_up(data: Path, topic: str) -> None:
    shutil.rmtree(folder_of(data, topic))
    assert topic in {damage.topic for damage in verify(data).damages}
    for _ in range(2):
        log = opened(data)
        assert list(log.frozen) == [topic]
        log.seal()
        log.after_handover(hand_over(data, grace_s=0))
        log.close()
        assert topic in {damage.topic for damage in verify(data).damages}
    log = opened(data)
    log.delete_topic(topic)
    log.close()
    log = opened(data)
    assert topic not in log.topics()
    log.seal()
    log.after_handover(hand_over(data, grace_s=0))
    log.close()
    assert verify(data).intact
    opened(data).close()
    assert verify(data).intact


def test_all_topics_of_a_lost_account_are_known(data: Path) -> None:
    shutil.rmtree(data / "accounts")
    wanted = {"old", "both", "new", "again"}
    assert {damage.topic for damage in verify(data).damages} == wanted
    log = opened(data)
    assert set(log.frozen) == wanted
    log.close()


def test_a_lost_or_damaged_floor_is_written_again(data: Path) -> None:
    path = data / "journal" / "floor.json"
    for content in (None, b"", b"{}", path.read_bytes()[:-5]):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        assert verify(data).intact == (content is None)
        opened(data).close()
        assert verify(data).intact
    # It still tells what is missing.
    shutil.rmtree(folder_of(data, "old"))
    assert {damage.topic for damage in verify(data).damages} == {"old"}


def test_an_empty_folder_is_a_topic_that_has_lost_its_file(data: Path) -> None:
    (folder_of(data, "empty") / "topic.json").unlink()
    assert {damage.topic for damage in verify(data).damages} == {"empty"}
    log = opened(data)
    assert list(log.frozen) == ["empty"]
    log.delete_topic("empty")
    log.create_topic("empty")
    log.close()
    assert verify(data).intact


def test_a_lost_history_file_freezes_its_topic(data: Path) -> None:
    next(folder_of(data, "old").glob("history/*/*.parquet")).unlink()
    log = opened(data)
    assert list(log.frozen) == ["old"]
    log.close()


def test_temporary_files_are_notes_and_go_with_the_next_start(data: Path) -> None:
    left = [data / "polybus.json.tmp", folder_of(data, "new") / "topic.json.tmp"]
    left += [folder_of(data, "old") / f"{MANIFEST}.tmp", data / "journal" / "1.index.tmp"]
    for path in left:
        path.write_bytes(b"{")
    report = verify(data)
    assert report.intact and len([note for note in report.notes if ".tmp" in note]) == len(left)
    opened(data).close()
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize("topic", ["old", "new"])
def test_a_file_that_the_system_does_not_open_is_not_damaged(data: Path, topic: str) -> None:
    log = opened(data)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(data, os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, limits[1]))
    try:
        with pytest.raises(StorageError, match="Too many open files") as raised:
            log.read(topic, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert raised.value.code == "log.failed"
    assert log.frozen == {}
    assert len(messages(log)[topic]) == (2 if topic == "old" else 3)
    log.close()


@pytest.mark.parametrize(
    "name", [".DS_Store", "notes.txt", "12", "12.bak", "x.json", "copy.arrows"]
)
def test_files_of_somebody_else_in_any_folder_change_nothing(data: Path, name: str) -> None:
    log = opened(data)
    expected = messages(log)
    log.close()
    for folder in [data, *(path for path in data.rglob("*") if path.is_dir())]:
        (folder / name).write_bytes(b"not ours")
    assert verify(data).intact
    log = opened(data)
    assert messages(log) == expected
    assert log.frozen == {}
    log.delete_topic("new")
    log.close()
    compact(data)
    assert verify(data).intact


def test_a_folder_that_can_only_be_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def read_only(path: object, flags: int, *rest: object, **named: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system")
        return real(path, flags, *rest, **named)  # type: ignore[arg-type]

    (data / "lock").unlink()
    monkeypatch.setattr(os, "open", read_only)
    report = verify(data)
    assert report.intact and "cannot be locked" in report.notes[0]
    with pytest.raises(StorageError, match="cannot compact .*Read-only"):
        compact(data)
