"""What a bus finds when it starts: torn tails are cut, damage is named, nothing intact is lost."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from log_contract import numbered, values_from

from polybus import config
from polybus.errors import PolybusError, StorageError
from polybus.log import layout
from polybus.log.disk import Disk
from polybus.log.files import FileLog
from polybus.log.journal.commit import END, HEAD, Encoder
from polybus.log.journal.recovery import recover
from polybus.log.journal.segment import Segment, encode_entry, read_index
from polybus.testing import ManualClock


def open_log(data: Path, *, segment_bytes_max: int = 1 << 28) -> FileLog:
    return FileLog(
        data,
        durability="fsync",
        journal=config.Journal(segment_bytes_max=segment_bytes_max),
        retention=config.Retention(),
        clock=ManualClock(),
        maintenance=False,
    )


def fill(data: Path, commits: list[str], *, segment_bytes_max: int = 1 << 28) -> Path:
    """Commits of two messages to each topic named; returns the first segment's path."""
    log = open_log(data, segment_bytes_max=segment_bytes_max)
    for topic in sorted(set("".join(commits))):
        log.create_topic(topic)
    for topics in commits:
        for topic in topics:
            log.append(numbered(topic, log.bounds(topic).stop, 2))
        log.sync()
    log.close()
    return layout.segments(data)[0]


def expected(topic: str, count: int) -> list[bytes]:
    return [b"%s-%d" % (topic.encode(), number) for number in range(count)]


def forget_index(segment: Path, *, keep: int) -> None:
    """As if the crash had come before the later commits were indexed."""
    path = layout.index_path(segment)
    entries = read_index(path).entries[:keep]
    path.write_bytes(b"".join(encode_entry(entry) for entry in entries))


def flip(path: Path, position: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= mask
    path.write_bytes(content)


@pytest.mark.slow
def test_a_tail_torn_at_any_byte_is_cut_off_and_everything_before_it_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment = fill(tmp_path, ["ab", "a", "ab"])
    forget_index(segment, keep=2)
    index, whole = layout.index_path(segment).read_bytes(), segment.read_bytes()
    last = Segment(segment).entries[-1]
    for size in range(last.position + 1, last.position + last.size):
        segment.write_bytes(whole[:size])
        recovered = recover(tmp_path, Disk())
        assert recovered.live is not None
        assert len(recovered.live.entries) == 2, f"cut at {size}"
        assert segment.read_bytes() == whole[: last.position], f"cut at {size}"
        assert layout.index_path(segment).read_bytes() == index
    assert "unfinished write" in caplog.text
    log = open_log(tmp_path)
    log.append(numbered("b", 2, 1))
    log.close()
    log = open_log(tmp_path)
    assert values_from(log, "a", 0) == expected("a", 4)
    assert values_from(log, "b", 0) == expected("b", 3)
    log.close()


def test_a_torn_tail_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    segment = fill(tmp_path, ["a", "a"])
    forget_index(segment, keep=1)
    segment.write_bytes(segment.read_bytes()[:-5])
    with caplog.at_level(logging.WARNING, "polybus.log"):
        log = open_log(tmp_path)
    assert segment.name in caplog.text
    assert log.bounds("a").stop == 2
    assert log.frozen == {}
    log.close()


def test_commits_that_were_never_indexed_are_found_in_the_segment(tmp_path: Path) -> None:
    segment = fill(tmp_path, ["a", "ab", "b"])
    layout.index_path(segment).unlink()
    log = open_log(tmp_path)
    assert values_from(log, "a", 0) == expected("a", 4)
    assert values_from(log, "b", 0) == expected("b", 4)
    assert len(read_index(layout.index_path(segment)).entries) == 3
    log.close()


def test_an_indexed_commit_that_is_cut_off_is_damage_of_its_topics_only(tmp_path: Path) -> None:
    segment = fill(tmp_path, ["ab", "a"])
    segment.write_bytes(segment.read_bytes()[:-1])
    for _ in range(2):
        log = open_log(tmp_path)
        assert list(log.frozen) == ["a"]
        with pytest.raises(StorageError) as caught:
            log.append(numbered("a", 4, 1))
        assert caught.value.code == "log.frozen"
        assert [value for batch in log.read("a", 0) for value in batch.values()] == expected("a", 2)
        with pytest.raises(StorageError) as caught:
            log.read("a", 2)
        assert caught.value.code == "log.damaged"
        assert segment.name in caught.value.text
        stop = log.bounds("b").stop
        log.append(numbered("b", stop, 1))
        log.sync()
        assert values_from(log, "b", 0) == expected("b", stop + 1)
        log.close()


def test_a_flipped_bit_freezes_every_topic_of_its_commit_and_no_other(tmp_path: Path) -> None:
    segment = fill(tmp_path, ["abc", "ab", "c", "a"])
    entry = Segment(segment).entries[1]
    flip(segment, entry.position + entry.size - 20)
    log = open_log(tmp_path)
    with pytest.raises(StorageError) as caught:
        log.read("a", 2)
    assert caught.value.code == "log.damaged"
    assert sorted(log.frozen) == ["a", "b"]
    assert [value for batch in log.read("a", 4) for value in batch.values()] == [b"a-4", b"a-5"]
    assert values_from(log, "c", 0) == expected("c", 4)
    with pytest.raises(StorageError) as caught:
        log.bounds("b")
    assert caught.value.code == "log.frozen"
    log.close()


def test_damage_without_an_index_is_found_by_what_follows_it(tmp_path: Path) -> None:
    segment = fill(tmp_path, ["ab", "a", "ab", "b"])
    entry = Segment(segment).entries[1]
    layout.index_path(segment).unlink()
    flip(segment, entry.position + entry.size - 20)
    for _ in range(2):
        log = open_log(tmp_path)
        assert list(log.frozen) == ["a"]
        assert values_from(log, "b", 0) == expected("b", 6)
        with pytest.raises(StorageError) as caught:
            log.read("a", 2)
        assert caught.value.code == "log.damaged"
        log.close()


def test_a_lost_segment_freezes_the_topics_it_had(tmp_path: Path) -> None:
    fill(tmp_path, ["a", "b", "a", "b"], segment_bytes_max=100)
    lost = layout.segments(tmp_path)[1]
    lost.unlink()
    log = open_log(tmp_path)
    assert list(log.frozen) == ["b"]
    assert values_from(log, "a", 0) == expected("a", 4)
    log.close()


def test_a_segment_that_has_not_even_a_head_is_begun_again(tmp_path: Path) -> None:
    segment = fill(tmp_path, ["a"])
    next_segment = layout.segment_path(segment.parent, 2)
    for content in (b"", HEAD[:100], bytes(len(HEAD))):
        next_segment.write_bytes(content)
        log = open_log(tmp_path)
        assert values_from(log, "a", 0) == expected("a", 2)
        log.close()
        assert Segment(next_segment).head == next_segment.stat().st_size


def test_a_crash_while_sealing_leaves_a_sealed_segment(tmp_path: Path) -> None:
    segment = fill(tmp_path, ["a"])
    with segment.open("ab") as file:
        file.write(END)
    log = open_log(tmp_path)
    assert log.sealed_segments() == [segment]
    log.append(numbered("a", 2, 1))
    log.close()
    log = open_log(tmp_path)
    assert values_from(log, "a", 0) == expected("a", 3)
    assert [path.stem[-1] for path in layout.segments(tmp_path)] == ["1", "2"]
    log.close()


def served_right(log: FileLog, topic: str, count: int) -> bool:
    """Reads a topic; False if it is notified of damage. Wrong messages fail the test."""
    offset = 0
    while offset < count:
        try:
            batches = log.read(topic, offset)
        except PolybusError as error:
            assert error.code in ("log.damaged", "log.frozen", "log.offset-unknown"), error
            return False
        for batch in batches:
            for value in batch.values():
                assert value == b"%s-%d" % (topic.encode(), offset)
                offset += 1
    return True


def flip_somewhere(paths: list[Path], draw: random.Random) -> tuple[Path, int]:
    path = draw.choice([path for path in paths if path.stat().st_size])
    position = draw.randrange(path.stat().st_size)
    flip(path, position, 1 << draw.randrange(8))
    return path, position


def copies(tmp_path: Path, count: int) -> Iterator[tuple[int, Path]]:
    """Seeds, each with a fresh data directory of three topics over a few segments."""
    fill(tmp_path / "original", ["ab", "a", "abc", "c", "ab"], segment_bytes_max=6000)
    for seed in range(count):
        data = tmp_path / f"seed-{seed}"
        shutil.copytree(tmp_path / "original", data)
        yield seed, data
        shutil.rmtree(data)


@pytest.mark.slow
def test_a_flipped_bit_in_a_segment_is_never_served_and_costs_only_its_commit(
    tmp_path: Path,
) -> None:
    for seed, data in copies(tmp_path, 200):
        paths = layout.segments(data)
        entries = {path: Segment(path).entries for path in paths}
        path, position = flip_somewhere(paths, random.Random(seed))
        concerned = {
            rows.topic
            for entry in entries[path]
            if entry.position <= position < entry.position + entry.size
            for rows in entry.topics
        }
        log = open_log(data)
        counts = {"a": 8, "b": 6, "c": 4}
        intact = {topic for topic, count in counts.items() if served_right(log, topic, count)}
        assert intact == counts.keys() - concerned, f"seed {seed}: {path.name} at {position}"
        assert log.frozen.keys() == concerned, f"seed {seed}: {path.name} at {position}"
        log.close()


@pytest.mark.slow
def test_a_flipped_bit_in_an_index_costs_nothing(tmp_path: Path) -> None:
    for seed, data in copies(tmp_path, 100):
        indexes = [layout.index_path(path) for path in layout.segments(data)]
        path, position = flip_somewhere(indexes, random.Random(seed))
        log = open_log(data)
        for topic, count in {"a": 8, "b": 6, "c": 4}.items():
            assert served_right(log, topic, count), f"seed {seed}: {path.name} at {position}"
        assert log.frozen == {}
        log.close()


def test_a_published_value_that_looks_like_a_commit_is_never_taken_for_one(tmp_path: Path) -> None:
    forged = numbered("a", 4, 1)
    forged.epoch, forged.first_offset = 1_700_000_000_000, 4
    segment = fill(tmp_path, ["a", "a"])
    layout.index_path(segment).unlink()
    whole = segment.read_bytes()
    first = Segment(segment).entries[0]
    inside = b"".join(Encoder().encode(9, 8, [forged])[0])
    torn = whole[: first.position + first.size] + bytes(64) + inside
    segment.write_bytes(torn + bytes(-len(torn) % 8))
    log = open_log(tmp_path)
    assert values_from(log, "a", 0) == expected("a", 2)
    log.close()


def test_a_segment_with_a_damaged_head_is_still_read(tmp_path: Path) -> None:
    segment = fill(tmp_path, ["a", "ab"])
    for without_index in (False, True):
        content = bytearray(segment.read_bytes())
        content[: len(HEAD)] = bytes(len(HEAD))
        segment.write_bytes(content)
        if without_index:
            layout.index_path(segment).unlink()
        log = open_log(tmp_path)
        assert values_from(log, "a", 0)[:4] == expected("a", 4)
        log.append(numbered("a", log.bounds("a").stop, 1))
        log.close()


def test_a_log_goes_on_after_damage_and_finds_everything_again(tmp_path: Path) -> None:
    segment = fill(tmp_path, ["ab", "a", "ab"])
    entry = Segment(segment).entries[1]
    layout.index_path(segment).unlink()
    flip(segment, entry.position + entry.size - 20)
    for count in (4, 5, 6):
        log = open_log(tmp_path)
        assert list(log.frozen) == ["a"]
        assert values_from(log, "b", 0) == expected("b", count)
        log.append(numbered("b", count, 1))
        log.close()
