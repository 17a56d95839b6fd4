"""Versions of a Delta table: when one is durable, and how long older ones are kept.

Lake tables and the tables of topics (log/history/exposed.py) are committed here, because delta-rs
never calls fsync: after a power cut its commit may exist and be empty, although a stream has
forgotten the batch. Order of writes: the actions into a file below `_staging`, its fsync, a hard
link as `_delta_log/<version>.json`, fsync of that folder. The link fails if the version exists, so
one of several writers wins, also if they use other libraries. A version exists completely or not at
all.

Delta has no checksums. But it allows any field in `commitInfo`, and versions of Polybus have `xxh3`
there: XXH3 (64 bits) of the whole file with these 16 digits taken as zeros. Versions of other
writers have none. The checksum of a checkpoint is in `_last_checkpoint`, which names it, and which
other libraries replace.

The loss of the newest version would leave no gap. So its number is also in `_newest` of the table's
folder, written after the version and not synced: it is never ahead of the log, unless versions were
lost. Versions of other writers do not change it.
"""

import json
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from polybus import structs
from polybus.errors import StorageError
from polybus.log import checked_json
from polybus.log.disk import Disk
from polybus.version import __version__

LOG = "_delta_log"
STAGING = "_staging"
LAST_CHECKPOINT = "_last_checkpoint"
NEWEST = "_newest"
CHECKSUM = "polybus.xxh3"
"""The tag of a file: XXH3 (64 bits) of all its bytes."""
RETENTION = "interval 1 hours"
RETENTION_S = 3600.0
"""How long files stay after a version stopped using them: older versions can be read that long.

This is the default. A lake table has its own value in Delta's settings KEPT.
"""
KEPT = ("delta.deletedFileRetentionDuration", "delta.logRetentionDuration")
_UNITS_S = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
_PART = re.compile(rf"(\d+)\s+({'|'.join(_UNITS_S)})s?\b")
_INTERVAL = re.compile(rf"(?:interval\s+)?{_PART.pattern}(?:\s+{_PART.pattern})*")
CHECKPOINT_EVERY = 20
_BLANK = b"0" * 16
# At the end of the first line, where no text of a user can be.
_CHECKSUM = re.compile(rb'\A\{"commitInfo": [^\n]*"xxh3": "([0-9a-f]{16})"\}\}\n')
Action = dict[str, Any]


class _Newest(msgspec.Struct):
    version: int


class _Hint(msgspec.Struct):
    version: int
    xxh3: str = ""


def version_path(log: Path, version: int) -> Path:
    return log / f"{version:020d}.json"


def publish(table: Path, version: int, actions: Sequence[Action], disk: Disk) -> None:
    """Make a version of a table, durably.

    Raises:
        FileExistsError: another writer made it first; nothing changed.
        OSError: nothing changed, or only the last fsync failed and the version is there.
    """
    disk.make_folder(table / LOG)
    disk.make_folder(table / STAGING)
    staged = table / STAGING / f"{uuid.uuid4().hex}.json"
    file = disk.open(staged)
    try:
        try:
            file.append(_encoded(actions))
            file.sync()
        finally:
            file.close()
        disk.link(staged, version_path(table / LOG, version))
    finally:
        disk.unlink(staged)
    disk.sync_folder(table / LOG)
    # The version is committed, even if this fails.
    with suppress(OSError):
        _note_newest(table, staged, version, disk)


def _note_newest(table: Path, staged: Path, version: int, disk: Disk) -> None:
    file = disk.open(staged)
    try:
        file.append(checked_json.encode(_Newest(version)))
    finally:
        file.close()
    disk.rename(staged, table / NEWEST)


def newest(table: Path) -> int:
    """The last version that Polybus has made; -1 if it is unknown."""
    path = table / NEWEST
    try:
        return checked_json.decode(path.read_bytes(), _Newest, path).version
    except (OSError, StorageError):
        return -1


def _encoded(actions: Sequence[Action]) -> bytes:
    """The content of a version, with a checksum if Polybus wrote its commitInfo."""
    content = "".join(f"{json.dumps(one)}\n" for one in actions).encode()
    found = _CHECKSUM.search(content)
    if found is None or found[1] != _BLANK:
        return content
    checksum = xxhash.xxh3_64_hexdigest(content).encode()
    return content[: found.start(1)] + checksum + content[found.end(1) :]


def is_intact(content: bytes) -> bool:
    """Whether a version matches its checksum, or has none."""
    found = _CHECKSUM.search(content)
    if found is None:
        return True
    blanked = content[: found.start(1)] + _BLANK + content[found.end(1) :]
    return xxhash.xxh3_64_hexdigest(blanked).encode() == found[1]


def damaged_version(log: Path, after: int) -> Path | None:
    """A version after this one, or after the last checkpoint, whose checksum is wrong."""
    summed_up = [int(path.name.partition(".")[0]) for path in log.glob("*.checkpoint.parquet")]
    number = max([after, *summed_up])
    while True:
        number += 1
        path = version_path(log, number)
        try:
            if not is_intact(path.read_bytes()):
                return path
        except FileNotFoundError:
            return None


def hint(known: Mapping[str, Any], checkpoint: Path) -> bytes:
    """The content of `_last_checkpoint`: Delta's own fields, and a checksum of the file."""
    return json.dumps({**known, "xxh3": _xxh3_of(checkpoint)}).encode()


def damaged_checkpoint(log: Path) -> tuple[Path, str] | None:
    """The checkpoint that `_last_checkpoint` names, if it is missing or damaged, and the reason.

    Readers of Delta then refuse the table. An unreadable hint does not count as damage.
    """
    try:
        found = structs.decode((log / LAST_CHECKPOINT).read_bytes(), _Hint)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    path = log / f"{found.version:020d}.checkpoint.parquet"
    try:
        is_right = not found.xxh3 or _xxh3_of(path) == found.xxh3
    except OSError:
        is_right = False
    if path.exists():
        return None if is_right else (path, "its checksum is wrong")
    # Other libraries name some checkpoints differently.
    is_there = any(log.glob(f"{found.version:020d}.checkpoint*.parquet"))
    return None if is_there else (path, f"is missing, and {LAST_CHECKPOINT} names it")


def _xxh3_of(path: Path) -> str:
    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def info(operation: str, batch: int | None) -> Action:
    about = {"engineInfo": f"polybus:{__version__}", "isBlindAppend": operation == "WRITE"}
    parameters = {} if batch is None else {"batch": str(batch)}
    return {
        "commitInfo": {
            "timestamp": now_ms(),
            "operation": operation,
            "operationParameters": parameters,
            **about,
            "xxh3": _BLANK.decode(),
        }
    }


def done(writer: str, batch: int) -> Action:
    """Delta's transaction identifier: a writer's last batch."""
    return {"txn": {"appId": writer, "version": batch}}


def new_identity() -> dict[str, Any]:
    """The id of a new table, and its settings."""
    configuration = dict.fromkeys(KEPT, RETENTION)
    return {"id": str(uuid.uuid4()), "createdTime": now_ms(), "configuration": configuration}


def kept_s(settings: Mapping[str, str]) -> float | None:
    """How long a table keeps older versions, by its settings: the longer of the two.

    None if one of them, which other programs may set, cannot be parsed.
    """
    found = [_seconds(settings.get(name, RETENTION)) for name in KEPT]
    known = [seconds for seconds in found if seconds is not None]
    return max(known) if len(known) == len(found) else None


def _seconds(interval: str) -> float | None:
    """An interval of Delta, `interval 7 days` or `interval 1 day 12 hours`; None for any other."""
    text = interval.strip().lower()
    if not _INTERVAL.fullmatch(text):
        return None
    return float(sum(int(count) * _UNITS_S[unit] for count, unit in _PART.findall(text)))


def now_ms() -> int:
    return time.time_ns() // 1_000_000
