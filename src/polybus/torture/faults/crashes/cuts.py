"""Simulates a power cut: the files keep anything that the completed fsyncs allow.

It reads the record of all changes that shim.c has made, and builds the data folder again:

- Bytes: a file's blocks are each as at any moment since the last fsync of the file that covers
  them. Blocks that were never synced may have any bytes. The size is that of any such moment. An
  undone truncation also undoes all later writes. After an fsync that failed, the blocks written
  before it are covered only when they are written again.
- Names: of the changes in a folder since its last fsync, a prefix survives. A rename belongs to
  the target's folder. An fsync of a file does not cover its name.
"""

import copy
import os
import random
import shutil
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polybus.torture.bus.control import Shim

BLOCK_BYTES = 4096
_HEAD = struct.Struct("<IIQQqq")


@dataclass(slots=True)
class Change:
    kind: str
    a: int
    b: int
    offset: int
    length: int
    data: bytes


def read_changes(log: Path) -> Iterator[Change]:
    content = log.read_bytes()
    position = 0
    while position + _HEAD.size <= len(content):
        size, kind, a, b, offset, length = _HEAD.unpack_from(content, position)
        data = content[position + _HEAD.size : position + size]
        yield Change(chr(kind), a, b, offset, length, data)
        position += size


@dataclass(slots=True)
class FileHistory:
    """The changes of a file, and up to which of them each block is durable."""

    changes: list[Change] = field(default_factory=list)
    durable: int = 0
    """This many changes are durable, except in the blocks of `doubtful`."""
    doubtful: dict[int, int] = field(default_factory=dict)
    """Blocks whose fsync failed: how many changes are durable there."""
    _begun: dict[int, int] = field(default_factory=dict)

    def add(self, change: Change) -> None:
        if change.kind == "s":
            self._begun[change.b] = len(self.changes)
        elif change.kind == "S":
            self.durable = max(self.durable, self._begun.pop(change.b))
        elif change.kind == "F":
            for earlier in self.changes[self.durable : self._begun.pop(change.b)]:
                for block in _blocks(earlier):
                    self.doubtful.setdefault(block, self.durable)
        else:
            for block in _blocks(change):
                self.doubtful.pop(block, None)
            self.changes.append(change)

    def cut(self, content: bytes, chance: random.Random) -> bytes:
        """The content of the file after a power cut, from its current content."""
        count = len(self.changes)
        first = min([self.durable, *self.doubtful.values()])
        if first == count:
            return content
        sizes = [*(change.b for change in self.changes), len(content)]
        moment = chance.randint(self.durable, count)
        style = chance.choice(("lost", "kept", "moment", "mixed", "mixed"))
        size_at = {"lost": self.durable, "kept": count}.get(style, moment)
        left = bytearray(sizes[size_at])
        wanted: dict[int, list[int]] = defaultdict(list)
        for block in range((len(left) + BLOCK_BYTES - 1) // BLOCK_BYTES):
            low, high = self._range(block, size_at)
            at = chance.randint(low, high) if style == "mixed" else min(max(size_at, low), high)
            if block in self.doubtful and chance.random() < 0.5:
                at = low
            wanted[at].append(block)
        now = bytearray(content)
        for version in range(count, first - 1, -1):
            for block in wanted[version]:
                start = block * BLOCK_BYTES
                stop = min(start + BLOCK_BYTES, len(left))
                left[start:stop] = now[start:stop].ljust(stop - start, b"\0")
                never = start >= sizes[self.durable]
                if never and style == "mixed" and chance.random() < 0.1:
                    left[start:stop] = chance.randbytes(stop - start)
            if version > first:
                change = self.changes[version - 1]
                _resize(now, change.b)
                now[change.offset : change.offset + len(change.data)] = change.data
        return bytes(left)

    def _range(self, block: int, size_at: int) -> tuple[int, int]:
        """The versions that a block may have, if the file's size is that of version `size_at`."""
        low, high = self.doubtful.get(block, self.durable), len(self.changes)
        for number, change in enumerate(self.changes[low:], low):
            if change.kind == "T" and change.offset < (block + 1) * BLOCK_BYTES:
                if number < size_at:
                    low = number + 1
                else:
                    return low, max(low, min(high, number))
        return low, high


def _blocks(change: Change) -> range:
    length = change.length if change.kind == "W" else max(0, change.b - change.offset)
    return range(change.offset // BLOCK_BYTES, -(-(change.offset + length) // BLOCK_BYTES))


def _resize(content: bytearray, size: int) -> None:
    if len(content) > size:
        del content[size:]
    content.extend(bytes(size - len(content)))


@dataclass(slots=True)
class _NameChange:
    """A name in a folder gets a new meaning; a rename takes another name away."""

    folder: int
    name: str
    meaning: int | None
    source: tuple[int, str] | None = None


class NamesInFolders:
    """All names below the root, and their changes since they were taken.

    A name means a file, by its inode, or a folder, by a number below 0. The root is 0.
    """

    def __init__(self, root: Path) -> None:
        """Take the names that exist: they are durable."""
        self._entries: dict[int, dict[str, int]] = {0: {}}
        self._numbers: dict[int, int] = {}
        self._changes: list[_NameChange] = []
        self._pending: dict[int, list[int]] = defaultdict(list)
        self._begun: dict[int, int] = {}
        self._unrecorded: Mapping[int, Path] = {}
        self._last = 0
        if root.exists():
            self._take(root, 0)

    def _take(self, folder: Path, number: int) -> None:
        self._numbers[folder.stat().st_ino] = number
        for path in folder.iterdir():
            if path.is_dir():
                self._entries[number][path.name] = self._new_folder()
                self._take(path, self._last)
            elif path.is_file():
                self._entries[number][path.name] = path.stat().st_ino

    def begin(self, root: Path) -> None:
        """Register the root, which the bus may have created."""
        self._numbers[root.stat().st_ino] = 0

    def _new_folder(self) -> int:
        self._last -= 1
        self._entries[self._last] = {}
        return self._last

    def adopt(self, folders: Mapping[int, Path]) -> None:
        """Register existing folders, by inode, below a known root.

        A process that was killed between making one and recording it has left no record of it.
        """
        self._unrecorded = folders

    def _number(self, inode: int) -> int:
        if inode not in self._numbers and inode in self._unrecorded:
            path = self._unrecorded[inode]
            parent = self._number(path.parent.stat().st_ino)
            self._entries[parent][path.name] = self._numbers[inode] = self._new_folder()
        return self._numbers.get(inode, 0)

    def add(self, change: Change) -> None:
        folder = self._number(change.a)
        text = os.fsdecode(change.data)
        if change.kind == "s":
            self._begun[change.b] = len(self._changes)
        elif change.kind == "S":
            begun = self._begun.pop(change.b)
            self._pending[folder] = [one for one in self._pending[folder] if one >= begun]
        elif change.kind == "C":
            # A removed folder's inode may be a file's now.
            self._numbers.pop(change.b, None)
            self._change(_NameChange(folder, text, change.b))
        elif change.kind == "M":
            self._numbers[change.b] = self._new_folder()
            self._change(_NameChange(folder, text, self._last))
        elif change.kind == "U":
            self._change(_NameChange(folder, text, None))
        elif change.kind == "R":
            old, _, new = text.partition("/")
            meaning = self._numbers.get(change.offset, change.offset)
            target = self._number(change.b)
            self._change(_NameChange(target, new, meaning, (folder, old)))

    def _change(self, change: _NameChange) -> None:
        self._pending[change.folder].append(len(self._changes))
        self._changes.append(change)

    def knows_folder(self, inode: int) -> bool:
        return inode in self._numbers or inode in self._unrecorded

    def cut(self, chance: random.Random) -> dict[str, int | None]:
        """The paths that a power cut leaves, folders first; files with their inodes."""
        lost: set[int] = set()
        for pending in self._pending.values():
            kept = chance.choice((0, len(pending), chance.randint(0, len(pending))))
            lost.update(pending[kept:])
        entries = {folder: dict(names) for folder, names in self._entries.items()}
        for number, change in enumerate(self._changes):
            if number not in lost:
                if change.source is not None:
                    entries[change.source[0]].pop(change.source[1], None)
                if change.meaning is None:
                    entries[change.folder].pop(change.name, None)
                else:
                    entries[change.folder][change.name] = change.meaning
        return dict(_paths(entries, 0, ""))


def _paths(
    entries: dict[int, dict[str, int]], folder: int, path: str
) -> Iterator[tuple[str, int | None]]:
    for name, meaning in entries[folder].items():
        yield path + name, meaning if meaning > 0 else None
        if meaning <= 0:
            yield from _paths(entries, meaning, f"{path}{name}/")


class PowerCut:
    """Watches one bus after the other; `cut` changes their files after the power is off."""

    def __init__(self, shim: Shim) -> None:
        """Take the files that exist: they are durable."""
        self._shim = shim
        self._names = NamesInFolders(shim.root)

    def cut(self, chance: random.Random) -> None:
        """Change the files to the state after the power cut. All processes have ended."""
        shim, root = self._shim, self._shim.root
        shim.reset()
        if not root.exists():
            return
        mode = root.stat().st_mode & 0o777
        new = root.with_name("after-cut")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=mode)
        names, contents = self._left(chance)
        written: dict[int, Path] = {}
        for name, inode in names.items():
            path = new / name
            if inode is None:
                path.mkdir(mode=mode)
            elif inode in written:
                path.hardlink_to(written[inode])
            else:
                path.touch(mode & 0o660)
                path.write_bytes(contents[inode])
                written[inode] = path
        shutil.rmtree(root)
        new.rename(root)
        shim.forget()
        self._names = NamesInFolders(root)

    def left(self, chance: random.Random) -> dict[str, bytes | None]:
        """A state that a power cut may leave: folders, and files with their content."""
        names, contents = self._left(chance)
        return {name: None if inode is None else contents[inode] for name, inode in names.items()}

    def _left(self, chance: random.Random) -> tuple[dict[str, int | None], dict[int, bytes]]:
        """The paths, with the inodes of files, and the contents by inode."""
        names = copy.deepcopy(self._names)
        names.begin(self._shim.root)
        below = [path for path in self._shim.root.rglob("*") if path.is_dir()]
        names.adopt({path.stat().st_ino: path for path in below})
        files: dict[int, FileHistory] = defaultdict(FileHistory)
        for change in read_changes(self._shim.log):
            if change.kind in "CMUR" or names.knows_folder(change.a):
                names.add(change)
            else:
                files[change.a].add(change)
        paths = self._shim.root.rglob("*")
        inodes = {path.stat().st_ino: path for path in paths if path.is_file()}
        contents: dict[int, bytes] = {}
        left = names.cut(chance)
        for inode in left.values():
            # A file may have two names.
            if inode is not None and inode not in contents:
                grave = self._shim.graveyard / str(inode)
                content = (grave if grave.exists() else inodes[inode]).read_bytes()
                contents[inode] = files[inode].cut(content, chance)
        return left, contents
