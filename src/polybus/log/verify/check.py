"""verify: checks everything that a stopped bus has on disk, and names what is damaged.

It reads every topic.json and manifest, every history file (checksums of file and pages, rows,
order) and every commit of the journal (checksum, columns, index). Then it checks that each offset
from a topic's start to its end exists once, in history or in the journal.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from polybus import names
from polybus.errors import StorageError, UsageError
from polybus.log import layout
from polybus.log.history import manifest as manifests
from polybus.log.history import parquet
from polybus.log.history.manifest import HistoryFile, Manifest
from polybus.log.topics import is_unfinished, read_topic_note
from polybus.log.verify.journal import check_journal
from polybus.log.verify.report import (
    Checked,
    CheckedTopic,
    Damage,
    Progress,
    VerifyReport,
)

__all__ = ["Damage", "VerifyReport", "verify"]


def verify(data: Path, *, progress: Progress | None = None) -> VerifyReport:
    """Check the data directory of a stopped bus.

    Raises:
        UsageError: `log.no-data`, the directory does not exist.
        StorageError: `log.locked`, a bus is running on it.
    """
    if not data.is_dir():
        raise UsageError("log.no-data", f"{data} is not a data directory")
    with layout.DataLock(data, shared=True):
        report = VerifyReport()
        total_bytes = sum(path.stat().st_size for path in layout.segments(data))
        total_bytes += sum(
            path.stat().st_size for path in layout.topics_folder(data).glob("*/history/*/*.parquet")
        )
        checked = Checked(report, progress, total_bytes)
        topics = _check_topics(data, report, checked)
        check_journal(data, topics, report, checked)
        return report


def _check_topics(data: Path, report: VerifyReport, checked: Checked) -> dict[str, CheckedTopic]:
    """Check topic.json, manifest and history of every topic; results by folder name."""
    states: dict[str, CheckedTopic] = {}
    folders = layout.topics_folder(data)
    for folder in sorted(folders.iterdir()) if folders.is_dir() else []:
        if not folder.is_dir() or is_unfinished(folder):
            report.notes.append(f"{folder}: the creation of a topic was interrupted")
            continue
        states[folder.name] = _check_topic(folder, report, checked)
    return states


def _check_topic(folder: Path, report: VerifyReport, checked: Checked) -> CheckedTopic:
    report.count(folder.name, topics=1)
    state = CheckedTopic()
    note_file = str(folder / "topic.json")
    try:
        note = read_topic_note(folder)
    except StorageError as error:
        report.add(Damage(file=note_file, reason=error.text))
        return state
    if note is None:
        report.add(Damage(file=note_file, reason="is missing"))
        return state
    state.epoch = note.epoch
    if names.folder_of(note.name) != folder.name:
        reason = f"it names topic {note.name!r}, which belongs in another folder"
        report.add(Damage(file=note_file, reason=reason))
    try:
        manifest = manifests.load_for_epoch(folder, note.epoch)
    except StorageError as error:
        damage = Damage(file=str(folder / manifests.NAME), reason=error.text, topic=note.name)
        report.add(damage)
        return state
    state.handed_over = manifest.handed_over
    _check_history(folder, manifest, note.name, report, checked)
    return state


def _check_history(
    folder: Path, manifest: Manifest, topic: str, report: VerifyReport, checked: Checked
) -> None:
    for file in manifest.files:
        report.files += 1
        reason = _check_file(folder, file, topic)
        if reason is None:
            report.count(topic, messages=file.rows)
        else:
            name = str(folder / file.path)
            report.add(
                Damage(file=name, reason=reason, topic=topic, first=file.first, last=file.last)
            )
        checked.add(f"{topic} {file.first} to {file.last}", file.bytes)
    named = {file.path for file in manifest.files}
    for path in sorted(folder.glob("history/*/*.parquet")):
        if str(path.relative_to(folder)) not in named:
            report.notes.append(f"{path} is not in the manifest: a hand-over was interrupted")


def _check_file(folder: Path, file: HistoryFile, topic: str) -> str | None:
    """What is wrong with a history file, or None."""
    path = folder / file.path
    try:
        if path.stat().st_size != file.bytes:
            return f"its size is {path.stat().st_size} bytes, not {file.bytes}"
        if parquet.xxh3_of(path) != file.xxh3:
            return "its checksum is wrong"
        return _check_rows(path, file, topic)
    except FileNotFoundError:
        return "is missing"
    except (OSError, pa.ArrowException) as error:
        return str(error)


def _check_rows(path: Path, file: HistoryFile, topic: str) -> str | None:
    offset = file.first
    low, high = file.max_timestamp_us, file.min_timestamp_us
    with parquet.open_file(path) as opened:
        for rows in opened.iter_batches(batch_size=8192, use_threads=False):
            if not parquet.contiguous(rows.column("offset"), offset):
                return f"its rows do not continue at offset {offset}"
            if not pc.all(pc.equal(rows.column("topic"), topic)).as_py():
                return "it has rows of another topic"
            low = min(low, parquet.timestamp_range_us(rows)[0])
            high = max(high, parquet.timestamp_range_us(rows)[1])
            offset += rows.num_rows
    if offset != file.last + 1:
        return f"its rows end at offset {offset - 1}"
    if (low, high) != (file.min_timestamp_us, file.max_timestamp_us):
        return "its timestamps are not those of the manifest"
    return None
