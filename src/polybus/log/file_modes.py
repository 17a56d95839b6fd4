"""Who may open the files of a data folder: its owner and, with `group-access`, its group.

The mode of DATA itself is the truth. `prepare` makes it, or corrects DATA and what a bus keeps
below it. Files of other programs stay as they are, because these would lose the right to be run.
Order of writes: the modes of all files and folders, a sync of the disk, the mode of DATA. So after
a kill or a power cut, the next start begins again. Files and folders get the modes of their parents
(log/disk.py), and a process takes its umask from DATA (`adopt`), for files that libraries and Spark
write.
"""

import logging
import os
from itertools import chain
from pathlib import Path

from polybus.errors import StorageError
from polybus.log.layout import admin_token_path, is_own, private_key_path
from polybus.log.topics import storage_error

logger = logging.getLogger("polybus.log")

OWNER, GROUP = 0o700, 0o770


def prepare(data: Path, *, group: bool) -> None:
    """Create the folder, or correct the modes of an existing one. Raises StorageError."""
    umask = os.umask(0o077)
    os.umask(umask)
    wanted = (GROUP & ~umask | OWNER) if group else OWNER
    try:
        data.parent.mkdir(parents=True, exist_ok=True)
        data.mkdir(mode=wanted, exist_ok=True)
        if data.stat().st_mode & 0o777 != wanted:
            _correct(data, wanted)
    except OSError as error:
        raise storage_error(error, f"cannot open {data}") from error


def adopt(data: Path) -> None:
    """Set the umask of this process, and those that it starts, to match the folder's mode."""
    data.parent.mkdir(parents=True, exist_ok=True)
    data.mkdir(mode=OWNER, exist_ok=True)
    os.umask(~data.stat().st_mode & 0o777)


def prepare_socket_folder(socket: Path) -> None:
    """Create the folder of a socket, or check that only this user can write to it.

    Its path may be in a folder for all users (`layout.socket_path`). Raises StorageError.
    """
    folder = socket.parent
    try:
        folder.mkdir(mode=OWNER, exist_ok=True)
        found = folder.lstat()
        if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
            text = f"{folder} is not a folder that only this user can write to"
            raise StorageError("admin.socket-folder", text)
        if found.st_mode & 0o077:
            folder.chmod(OWNER)
    except OSError as error:
        raise storage_error(error, f"cannot use {folder}") from error


def _correct(data: Path, wanted: int) -> None:
    foreign = 0
    private = (admin_token_path(data), private_key_path(data))
    own = [path for path in data.iterdir() if is_own(path)]
    walks = [os.walk(path, topdown=False) for path in own if not path.is_symlink()]
    at_top = [path.name for path in own if not path.is_dir()]
    top: tuple[str, list[str], list[str]] = (str(data), [], at_top)
    for folder, _, files in chain(*walks, [top]):
        paths = [(Path(folder) / name, wanted & 0o666) for name in files]
        for path, mode in [*paths, (Path(folder), wanted)]:
            try:
                if path.is_file() and not path.is_symlink():
                    path.chmod(0o600 if path in private else mode)
                elif path.is_dir():
                    if path == data:
                        os.sync()
                    path.chmod(mode)
            except OSError:
                # Removed meanwhile, or owned by another user.
                foreign += path.exists()
    if foreign:
        text = "%s: the modes of %d files and folders could not be corrected; chown or chmod them"
        logger.warning(text, data, foreign)
