"""The files of a blob and the message that points at it: both or none, whatever the power does."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from crash_kit import Crash, Run, crashes
from opened_kit import on_node
from staging_kit import stage

from polybus import references
from polybus.batch import Batch
from polybus.edges.node import Node
from polybus.errors import StorageError
from polybus.log.blobs import (
    PENDING,
    UNFINISHED,
    BlobReader,
    FoundBlob,
    blobs_folder,
    find_blobs,
    find_unfinished,
    remove_blob,
)
from polybus.log.disk import Disk
from polybus.log.files import FileLog
from polybus.log.history.handover import compact
from polybus.log.verify.verify import verify
from polybus.services.blobs import blobs
from polybus.services.blobs.blobs import StoredPayload
from polybus.services.blobs.unfinished import ContinuedBlob
from polybus.services.transactions.commits import TransactionKey
from polybus.services.transactions.transactions import CommitRequest

pytestmark = pytest.mark.slow

TOPICS = ["a", "b"]
SMALL = {"inline-bytes-max": 4, "transaction-part-bytes": 4500}
PAYLOADS = [b"one", b"two", b"one"]


async def store(node: Node, topics: list[str], payload: bytes) -> None:
    """As an edge does it: the message is durable when this returns."""
    access, blobs = node.accounts.default, node.services.blobs
    upload = blobs.upload(access, topics[0])
    await upload.write(payload)
    kept: StoredPayload = await blobs.keep(upload, topics)
    batches = [kept.batch(topic) for topic in topics]
    node.bus.commit(batches, urgent=True)
    blobs.published(kept, batches)
    await node.context.durability.wait()


def with_topics(run: Run) -> None:
    async def nothing(node: Node) -> None: ...

    on_node(nothing, run.data, topics=TOPICS)


def publish(run: Run) -> None:
    async def work(node: Node) -> None:
        run.resume()
        for payload in PAYLOADS:
            await store(node, ["a"], payload)
            run.acknowledge(payload.decode())

    run.pause()
    on_node(work, run.data, topics=TOPICS)


def look(data: Path) -> Any:
    """The payloads of all messages, and the blobs on the disk: none without a message."""

    async def shown(node: Node) -> Any:
        log, blobs = node.bus.log, node.services.blobs
        found = []
        for topic in TOPICS:
            if topic not in log.topics():
                continue
            bounds = log.bounds(topic)
            for batch in log.read(topic, bounds.start) if bounds.stop > bounds.start else ():
                for value in batch.values():
                    reference = references.parse(value)
                    if reference is None:
                        assert value == b"row", value
                        continue
                    reader = await blobs.reader(blobs.of_message(topic, reference.id))
                    found.append(reader.read(0, reader.size).decode())
        await blobs.swept()
        await blobs.close()
        folder = blobs_folder(data, "default")
        stored = sorted(os.listdir(folder)) if folder.exists() else []
        stored = [one for one in stored if not one.startswith(UNFINISHED)]
        texts = {BlobReader(folder / one).read(0, 10).decode() for one in stored}
        assert texts == set(found), (texts, found)
        return found

    return on_node(shown, data, topics=TOPICS, limits=SMALL)


def test_a_message_has_its_blob_and_a_blob_its_message_wherever_the_power_fails() -> None:
    for crash in crashes(publish, look, start=with_topics):
        check(crash)


def check(crash: Crash) -> None:
    expected = [payload.decode() for payload in PAYLOADS]
    known = [fact for [fact] in crash.acknowledged]
    assert crash.seen[: len(known)] == known, crash
    assert crash.seen == expected[: len(crash.seen)], crash
    assert crash.end[-len(expected) :] == expected, crash


CONTINUED = b"in pieces"


async def send_piece(node: Node) -> StoredPayload | None:
    """Send the next piece of an upload and disconnect, as a client does; the whole at its end."""
    access, blobs = node.accounts.default, node.services.blobs
    sha256 = hashlib.sha256(CONTINUED).hexdigest()
    start = blobs.unfinished_bytes(access, "a", sha256)
    upload = blobs.upload(access, "a", sha256)
    assert isinstance(upload, ContinuedBlob)
    await upload.begin(start)
    stop = min(start // 3 * 3 + 3, len(CONTINUED))
    if start < stop:
        await upload.write(CONTINUED[start:stop])
    if stop < len(CONTINUED):
        upload.pause()
        return None
    return await blobs.keep(upload, ["a"])


def send_in_pieces(run: Run) -> None:
    async def work(node: Node) -> None:
        run.resume()
        while (kept := await send_piece(node)) is None:
            pass
        batches = [kept.batch("a")]
        node.bus.commit(batches, urgent=True)
        node.services.blobs.published(kept, batches)
        await node.context.durability.wait()
        run.acknowledge("published")

    run.pause()
    on_node(work, run.data, topics=TOPICS)


def look_at_uploads(data: Path) -> Any:
    """The payloads of messages, and what has arrived of others."""
    found = look(data)
    return [found, [size for _, size, _ in find_unfinished(blobs_folder(data, "default"))]]


def test_an_upload_that_broke_off_is_continued_and_published_as_a_whole() -> None:
    sizes = set()
    for crash in crashes(send_in_pieces, look_at_uploads, start=with_topics):
        found, unfinished = crash.seen
        text = CONTINUED.decode()
        assert found in ([[text]] if crash.acknowledged else [[], [text]]), crash
        # What is left of it is continued, and nothing stays beside the message.
        assert crash.end == [[*found, text], []], crash
        sizes |= set(unfinished)
    assert {0, 3, 6, 9} <= sizes


def with_blobs(run: Run) -> None:
    async def work(node: Node) -> None:
        await store(node, ["a", "b"], b"both")
        await store(node, ["b"], b"one")

    on_node(work, run.data, topics=TOPICS)


def delete(run: Run) -> None:
    async def work(node: Node) -> None:
        run.resume()
        if node.bus.has_topic("b"):
            node.bus.delete_topic("b")
            run.acknowledge("deleted")

    run.pause()
    on_node(work, run.data)


def look_at_what_is_left(data: Path) -> Any:
    return look(data)


def test_blobs_of_a_deleted_topic_go_and_those_of_others_stay() -> None:
    for crash in crashes(delete, look_at_what_is_left, start=with_blobs):
        left = [["both", "both", "one"], ["both"]]
        assert crash.seen in (left[1:] if crash.acknowledged else left), crash


def test_the_last_message_that_points_at_a_blob_is_found_again(tmp_path: Path) -> None:
    async def work(node: Node) -> None:
        for payload in (b"one", b"two", b"one", b"three"):
            await store(node, ["a"], payload)
        node.services.blobs.sweep_soon()

    on_node(work, tmp_path, topics=TOPICS)
    marks = sorted(path.name for path in tmp_path.rglob("*-*") if path.is_file())
    assert [mark.partition("-")[2] for mark in marks] == ["1", "2", "3"]


def marks_in(data: Path) -> list[Path]:
    """The files of all marks, in the order of the topics."""
    return sorted(data.glob("accounts/*/blobs/*/*-*"))


def test_a_blob_whose_marks_are_lost_is_not_taken_for_one_that_nobody_needs(tmp_path: Path) -> None:
    on_node(lambda node: store(node, ["a"], b"needed"), tmp_path, topics=TOPICS)
    names = [mark.name for mark in marks_in(tmp_path)]
    for mark in marks_in(tmp_path):
        mark.unlink()
    assert [damage.file for damage in verify(tmp_path).damages] == [
        str(blob.path / name) for blob, name in zip(find_all(tmp_path), names, strict=True)
    ]
    assert look(tmp_path) == ["needed"]
    assert [mark.name for mark in marks_in(tmp_path)] == names
    assert verify(tmp_path).intact


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("in_history", [False, True])
def test_a_lost_mark_of_one_of_two_topics_costs_nothing(
    tmp_path: Path, lost: int, in_history: bool
) -> None:
    """Its message is served, and the blob stays when the other topic goes."""
    on_node(lambda node: store(node, TOPICS, b"needed"), tmp_path, topics=TOPICS)
    if in_history:
        compact(tmp_path)
    mark = marks_in(tmp_path)[lost]
    mark.unlink()
    [damage] = verify(tmp_path).damages
    assert (damage.file, damage.topic) == (str(mark), TOPICS[lost])

    async def delete_other(node: Node) -> None:
        log, blobs = node.bus.log, node.services.blobs
        [batch] = log.read(TOPICS[lost], 0)
        reference = references.parse(batch.value(0))
        assert reference is not None
        reader = await blobs.reader(blobs.of_message(TOPICS[lost], reference.id))
        assert reader.read(0, 10) == b"needed"
        node.bus.delete_topic(TOPICS[1 - lost])
        await blobs.swept()
        assert blobs.find(node.accounts.default, reference.id).marks.keys() == {TOPICS[lost]}

    on_node(delete_other, tmp_path)
    assert marks_in(tmp_path) == [mark] and verify(tmp_path).intact
    on_node(delete_all, tmp_path)
    assert find_all(tmp_path) == []


async def delete_all(node: Node) -> None:
    for topic in TOPICS:
        if node.bus.has_topic(topic):
            node.bus.delete_topic(topic)
    await node.services.blobs.swept()


def find_all(data: Path) -> list[FoundBlob]:
    return list(find_blobs(blobs_folder(data, "default")))


def test_a_blob_stays_while_a_topic_that_may_need_it_cannot_be_read(tmp_path: Path) -> None:
    on_node(lambda node: store(node, TOPICS, b"needed"), tmp_path, topics=TOPICS)
    compact(tmp_path)
    marks_in(tmp_path)[1].unlink()
    [history] = tmp_path.glob("accounts/default/topics/b/history/*/*.parquet")
    whole = history.read_bytes()
    history.write_bytes(whole[:-1])

    async def delete_a(node: Node) -> None:
        node.bus.delete_topic("a")
        await node.services.blobs.swept()

    on_node(delete_a, tmp_path)
    assert len(find_all(tmp_path)) == 1
    history.write_bytes(whole)
    assert look(tmp_path) == ["needed"]
    history.write_bytes(whole[:-1])
    on_node(delete_all, tmp_path)
    assert find_all(tmp_path) == []


def with_a_pending_mark(run: Run) -> None:
    on_node(lambda node: store(node, ["b"], b"needed"), run.data, topics=TOPICS)
    make_pending(marks_in(run.data)[-1])


def with_a_pending_mark_of_two(run: Run) -> None:
    on_node(lambda node: store(node, TOPICS, b"needed"), run.data, topics=TOPICS)
    make_pending(marks_in(run.data)[-1])


def make_pending(mark: Path) -> None:
    """As a crash leaves it."""
    mark.rename(mark.with_name(mark.name + PENDING))


def start_while_the_disk_fails(run: Run) -> None:
    async def sweep(node: Node) -> None:
        run.resume()
        await node.services.blobs.swept()

    run.pause()
    failure = StorageError("log.failed", "Input/output error")
    with patch.object(blobs, "find_message", side_effect=failure):
        on_node(sweep, run.data)


@pytest.mark.parametrize("start", [with_a_pending_mark, with_a_pending_mark_of_two])
def test_a_pending_mark_stays_until_its_message_is_found(start: Callable[[Run], None]) -> None:
    for crash in crashes(start_while_the_disk_fails, look, start=start):
        assert set(crash.seen) == {"needed"} == set(crash.end), crash


def test_a_pending_mark_before_the_first_offset_stays_until_its_message_is_found(
    tmp_path: Path,
) -> None:
    """Others published while the payload was stored, and theirs have expired meanwhile."""

    async def publish_two(node: Node) -> None:
        node.bus.commit([Batch.of("b", [b"row"] * 2)], urgent=True)
        await node.context.durability.wait()

    async def expire(node: Node) -> None:
        log, blobs = node.bus.log, node.services.blobs
        assert isinstance(log, FileLog)
        await blobs.swept()
        log.apply_retention(time.time_ns() // 1000)
        assert log.bounds("b").start == 2
        blobs.sweep_soon()
        await blobs.swept()
        [blob] = find_all(tmp_path)
        found = blobs.find(node.accounts.default, blob.id).marks
        assert {topic: mark.offset for topic, mark in found.items()} == {"a": 0, "b": 2}

    on_node(publish_two, tmp_path, topics=TOPICS)
    compact(tmp_path)
    on_node(lambda node: store(node, TOPICS, b"needed"), tmp_path)
    mark = marks_in(tmp_path)[-1]
    make_pending(mark.rename(mark.with_name(mark.name.replace("-2", "-0"))))
    failure = StorageError("log.failed", "Input/output error")
    with patch.object(blobs, "find_message", side_effect=failure):
        on_node(expire, tmp_path, retention={"age-s": 0.001})
    assert mark in marks_in(tmp_path)


@pytest.mark.parametrize("topics", [["a"], ["b"], ["a", "b"]])
@pytest.mark.parametrize("corrupted", ["content", "sums"])
def test_a_payload_that_arrives_again_repairs_its_blob(
    tmp_path: Path, topics: list[str], corrupted: str
) -> None:
    on_node(lambda node: store(node, ["a"], b"whole"), tmp_path, topics=TOPICS)
    [blob] = find_all(tmp_path)
    for content in (None, b"other"):
        (blob.path / corrupted).unlink()
        if content is not None:
            (blob.path / corrupted).write_bytes(content)
        assert not verify(tmp_path).intact
        on_node(lambda node: store(node, topics, b"whole"), tmp_path)
        assert verify(tmp_path).intact
        assert set(look(tmp_path)) == {"whole"}


async def keep(node: Node, payload: bytes) -> StoredPayload:
    upload = node.services.blobs.upload(node.accounts.default, "a")
    await upload.write(payload)
    return await node.services.blobs.keep(upload, ["a"])


async def publish_kept(node: Node, kept: StoredPayload) -> None:
    batches = [kept.batch("a")]
    node.bus.commit(batches, urgent=True)
    node.services.blobs.published(kept, batches)
    await node.context.durability.wait()


def publish_at_once(run: Run) -> None:
    """The same payload in three messages, which share a pending mark; one is refused."""

    async def work(node: Node) -> None:
        run.resume()
        kept = [await keep(node, b"same") for _ in range(3)]
        await publish_kept(node, kept[0])
        run.acknowledge("same")
        node.services.blobs.published(kept[1], ())
        await publish_kept(node, kept[2])
        run.acknowledge("same")

    run.pause()
    on_node(work, run.data, topics=TOPICS)


def test_messages_of_one_payload_at_the_same_time_keep_it_wherever_the_power_fails() -> None:
    for crash in crashes(publish_at_once, look, start=with_topics):
        assert len(crash.seen) >= len(crash.acknowledged), crash
        assert crash.end[-2:] == ["same", "same"], crash


@pytest.mark.parametrize("is_last_refused", [False, True])
def test_the_mark_is_that_of_the_last_message_of_several(
    tmp_path: Path, is_last_refused: bool
) -> None:
    async def work(node: Node) -> None:
        kept = [await keep(node, b"same") for _ in range(4)]
        for one in kept[:3]:
            await publish_kept(node, one)
        if is_last_refused:
            node.services.blobs.published(kept[3], ())
        else:
            await publish_kept(node, kept[3])

    on_node(work, tmp_path, topics=TOPICS)
    [mark] = marks_in(tmp_path)
    assert mark.name.partition("-")[2] == ("2" if is_last_refused else "3")
    assert verify(tmp_path).intact


def commit_large(run: Run) -> None:
    """A transaction of two parts, of which one has a large value."""

    async def work(node: Node) -> None:
        run.resume()
        rows = [("a", "row"), ("b", "large")]
        files = [stage(run.data, "spark", 0, rows)]
        wanted = CommitRequest(TransactionKey("spark", "query", 0), files)
        await node.services.transactions.commit(wanted, node.accounts.default)
        run.acknowledge("done")

    run.pause()
    on_node(work, run.data, topics=TOPICS, limits=SMALL)


def test_a_transaction_has_all_blobs_of_its_references_or_none_of_both() -> None:
    seen = set()
    for crash in crashes(commit_large, look, start=with_topics):
        assert crash.seen in ([], ["large"]), crash
        assert crash.seen or not crash.acknowledged, crash
        assert crash.end == ["large"], crash
        seen.add(len(crash.seen))
    assert seen == {0, 1}


def test_a_blob_has_another_name_for_good_before_its_files_go(tmp_path: Path) -> None:
    """Else a power cut may undo the rename alone, and an empty folder is left in its place."""
    done: list[str] = []

    class NotedDisk(Disk):
        def rename(self, source: Path, target: Path) -> None:
            done.append("rename")
            super().rename(source, target)

        def sync_folder(self, path: Path) -> None:
            done.append(f"sync {path.name}")
            super().sync_folder(path)

        def remove_folder(self, path: Path) -> None:
            done.append("remove")
            super().remove_folder(path)

    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.mkdir(parents=True)
    (blob / "content").write_bytes(b"x")
    remove_blob(blob, NotedDisk())
    assert done == ["rename", "sync blobs", "remove"]
    assert list(blob.parent.iterdir()) == []
