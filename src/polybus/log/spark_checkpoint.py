"""The layout of a Spark checkpoint on a local disk. No other module knows it.

    CHECKPOINT/metadata     {"id": QUERY ID}, written once
    CHECKPOINT/offsets/N    the plan of batch N: a version, settings, then a line per source with
                            the offset at which the batch ends; batch N - 1 has where it starts
    CHECKPOINT/commits/N    batch N is done
    CHECKPOINT/state/**     the state of the query; `.NAME.crc` has a CRC-32 of every 512 bytes of
                            `NAME`, as Hadoop's checksummed file system writes it

Spark writes `offsets/N` before it runs batch N and `commits/N` after it, and fsyncs neither. A
batch that has a plan and no commit runs again, over the same messages, when the query restarts.

Plans and commits are lines of JSON without a checksum: a truncated or zeroed file is not JSON, and
a missing one leaves a gap, but a flipped digit is not detected.

Nothing here changes or removes a file that Spark wrote.
"""

import json
import re
import struct
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from polybus.log.disk import Disk, replace_file, sync_path

OFFSETS, COMMITS = "offsets", "commits"
_CRC_HEAD = struct.Struct(">4sI")
_VERSION = re.compile(rb"v\d{1,3}")


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The checkpoint in a folder, which may not exist yet."""

    path: Path

    @property
    def metadata(self) -> Path:
        return self.path / "metadata"

    def plan(self, batch_id: int) -> Path:
        return self.path / OFFSETS / str(batch_id)

    def query_id(self) -> str:
        """The id of the query. A checkpoint that replaces this one has another id.

        Raises:
            FileNotFoundError: no query has started with the checkpoint.
            ValueError: the file is damaged.
        """
        try:
            return str(json.loads(self.metadata.read_bytes())["id"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.metadata} is damaged: {error}") from error

    def create_query_id(self) -> str:
        """The id of the query; a checkpoint without one gets one, which Spark then uses."""
        try:
            return self.query_id()
        except FileNotFoundError:
            created = str(uuid.uuid4())
            Disk().make_folder(self.path)
            replace_file(self.metadata, json.dumps({"id": created}).encode())
            return created

    def has_batches(self) -> bool:
        """Whether a batch was ever planned."""
        return bool(_batches(self.path / OFFSETS))

    def has_commits(self) -> bool:
        """Whether a batch was ever finished."""
        return bool(_batches(self.path / COMMITS))

    def unfinished_batch(self) -> int | None:
        """The batch that has a plan and no commit, if there is one."""
        last = max(_batches(self.path / OFFSETS), default=None)
        return None if last in _batches(self.path / COMMITS) else last

    def planned_s(self, batch_id: int) -> float | None:
        """When Spark planned a batch, in seconds since 1970; None if that is no longer known."""
        try:
            return self.plan(batch_id).stat().st_mtime
        except OSError:
            return None

    def sync_plan(self, batch_id: int) -> None:
        """Make the plan of a batch survive a power cut. Raises OSError."""
        plan = self.plan(batch_id)
        for path in (plan, plan.parent, *((self.metadata, self.path) if batch_id == 0 else ())):
            sync_path(path)

    def damages(self) -> Iterator[tuple[Path, str]]:
        """Every damaged or missing file of a checkpoint that has batches, with the reason."""
        plans, commits = _batches(self.path / OFFSETS), _batches(self.path / COMMITS)
        for path in (self.metadata, *plans.values(), *commits.values()):
            # Spark removed a missing one, or it is reported below.
            with suppress(FileNotFoundError):
                if not _is_of_spark(path.read_bytes()):
                    yield path, "it is not what Spark writes"
        if not self.metadata.exists():
            yield self.metadata, "is missing, and the checkpoint has batches"
        # Spark removes the oldest plans, then the oldest commits: no other may be missing.
        numbers = plans.keys() | commits.keys()
        for number in range(min(numbers, default=0), max(numbers, default=-1) + 1):
            if number not in plans and number > min(plans, default=-1):
                yield self.plan(number), "is missing, but later batches exist"
            # The last batch may be unfinished.
            if number not in commits and commits and min(commits) < number < max(numbers):
                yield self.path / COMMITS / str(number), "is missing, but later batches exist"


def checkpoint_damages(data: Path) -> Iterator[tuple[Path, str]]:
    """Every damaged or missing file of the checkpoints of a pipeline, with the reason."""
    checkpoints = data / "pipeline" / "checkpoints"
    for sums in sorted(checkpoints.rglob(".*.crc")):
        path = sums.with_name(sums.name[1:-4])
        # Files of unfinished writes begin with a dot.
        if not path.name.startswith(".") and (reason := _wrong_crc(path, sums)):
            yield path, reason
    for offsets in sorted(checkpoints.glob(f"*/*/{OFFSETS}")):
        yield from CheckpointFiles(offsets.parent).damages()


def crc_of(path: Path) -> Path:
    """The path of Hadoop's checksums of a file."""
    return path.with_name(f".{path.name}.crc")


def _wrong_crc(path: Path, sums: Path) -> str | None:
    try:
        found = sums.read_bytes()
        content = path.read_bytes()
    except FileNotFoundError:
        # A pipeline may have removed both meanwhile.
        return "is missing, but its checksums exist" if sums.exists() else None
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


def _batches(folder: Path) -> dict[int, Path]:
    return {int(path.name): path for path in folder.glob("*") if path.name.isdigit()}


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
