"""Retention: which history files are removed because of their age or the size of the history.

Whole files are removed, oldest first, so the rest has no gap. The newest file is never removed for
its size: a limit below the size of one file would otherwise empty the topic again and again.

Order of writes: the manifest without the files, a version of the topic's Delta table if it has one
(log/history/exposed.py), then their removal. A crash in between leaves files that no manifest
names, which the next hand-over removes (`handover_topic.sweep`).

Retention runs in the bus after the hand-over process has ended, and under the same HistoryLock, so
that manifests have one writer.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from polybus.config import Retention, age_us
from polybus.errors import BusyError, StorageError
from polybus.log import layout
from polybus.log.history import exposed
from polybus.log.history import manifest as manifests
from polybus.log.history.manifest import HistoryFile, HistoryLock, Manifest
from polybus.log.interface import TopicSettings

HeldFrom = Callable[[str], int | None]
"""The first offset of a topic that a consumer still needs, or None."""


def apply(
    data: Path,
    topics: Mapping[str, TopicSettings],
    defaults: Retention,
    *,
    now_us: int,
    held_from: HeldFrom = lambda topic: None,
) -> list[str]:
    """Remove files beyond the limits of each topic; return the topics whose `start` moved.

    Offsets from `held_from` on are kept. While a hand-over runs, nothing is removed; a later call
    removes it. A topic with a damaged manifest keeps all its files.
    """
    changed = []
    try:
        with HistoryLock(data):
            for topic, settings in topics.items():
                limits = limits_of(settings, defaults)
                if limits == Retention():
                    continue
                folder = layout.topic_folder(data, topic)
                # The log has frozen a damaged topic and logged the reason.
                with suppress(StorageError):
                    if retain(folder, limits, now_us=now_us, held_from=held_from(topic)):
                        changed.append(topic)
    except BusyError:
        return changed
    return changed


def limits_of(settings: TopicSettings, defaults: Retention) -> Retention:
    """A topic's own limits, or those of the bus where it has none."""
    age_s = defaults.age_s if settings.retention_age_s is None else settings.retention_age_s
    size = defaults.bytes if settings.retention_bytes is None else settings.retention_bytes
    return Retention(age_s=age_s, bytes=size)


def retain(folder: Path, limits: Retention, *, now_us: int, held_from: int | None = None) -> bool:
    """Apply limits to one topic's folder; return whether anything was removed.

    Raises StorageError `log.damaged`, topic.json or the manifest cannot be trusted.
    """
    manifest = manifests.load_current(folder)
    if manifest is None:
        return False
    removed = expired(manifest, limits, now_us=now_us, held_from=held_from)
    if not removed:
        exposed.catch_up(folder, manifest)
        return False
    kept = manifest.files[len(removed) :]
    start = kept[0].first if kept else manifest.handed_over
    after = msgspec.structs.replace(manifest, files=kept, start=start)
    try:
        manifests.save(folder, after)
    except FileNotFoundError:
        return False  # The topic was deleted meanwhile.
    exposed.catch_up(folder, after)
    for file in removed:
        path = folder / file.path
        path.unlink(missing_ok=True)
        with suppress(OSError):
            os.rmdir(path.parent)  # Only if it is empty.
    return True


def expired(
    manifest: Manifest, limits: Retention, *, now_us: int, held_from: int | None
) -> list[HistoryFile]:
    """The files to remove: the oldest ones beyond the limits that no consumer holds."""
    size = manifest.bytes
    removed: list[HistoryFile] = []
    for file in manifest.files:
        age_s = limits.age_s
        old = age_s is not None and file.max_timestamp_us < now_us - age_us(age_s)
        newest = file is manifest.files[-1]
        large = limits.bytes is not None and size > limits.bytes and not newest
        held = held_from is not None and file.last >= held_from
        if held or not (old or large):
            break
        removed.append(file)
        size -= file.bytes
    return removed
