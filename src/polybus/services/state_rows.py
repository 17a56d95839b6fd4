"""The rows of state.db: their checksums, and what is left of a damaged file.

Every row ends with a checksum of its values. A start, and `verify`, read all rows and let SQLite
check the structure of the file. What is intact of a damaged file goes into a new one; the old one
is kept as `state.db.damaged-N`. A file of an older format, without checksums (1), accounts (2) or
tokens (3) of sessions, is renewed likewise.

SQLite changes what it opens: it moves the intact saves of the write-ahead log into the file and
removes the log, and with it all evidence of the others. So only a start that has examined the files
opens them for writing; all others, and the examination itself, read a copy (`reading`).

Order of writes: the old files get their other names, the complete new file is written beside them,
and one rename makes it `state.db.renewed`. A start after a crash before that begins again. From
then on that file is the state: the old write-ahead log is removed, which SQLite would apply to it,
and another rename gives it its name. A start after a crash in between continues there.
"""

import contextlib
import functools
import os
import shutil
import sqlite3
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import xxhash

from polybus import names
from polybus.errors import StorageError
from polybus.log import layout
from polybus.log.disk import sync_path

NAME = "state.db"
RENEWED, NEW, EXAMINED = f"{NAME}.renewed", f"{NAME}.new", f"{NAME}.examined"
BESIDE = ("-wal", "-shm", "-journal")
"""What SQLite adds to the name of a file for those beside it."""
FORMAT = 4
# In both of SQLite's numbers, so that a flipped bit in one does not look like a newer version.
APPLICATION_ID = 0x50420000
ASIDE_MAX = 9
DAMAGES_MAX = 1000
DAMAGES_KEPT_S = 30 * 86_400
WAL_HEADER_BYTES, FRAME_HEADER_BYTES, SHM_BYTES = 32, 24, 100

KEYS = {
    "sessions": ("number",),
    "packs": ("session", "id"),
    "direct": ("number",),
    "consumers": ("name",),
    "producers": ("name",),
    "producers_read": ("id",),
}
SCHEMA = """
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, digest BLOB NOT NULL, ttl_s REAL NOT NULL,
    next_id INTEGER NOT NULL, mark INTEGER NOT NULL, follows BLOB NOT NULL, lost BLOB NOT NULL,
    first_id INTEGER NOT NULL, packs INTEGER NOT NULL, account TEXT NOT NULL,
    token TEXT NOT NULL, sum BLOB NOT NULL);
CREATE TABLE packs (
    session INTEGER NOT NULL, id INTEGER NOT NULL, topic TEXT NOT NULL, epoch INTEGER NOT NULL,
    first_offset INTEGER NOT NULL, count INTEGER NOT NULL, value_bytes INTEGER NOT NULL,
    direct INTEGER NOT NULL, sum BLOB NOT NULL, PRIMARY KEY (session, id)) WITHOUT ROWID;
CREATE TABLE direct (number INTEGER PRIMARY KEY, json BLOB NOT NULL, sum BLOB NOT NULL);
CREATE TABLE consumers (name TEXT PRIMARY KEY, note BLOB NOT NULL, sum BLOB NOT NULL);
CREATE TABLE producers (name TEXT PRIMARY KEY, json BLOB NOT NULL, sum BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE producers_read (
    id INTEGER PRIMARY KEY CHECK (id = 0), epoch INTEGER NOT NULL, next_offset INTEGER NOT NULL,
    sum BLOB NOT NULL);
CREATE TABLE damages (
    kind TEXT NOT NULL, name TEXT NOT NULL, reason TEXT NOT NULL, time_s REAL NOT NULL)
"""
DEFINITIONS = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY rowid"
COLUMNS = {"sessions": 12, "packs": 9, "direct": 3, "consumers": 3, "producers": 3}
COLUMNS["producers_read"] = 4
# Rows of format 1 have no checksum, and a session's no counts; those of format 2 have no account,
# and those of format 3 no token.
SESSION_COLUMNS_1 = 7
LATER_COLUMNS = (names.ACCOUNT, "")
# The exceptions of reading a damaged file: its tables' names may no longer be valid text.
UNREADABLE = (sqlite3.Error, ValueError, OverflowError, MemoryError)
DISK_CODES = {
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PERM),
    sqlite3.SQLITE_IOERR,
}

Row = tuple[Any, ...]


class StateDamage(NamedTuple):
    """A row, or a part of the file, that was lost. `name` is empty if the row is unknown."""

    kind: str
    name: str
    reason: str
    time_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.reason}".lstrip() if self.name else self.reason


@dataclass(slots=True)
class StateContent:
    """The content of a file: its intact rows, and the damages."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    damages: list[StateDamage] = field(default_factory=list)
    earlier: list[Row] = field(default_factory=list)
    """Damages that earlier starts have found."""
    is_current: bool = False


REMOVED = StateDamage("", "", "the file is missing: all sessions, consumers and producers in it")
_encode = msgspec.msgpack.Encoder().encode
_digest: Callable[[bytes], bytes] = xxhash.xxh3_64_digest


def checksum(values: Sequence[Any]) -> bytes:
    return _digest(_encode(values))


def summed(*values: Any) -> Row:
    """A row: the values and their checksum."""
    return (*values, checksum(values))


def session_sum(row: Sequence[Any]) -> bytes:
    """The checksum of number, digest, time to live, next number, mark, topics, losses, first
    number, packs and, since format 3, account, and since format 4, token.
    """
    # SQLite formats JSON and fractions differently.
    return _digest(_encode((*row[:2], round(row[2] * 1000), *row[3:])))


def _is_right(table: str, row: Row) -> bool:
    try:
        if table == "sessions":
            parsed = [msgspec.json.decode(row[at]) for at in (5, 6)]
            found = session_sum((*row[:5], *parsed, *row[7:-1]))
        else:
            found = checksum(row[:-1])
        summed_from = SESSION_COLUMNS_1 + 1 if table == "sessions" else COLUMNS[table]
        return len(row) < summed_from or bool(found == row[-1])
    except (ValueError, TypeError, OverflowError):
        return False


# Reading everything


def files_of(data: Path) -> list[Path]:
    """The files that make up the state of a stopped bus."""
    path = _current(data / NAME)
    found = [path, *(_beside(path, suffix) for suffix in BESIDE)]
    return [one for one in found if one.exists()]


def _current(path: Path) -> Path:
    """The file that has the state: the renewed one if a start was killed during the renames."""
    renewed = path.with_name(RENEWED)
    return renewed if renewed.exists() else path


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


@contextlib.contextmanager
def reading(path: Path, *, scratch: Path | None = None) -> Iterator[sqlite3.Connection]:
    """Open a database that no other process uses for reading, without changing any file.

    If there is a write-ahead log, this is a copy: in `scratch`, or in the temporary folder.
    """
    url = f"file:{quote(str(path))}?immutable=1"
    with contextlib.ExitStack() as stack:
        beside = [one for one in (_beside(path, suffix) for suffix in BESIDE) if one.exists()]
        if any(one.stat().st_size for one in beside if not one.name.endswith("-shm")):
            folder = stack.enter_context(_copied([path, *beside], scratch))
            url = f"file:{quote(str(folder / path.name))}?mode=rw"
        db = sqlite3.connect(url, uri=True, isolation_level=None, check_same_thread=False)
        yield stack.enter_context(contextlib.closing(db))


@contextlib.contextmanager
def _copied(files: list[Path], scratch: Path | None) -> Iterator[Path]:
    folder = _copy(files, scratch)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy(files: list[Path], scratch: Path | None) -> Path:
    if scratch is None:
        folder = Path(tempfile.mkdtemp(prefix="polybus-state-"))
    else:
        folder = scratch / EXAMINED
        folder.mkdir(mode=0o700, exist_ok=True)
    try:
        for one in files:
            shutil.copyfile(one, folder / one.name)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        if scratch is None:
            raise
        # A full disk must not prevent a start.
        return _copy(files, None)
    return folder


def examine(path: Path, *, fsync: bool = True, scratch: Path | None = None) -> StateContent:
    """All rows of a file that no other process uses, and the damages. Changes nothing.

    With `fsync` every save was synced, so a save that is missing in the write-ahead log is damage.
    `scratch`: as for `reading`.

    Raises:
        StorageError: `log.format`, a newer version wrote it.
        sqlite3.Error, OSError: the disk fails.
    """
    content = StateContent()
    if not path.stat().st_size:
        content.damages.append(StateDamage("", "", "the file is empty"))
        return content
    later = _commits_of(_beside(path, "-wal"))
    synced_frames = _frames_of(_beside(path, "-shm"))
    with reading(path, scratch=scratch) as db:
        # A name that is not UTF-8 invalidates only its own row's checksum.
        db.text_factory = lambda text: text.decode(errors="surrogateescape")
        try:
            _check_format(db, path, content)
            read_frames = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
            for (line,) in db.execute("PRAGMA quick_check(10)"):
                if line != "ok":
                    content.damages.append(StateDamage("", "", str(line)))
            content.earlier = _earlier(db)
        except UNREADABLE as error:
            _check_disk(error)
            content.damages.append(StateDamage("", "", str(error)))
            read_frames = None
        for table in KEYS:
            _read_table(db, table, content)
    lost = [at for at in later if at >= max(read_frames or 0, 0)]
    is_short = read_frames is not None and synced_frames > max(read_frames, 0)
    if fsync and read_frames is not None and (len(lost) > 1 or is_short):
        _give_sessions_up(content, "its last saves are damaged or missing (state.db-wal)")
    damaged = {damage.kind for damage in content.damages}
    if damaged & {"", "producer", "producers_read"}:
        # The log has all records: read them again from its beginning.
        content.rows["producers_read"] = []
    return content


def _check_disk(error: BaseException) -> None:
    """Raise an error of the disk, which does not mean a damaged file."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in DISK_CODES and code != sqlite3.SQLITE_IOERR_SHORT_READ:
        raise error


def _check_format(db: sqlite3.Connection, path: Path, content: StateContent) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    marked = db.execute("PRAGMA application_id").fetchone()[0]
    if version > FORMAT and marked == APPLICATION_ID | version:
        text = f"{path} has format {version}; this version knows {FORMAT}"
        raise StorageError("log.format", text)
    content.is_current = version == FORMAT and marked == APPLICATION_ID | FORMAT
    older = ((1, 0), (2, APPLICATION_ID | 2), (3, APPLICATION_ID | 3))
    is_older = (version, marked) in older
    if not content.is_current and not is_older:
        content.damages.append(StateDamage("", "", "the head of the file is damaged"))
    # SQLite reads a file by it, whatever it says.
    if content.is_current and db.execute(DEFINITIONS).fetchall() != _definitions():
        content.damages.append(StateDamage("", "", "the definition of a table is damaged"))


@functools.cache
def _definitions() -> list[Row]:
    """What SQLite stores of SCHEMA."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        return db.execute(DEFINITIONS).fetchall()


def _earlier(db: sqlite3.Connection) -> list[Row]:
    found = db.execute("SELECT name FROM sqlite_master WHERE name = 'damages'").fetchall()
    # These rows have no checksum: skip malformed rows.
    types = "typeof(kind) || typeof(name) || typeof(reason) || typeof(time_s)"
    query = f"SELECT * FROM damages WHERE {types} = 'texttexttextreal'"
    rows = db.execute(query).fetchall() if found else []
    return [row for row in rows if "".join(row[:3]).isprintable()]


def _read_table(db: sqlite3.Connection, table: str, content: StateContent) -> None:
    keys = KEYS[table]
    rows: dict[Row, Row] = {}
    problem = ""
    # From both ends, to skip an unreadable page.
    for order in ("ASC", "DESC"):
        # By position: a damaged definition may name a column in another way.
        wanted = ", ".join(f"{at} {order}" for at, _ in enumerate(keys, 1))
        try:
            for row in db.execute(f"SELECT * FROM {table} ORDER BY {wanted}"):
                rows[row[: len(keys)]] = row
            break
        except UNREADABLE as error:
            _check_disk(error)
            problem = str(error)
    kind = table if table == "producers_read" else table.removesuffix("s")
    if problem:
        content.damages.append(StateDamage(kind, "", f"{table} cannot be read: {problem}"))
    intact = content.rows[table] = []
    for key, row in rows.items():
        if _is_right(table, row):
            intact.append(row)
        else:
            name = " of session ".join(str(one) for one in reversed(key))
            printable = name.encode(errors="backslashreplace").decode()
            content.damages.append(StateDamage(kind, printable, "its checksum is wrong"))


def _give_sessions_up(content: StateContent, reason: str) -> None:
    """Drop all sessions: numbers that a client has seen might be given to other messages."""
    for row in content.rows["sessions"]:
        content.damages.append(StateDamage("session", str(row[0]), reason))
    content.damages.append(StateDamage("", "", reason))
    for table in ("sessions", "packs", "direct"):
        content.rows[table] = []


def _commits_of(wal: Path) -> list[int]:
    """The numbers of the frames, from 0, that end a save in a write-ahead log."""
    try:
        file = wal.open("rb")
    except FileNotFoundError:
        return []
    commits = []
    with file:
        header = file.read(WAL_HEADER_BYTES)
        if len(header) < WAL_HEADER_BYTES or not any(header):
            return []
        if not _is_wal_header(header):
            # It is one sector, so it cannot be torn: everything after it is lost.
            return [0, 1]
        page_bytes = struct.unpack_from(">I", header, 8)[0]
        salts = header[16:24]
        number = 0
        while len(frame := file.read(FRAME_HEADER_BYTES)) == FRAME_HEADER_BYTES:
            # Frames of an earlier use of the file have other salts.
            if frame[8:16] == salts and any(frame[4:8]):
                commits.append(number)
            number += 1
            file.seek(page_bytes, os.SEEK_CUR)
    return commits


def _frames_of(shm: Path) -> int:
    """How many frames the write-ahead log had; 0 if state.db has all, or if it is unknown.

    SQLite keeps the index of the log in this file. It counts a frame after its fsync, writes the
    count twice with a checksum, and removes the file before the log. So after a kill it proves what
    a shorter, or missing, log has lost.
    """
    try:
        content = shm.read_bytes()[:SHM_BYTES]
    except FileNotFoundError:
        return 0
    if len(content) < SHM_BYTES or content[:48] != content[48:96]:
        return 0
    *words, first, second, backfilled = struct.unpack("=12I48xI", content)
    is_right = _wal_checksum(words) == (first, second)
    return words[4] if is_right and backfilled < words[4] else 0


def _is_wal_header(header: bytes) -> bool:
    words = struct.unpack(">6I" if header[3] & 1 else "<6I", header[:24])
    return struct.unpack(">2I", header[24:]) == _wal_checksum(words)


def _wal_checksum(words: Sequence[int]) -> tuple[int, int]:
    """The checksum of SQLite's file format."""
    first = second = 0
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = first + one + second & 0xFFFFFFFF
        second = second + other + first & 0xFFFFFFFF
    return first, second


# A new file


def open_or_renew(path: Path, *, fsync: bool) -> list[StateDamage]:
    """Ensure that the file exists, is intact and current; return what was lost.

    Raises:
        StorageError: `log.format`.
        sqlite3.Error, OSError: the disk fails.
    """
    for leftover in path.parent.glob(f"{NEW}*"):
        leftover.unlink()
    shutil.rmtree(path.with_name(EXAMINED), ignore_errors=True)
    if path.with_name(RENEWED).exists():
        _put_in_place(path)
    if not path.exists():
        content = StateContent()
        if _was_removed(path):
            content.damages = [REMOVED._replace(time_s=time.time())]
            content.earlier = list(content.damages)
        _make(path, content)
        return content.damages
    content = examine(path, fsync=fsync, scratch=path.parent)
    if content.damages:
        aside = _set_aside(path)
        found = [one._replace(time_s=time.time()) for one in content.damages]
        content.damages = [*found, StateDamage("", aside.name, "has the damaged file")]
        content.earlier += found
        _make(path, content)
    elif not content.is_current:
        _make(path, content)
    return content.damages


def _was_removed(path: Path) -> bool:
    """Whether a file existed: a start creates it before the system topics."""
    return layout.topic_folder(path.parent, names.SYSTEM_TOPICS[0]).exists()


def _make(path: Path, content: StateContent) -> None:
    """Write a file with these rows, and replace the old one by it."""
    new = path.with_name(NEW)
    # It has no session keys, but messages.
    os.close(os.open(new, os.O_CREAT | os.O_RDWR, 0o600))
    db = sqlite3.connect(new, isolation_level=None, check_same_thread=False)
    with contextlib.closing(db):
        db.execute("BEGIN")
        for statement in SCHEMA.split(";"):
            db.execute(statement)
        for table, rows in _with_sums(content.rows):
            marks = ", ".join("?" * COLUMNS[table])
            db.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        kept = [row for row in content.earlier if row[3] > time.time() - DAMAGES_KEPT_S]
        db.executemany("INSERT INTO damages VALUES (?, ?, ?, ?)", kept[-DAMAGES_MAX:])
        db.execute(f"PRAGMA application_id = {APPLICATION_ID | FORMAT}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("COMMIT")
    sync_path(new)
    os.replace(new, path.with_name(RENEWED))
    sync_path(path.parent)
    _put_in_place(path)


def _put_in_place(path: Path) -> None:
    """Replace the old file, and those beside it, by the renewed one."""
    for suffix in BESIDE:
        _beside(path, suffix).unlink(missing_ok=True)
    sync_path(path.parent)
    os.replace(path.with_name(RENEWED), path)
    sync_path(path.parent)


def _with_sums(rows: dict[str, list[Row]]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each table; missing columns of older formats are added."""
    counts = Counter(row[0] for row in rows.get("packs", ()))
    first = {row[0]: row[1] for row in reversed(rows.get("packs", ()))}
    for table, found in rows.items():
        width = COLUMNS[table]
        for at, row in enumerate(found):
            if len(row) == width:
                continue
            if table == "sessions":
                values = row[:-1]
                if len(row) == SESSION_COLUMNS_1:
                    values = (*row, first.get(row[0], row[3]), counts[row[0]])
                values = (*values, *LATER_COLUMNS[len(values) - SESSION_COLUMNS_1 - 2 :])
                parsed = [msgspec.json.decode(row[one]) for one in (5, 6)]
                total = session_sum((*row[:5], *parsed, *values[7:]))
                found[at] = (*values, total)
            else:
                found[at] = summed(*row)
        yield table, found


def _set_aside(path: Path) -> Path:
    """Rename damaged files; when all names are used, the last one is overwritten."""
    names = [path.with_name(f"{NAME}.damaged-{number}") for number in range(1, ASIDE_MAX + 1)]
    aside = next((one for one in names if not one.exists()), names[-1])
    for suffix in ("", *BESIDE):
        source, target = _beside(path, suffix), _beside(aside, suffix)
        target.unlink(missing_ok=True)
        if source.exists():
            try:
                os.link(source, target)
            except OSError:
                # The file system has no hard links.
                shutil.copyfile(source, target)
    return aside


def verify_state(data: Path, *, fsync: bool = True) -> list[StateDamage]:
    """The damages of the state.db of a stopped bus. Changes nothing.

    Raises:
        StorageError: `log.format`.
    """
    path = _current(data / NAME)
    if path.exists():
        return examine(path, fsync=fsync).damages
    return [REMOVED] if _was_removed(path) else []


@contextlib.contextmanager
def of_stopped_bus(data: Path) -> Iterator[sqlite3.Connection | None]:
    """The state of a stopped bus, read-only; None if it has none. Raises StorageError."""
    path = _current(data / NAME)
    if not path.exists():
        yield None
        return
    try:
        with reading(path) as db:
            yield db
    except (sqlite3.Error, OSError) as error:
        raise StorageError("state.failed", f"{path}: {error}") from error
