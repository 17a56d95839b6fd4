"""Single files of a backup: links to immutable files, durable copies of the rest.

A file that never changes again is a link to the file of the bus. If that is on another file system,
it is a link to the same file of an earlier backup, the base, if both have the same bytes. So a
damaged base does not damage a backup, and a base can be deleted at any time.
"""

import errno
import os
import stat
from pathlib import Path

import msgspec

from polybus.log.disk import Disk

PIECE_BYTES = 1 << 20
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES)


class CopySize(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a copy: its own files, and links, which share their blocks with others."""

    copied_files: int
    copied_bytes: int
    linked_files: int
    linked_bytes: int


def put(path: Path, target: Path, *, is_final: bool, base: Path | None) -> None:
    """Make `target` a file with the content of `path`; replaces an existing one.

    `is_final`: no bus or command changes the file any more. `base` is its path in an earlier
    backup. The content is durable afterwards, the name after a sync of its folder.

    Raises:
        FileNotFoundError: the file no longer exists.
        OSError: it cannot be read, or the copy cannot be written.
    """
    Disk().make_folder(target.parent)
    target.unlink(missing_ok=True)
    if not is_final or not (_linked(path, target) or _linked_to_base(base, path, target)):
        _copy(path, target)


def _linked(path: Path, target: Path) -> bool:
    """Make a hard link; False if the file system or the permissions do not allow it."""
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        return False
    return True


def _linked_to_base(base: Path | None, path: Path, target: Path) -> bool:
    if base is None or not _has_content_of(base, path):
        return False
    try:
        os.link(base, target)
    except OSError:
        # Also if the base is deleted meanwhile: then the file of the bus is copied.
        return False
    return True


def _has_content_of(base: Path, path: Path) -> bool:
    """Whether `base` is a readable regular file with the bytes of `path`."""
    with path.open("rb") as ours:
        size = os.fstat(ours.fileno()).st_size
        try:
            status = base.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                return False
            theirs = base.open("rb")
        except OSError:
            return False
        with theirs:
            while piece := ours.read(PIECE_BYTES):
                try:
                    if theirs.read(len(piece)) != piece:
                        return False
                except OSError:
                    return False
    return True


def _copy(path: Path, target: Path) -> None:
    with path.open("rb") as source:
        status = os.fstat(source.fileno())
        left = status.st_size
        # Writable even if the source folder is read-only: a bus must be able to use the copy.
        mode = (status.st_mode & 0o777 | 0o600) & 0o660
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as copied:
            while left and (piece := source.read(min(left, PIECE_BYTES))):
                copied.write(piece)
                left -= len(piece)
            copied.flush()
            os.fsync(copied.fileno())


def taken_by(folder: Path) -> CopySize:
    """The size of the files below a folder."""
    counts = {True: [0, 0], False: [0, 0]}
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            count = counts[status.st_nlink > 1]
            count[0] += 1
            count[1] += status.st_size
    (copied_files, copied_bytes), (linked_files, linked_bytes) = counts[False], counts[True]
    return CopySize(
        copied_files=copied_files,
        copied_bytes=copied_bytes,
        linked_files=linked_files,
        linked_bytes=linked_bytes,
    )
