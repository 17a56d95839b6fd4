"""Edits of accounts' config files: recorded in `$audit`, so that damage can be distinguished.

Such a file has no checksum, because people edit it. `config-seen.json` beside it has the checksum
of the content that the bus used last. So a change that no person made is visible: in `$audit`, in
`polybus accounts show`, and for a stopped bus in `polybus verify`.

Order of writes: the message in `$audit`, and when it is durable `config-seen.json`. After a crash
between the two the edit is recorded again. The same happens if `config-seen.json` is removed or
damaged.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from polybus.errors import PolybusError, StorageError
from polybus.log import checked_json
from polybus.log.disk import replace_file
from polybus.log.layout import CONFIG_SEEN, account_folder
from polybus.log.topics import storage_error
from polybus.services.accounts.settings import FILES
from polybus.services.events import iso_time

logger = logging.getLogger("polybus.accounts")
ACTION = "account-config"
RecordEdit = Callable[[tuple[str, str], str, str, Mapping[str, Any]], Awaitable[None]]


class SeenConfig(msgspec.Struct, frozen=True):
    """A version of an account's file: its name (empty if missing), its XXH3, and its time."""

    file: str = ""
    digest: str = ""
    changed: str = ""

    def is_as(self, other: "SeenConfig") -> bool:
        return (self.file, self.digest) == (other.file, other.digest)


class ConfigEdits:
    """Records the files that the bus begins to use."""

    def __init__(self, data: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._data = data
        self._loop = loop
        self.record: RecordEdit | None = None
        """The method of the AuditLog, which is created later."""
        self._unrecorded: dict[str, SeenConfig] = {}
        self._recording: asyncio.Task[None] | None = None

    def used(self, account: str) -> None:
        """The account's file was applied. Raises StorageError if it cannot be read any more."""
        found = found_config(self._data, account)
        if found.is_as(seen_config(self._data, account) or SeenConfig()):
            return
        self._unrecorded[account] = found
        if self._recording is None or self._recording.done():
            self._recording = self._loop.create_task(self._record_all())

    async def _record_all(self) -> None:
        while self._unrecorded and self.record is not None:
            account, found = next(iter(self._unrecorded.items()))
            try:
                detail = {"xxh3": found.digest, "changed": found.changed}
                await self.record(("", found.file), ACTION, account, detail)
                # This calls fsync.
                await self._loop.run_in_executor(None, self._keep, account, found)
            except PolybusError as error:
                logger.error("the config of %s was changed: %s", account, error)
            if self._unrecorded.get(account) is found:
                del self._unrecorded[account]

    def _keep(self, account: str, found: SeenConfig) -> None:
        folder = account_folder(self._data, account)
        try:
            if not found.file:
                (folder / CONFIG_SEEN).unlink(missing_ok=True)
            elif folder.is_dir():
                replace_file(folder / CONFIG_SEEN, checked_json.encode(found), mode=0o600)
        except OSError as error:
            logger.error("cannot write %s: %s", folder / CONFIG_SEEN, error)

    def close(self) -> None:
        if self._recording is not None:
            self._recording.cancel()


def found_config(data: Path, account: str) -> SeenConfig:
    """The file as it is now. Raises StorageError if it cannot be read."""
    for name in FILES:
        path = account_folder(data, account) / name
        try:
            content, changed_ns = path.read_bytes(), path.stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise storage_error(error, f"cannot read {path}") from error
        return SeenConfig(name, xxhash.xxh3_64_hexdigest(content), iso_time(changed_ns // 1000))
    return SeenConfig()


def seen_config(data: Path, account: str) -> SeenConfig | None:
    """The version of the file that the bus used last, if known."""
    path = account_folder(data, account) / CONFIG_SEEN
    try:
        return checked_json.decode(path.read_bytes(), SeenConfig, path)
    except (OSError, StorageError):
        return None


def unused_edit(data: Path, account: str) -> str | None:
    """How a file was changed since the bus used it; None if it was not, or if that is unknown.

    Raises StorageError if the file cannot be read.
    """
    seen, found = seen_config(data, account), found_config(data, account)
    if seen is None or seen.is_as(found):
        return None
    what = f"changed at {found.changed}" if found.file else "removed"
    return f"{what}, and not used by the bus yet; if no person changed it, it is damaged"
