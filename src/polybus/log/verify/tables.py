"""The check of Delta tables: their log is readable, and the files that it names are intact.

It is the same for lake tables and for the tables of topics. Versions, checkpoints and Parquet files
that Polybus has committed have a checksum, and `_newest` knows the last version. Files of other
libraries are decoded completely, because their compression detects most changes. Files of topics'
tables are links to history files. Those that the manifest names are checked there.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from polybus.log.delta import CHECKSUM, LOG, damaged_checkpoint, is_intact, newest
from polybus.log.history.parquet import open_file, xxh3_of
from polybus.structs import decode

ATTEMPTS_MAX = 5
CHECKPOINT_SUFFIX = ".checkpoint.parquet"


class _File(msgspec.Struct):
    path: str
    size: int | None = None
    tags: dict[str, str | None] | None = None

    @property
    def xxh3(self) -> str | None:
        return (self.tags or {}).get(CHECKSUM)


class _Action(msgspec.Struct):
    """The fields of a line of a version that are checked."""

    add: _File | None = None
    remove: _File | None = None
    cdc: _File | None = None


class _Unreadable(Exception):
    """A file of the log cannot be read: path and reason."""


_Files = dict[str, _File]
"""By path."""
FileCheck = Callable[[Path, str | None], str | None]
"""Returns what is wrong with the content of a file whose checksum is in the table, or None."""


def table_damages(table: Path, check: FileCheck) -> list[tuple[Path, str]]:
    """The damaged files of a Delta table, each with the reason.

    A pipeline may commit and clean up meanwhile, so damage counts only if no version was added.
    """
    found: list[tuple[Path, str]] = []
    for _ in range(ATTEMPTS_MAX):
        before = _versions(table / LOG)
        found = list(_damages(table, check))
        if not found or before == _versions(table / LOG):
            break
    return found


def unlisted(table: Path) -> list[Path]:
    """Parquet files that no version names: left by an interrupted write, or by a lost version."""
    log = table / LOG
    named = {unquote(uri) for path in log.glob("*.checkpoint.parquet") for uri in _or_none(path)}
    for path in _versions(log).values():
        with suppress(_Unreadable):
            for action in _in_version(path):
                named |= {unquote(one.path) for one in (action.add, action.remove) if one}
    files = (path for path in table.rglob("*.parquet") if path.is_file())
    own = ((path, path.relative_to(table)) for path in files)
    return sorted(
        path for path, name in own if name.parts[0][0] not in "_." and str(name) not in named
    )


def _or_none(checkpoint: Path) -> _Files:
    try:
        return _in_checkpoint(checkpoint)
    except (OSError, _Unreadable):
        return {}


def _damages(table: Path, check: FileCheck) -> Iterator[tuple[Path, str]]:
    log = table / LOG
    last = newest(table)
    versions = _versions(log)
    checkpoints = [path for path in sorted(log.glob("*checkpoint*")) if path.is_file()]
    summed_up = max((_number(path) for path in checkpoints), default=-1)
    files: _Files = {}
    is_whole = True
    if checkpoints:
        try:
            files = _summed_up(log, summed_up)
        except FileNotFoundError:
            is_whole = False  # Other libraries write a checkpoint as several files.
        except _Unreadable as error:
            yield error.args
            is_whole = False
    for version in range(summed_up + 1, max(versions, default=-1)):
        if version not in versions:
            yield log / f"{version:020d}.json", "is missing, but later versions exist"
            is_whole = False
    for version, path in sorted(versions.items()):
        try:
            actions = _in_version(path)
        except _Unreadable as error:
            yield error.args
            is_whole = is_whole and version <= summed_up
        else:
            yield from _wrong_feed(table, actions, check)
            if version > summed_up:
                _take(files, actions)
    for version in range(max([summed_up, *versions]) + 1, last + 1):
        yield log / f"{version:020d}.json", f"is missing, but the table had version {last}"
        is_whole = False
    # An unreadable version may have removed any file.
    if is_whole:
        yield from _wrong_files(table, files, check)


def _summed_up(log: Path, number: int) -> _Files:
    """The files of the newest checkpoint. Raises _Unreadable, FileNotFoundError."""
    damaged = damaged_checkpoint(log)
    if damaged is not None:
        raise _Unreadable(*damaged)
    return _in_checkpoint(log / f"{number:020d}{CHECKPOINT_SUFFIX}")


def _versions(log: Path) -> dict[int, Path]:
    return {int(path.stem): path for path in log.glob("*.json") if path.stem.isdigit()}


def _number(checkpoint: Path) -> int:
    number = checkpoint.name.partition(".")[0]
    return int(number) if number.isdigit() else -1


def _in_checkpoint(path: Path) -> _Files:
    """The files of a table. Raises _Unreadable, FileNotFoundError."""
    try:
        # All columns are decoded: other columns have the writers' last batches and the metadata.
        found = pq.read_table(path)["add"].to_pylist()
        there = [one for one in found if one and one["path"] is not None]
        tags = [dict(one.get("tags") or ()) for one in there]
        return {
            one["path"]: _File(one["path"], one["size"], own)
            for one, own in zip(there, tags, strict=True)
        }
    except FileNotFoundError:
        raise
    except (OSError, LookupError, ValueError, TypeError, pa.ArrowException) as error:
        # Also damaged names and texts.
        raise _Unreadable(path, str(error)) from error


def _in_version(path: Path) -> list[_Action]:
    """The actions of a version. Raises _Unreadable."""
    try:
        content = path.read_bytes()
        lines = content.splitlines()
        if not lines:
            raise _Unreadable(path, "is empty")
        if not is_intact(content):
            raise _Unreadable(path, "its checksum is wrong")
        return [decode(line, _Action) for line in lines]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Unreadable(path, str(error)) from error


def _take(files: _Files, actions: list[_Action]) -> None:
    # A version may remove and add the same path, in any order: then the file exists.
    for action in actions:
        if action.remove is not None:
            files.pop(action.remove.path, None)
    for action in actions:
        if action.add is not None:
            files[action.add.path] = action.add


def _wrong_files(table: Path, files: _Files, check: FileCheck) -> Iterator[tuple[Path, str]]:
    for uri, file in files.items():
        if "://" in uri:
            continue  # Written by another library, outside of the folder.
        path = table / unquote(uri)
        found = None
        with suppress(OSError):
            found = path.stat().st_size
        if found is None:
            yield path, "is missing, but the table names it"
        elif found != file.size:
            yield path, f"its size is {found} bytes, not {file.size}"
        elif reason := check(path, file.xxh3):
            yield path, reason


def wrong_content(path: Path, xxh3: str | None) -> str | None:
    """What is wrong with a file that has this checksum, or, if it has none, cannot be read."""
    if not xxh3:
        return _undecodable(path)
    try:
        return None if xxh3_of(path) == xxh3 else "its checksum is wrong"
    except FileNotFoundError:
        return None  # It was cleaned up meanwhile.
    except OSError as error:
        return str(error)


def _wrong_feed(
    table: Path, actions: list[_Action], check: FileCheck
) -> Iterator[tuple[Path, str]]:
    """The damaged files of the change data feed. `vacuum` removes them before their version."""
    fed = [one.cdc for one in actions if one.cdc is not None]
    there = {one.path: one for one in fed if (table / unquote(one.path)).exists()}
    yield from _wrong_files(table, there, check)


def _undecodable(path: Path) -> str | None:
    """Why the rows of a Parquet file cannot be read, or None."""
    try:
        with open_file(path) as opened:
            for _ in opened.iter_batches(batch_size=8192, use_threads=False):
                pass
    except FileNotFoundError:
        return None  # It was cleaned up meanwhile.
    except (OSError, pa.ArrowException) as error:
        return f"its rows cannot be read: {error}"
    return None
