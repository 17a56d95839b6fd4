"""floor.json while the bus runs: what it says of other topics is kept."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from log_contract import numbered
from log_kit import opened_log

from polybus.errors import StorageError
from polybus.log import layout
from polybus.log.files import FileLog
from polybus.log.history.handover import compact, hand_over
from polybus.log.journal import floor as floors


def with_two_topics_in_the_floor(data: Path) -> FileLog:
    log = opened_log(data, lambda: 1_700_000_000_000_000)
    for topic in ("idle", "busy"):
        log.create_topic(topic)
        log.append(numbered(topic, 0, 1))
    log.seal()
    log.after_handover(hand_over(data))
    assert sorted(floors.load(data) or {}) == ["busy", "idle"]
    return log


def test_a_floor_that_the_disk_cannot_read_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = with_two_topics_in_the_floor(tmp_path)
    before = floors.load(tmp_path)
    assert before is not None
    log.append(numbered("busy", 1, 1))
    log.seal()
    read = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name == floors.NAME:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing)
        with pytest.raises(StorageError, match=r"log\.failed: cannot read .*floor\.json"):
            log.after_handover(hand_over(tmp_path))
    assert floors.load(tmp_path) == before
    (kept,) = log.sealed_segments()
    assert kept.exists()
    log.after_handover([])
    assert floors.load(tmp_path) == {**before, "busy": (before["busy"][0], 2)}
    assert not kept.exists()
    log.close()


@pytest.mark.parametrize("damage", ["flip", "remove"])
@pytest.mark.parametrize("change", ["hand-over", "compaction", "deletion"])
def test_a_damaged_floor_is_made_again_with_all_topics(
    tmp_path: Path, damage: str, change: str
) -> None:
    log = with_two_topics_in_the_floor(tmp_path)
    before = floors.load(tmp_path)
    assert before is not None
    path = layout.journal_folder(tmp_path) / floors.NAME
    if damage == "flip":
        path.write_bytes(path.read_bytes().replace(b"idle", b"idlf"))
    else:
        path.unlink()
    if change == "deletion":
        log.delete_topic("busy")
        log.apply_retention(0)
        assert floors.load(tmp_path) == {"idle": before["idle"]}
    else:
        log.append(numbered("busy", 1, 1))
        log.seal()
        if change == "hand-over":
            log.after_handover(hand_over(tmp_path))
        else:
            log.close()
            compact(tmp_path)
        assert floors.load(tmp_path) == {**before, "busy": (before["busy"][0], 2)}
    log.close()
