"""The check of small files beside the log: notes with a checksum, and the checkpoints of Spark.

Every `*.json` that a pipeline keeps is a note (log/checked_json.py), except its status. The files
of a checkpoint are Spark's. Plans and commits are lines of JSON without a checksum: one that is cut
or has zeros is not JSON, and one that is missing leaves a gap; a flipped digit is not found. What
Spark writes through Hadoop's checksummed file system (the state of RocksDB) has a CRC-32 of every
512 bytes of `NAME` in `.NAME.crc`.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from polybus.log import checked_json
from polybus.log.cluster_place import NAME as CLUSTER
from polybus.log.copying import NOTE as MIGRATION
from polybus.log.delta import NEWEST
from polybus.log.layout import CONFIG_SEEN

FOR_DISPLAY = ("status.json", "errors.json")
DISPENSABLE = ("standard-settings.json", "standard-watch.json", "view.json", NEWEST, CONFIG_SEEN)
"""Notes without which their readers continue: damage is worth a word, and no repair."""
_CRC_HEAD = struct.Struct(">4sI")
_LOGS = ("offsets", "commits")
_VERSION = re.compile(rb"v\d{1,3}")


def note_damages(data: Path) -> Iterator[tuple[Path, str]]:
    """Every damaged note, with the reason."""
    tables = ("tables/*", "accounts/*/topics/*/table", "accounts/*/tables/*")
    places = [path for one in tables for path in data.glob(f"{one}/{NEWEST}")]
    places += [*data.glob("pipeline/**/*.json"), *data.glob(f"accounts/*/{CONFIG_SEEN}")]
    for path in sorted([data / CLUSTER, data / MIGRATION, *places]):
        # It is missing, or its writer replaces or removes it now.
        with suppress(FileNotFoundError):
            is_note = path.name not in FOR_DISPLAY and not _crc_of(path).exists()
            if is_note and (reason := checked_json.problem(path.read_bytes())):
                yield path, reason


def checkpoint_damages(data: Path) -> Iterator[tuple[Path, str]]:
    """Every damaged or missing file of a checkpoint, with the reason."""
    checkpoints = data / "pipeline" / "checkpoints"
    for sums in sorted(checkpoints.rglob(".*.crc")):
        path = sums.with_name(sums.name[1:-4])
        # Those of unfinished writes begin with a point.
        if not path.name.startswith(".") and (reason := _wrong_crc(path, sums)):
            yield path, reason
    for offsets in sorted(checkpoints.glob("*/*/offsets")):
        checkpoint = offsets.parent
        batches = [path for log in _LOGS for path in _batches(checkpoint / log)]
        for path in (checkpoint / "metadata", *batches):
            # One that is gone was removed by Spark, or is named below.
            with suppress(FileNotFoundError):
                if not _is_of_spark(path.read_bytes()):
                    yield path, "it is not what Spark writes"
        yield from _missing_batches(checkpoint)


def _crc_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.crc")


def _wrong_crc(path: Path, sums: Path) -> str | None:
    try:
        found = sums.read_bytes()
        content = path.read_bytes()
    except FileNotFoundError:
        # A pipeline may have removed both meanwhile.
        return "is missing, and its checksums are there" if sums.exists() else None
    except OSError as error:
        return str(error)
    if len(found) < _CRC_HEAD.size:
        return "its checksums are damaged"
    magic, size = _CRC_HEAD.unpack_from(found)
    if magic != b"crc\0" or not size:
        return "its checksums are damaged"
    right = b"".join(
        zlib.crc32(content[at : at + size]).to_bytes(4) for at in range(0, len(content), size)
    )
    return None if found[_CRC_HEAD.size :] == right else "its checksum is wrong"


def _missing_batches(checkpoint: Path) -> Iterator[tuple[Path, str]]:
    """Spark removes the oldest plans and commits: no other may be missing."""
    numbers = {log: _numbers(checkpoint / log) for log in _LOGS}
    plans, commits = numbers["offsets"], numbers["commits"]
    if not (checkpoint / "metadata").exists():
        yield checkpoint / "metadata", "is missing, and the checkpoint has batches"
    if not plans and not commits:
        return
    for number in range(min(plans | commits), max(plans | commits) + 1):
        if number not in plans and number >= min(commits):
            yield checkpoint / "offsets" / str(number), "is missing, and later batches are there"
        if number not in commits and commits and min(commits) < number < max(plans):
            yield checkpoint / "commits" / str(number), "is missing, and later batches are there"


def _numbers(folder: Path) -> set[int]:
    return {int(path.name) for path in _batches(folder)}


def _batches(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.name.isdigit()]


def _is_of_spark(content: bytes) -> bool:
    """Whether a file is lines of JSON; the first may be a version, and `-` is a missing offset."""
    version, *lines = content.splitlines() or [b""]
    if not _VERSION.fullmatch(version):
        lines.insert(0, version)
    try:
        for line in lines:
            if line != b"-":
                msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return bool(lines)
