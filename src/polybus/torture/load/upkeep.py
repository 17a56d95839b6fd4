"""The load on retention, and on backups of the running bus."""

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polybus.errors import PolybusError
from polybus.log.opening import open_reader
from polybus.log.verify.verify import VerifyReport
from polybus.services.backup import backup
from polybus.services.checking import verify
from polybus.torture.bus.child import TOPICS
from polybus.torture.load.side_load import SideLoad

EXPIRING = "expiring"
WRITER = "http"
MESSAGES = (1, 2, 10)
BACKUPS_SHARE = 0.3
BACKUP_S_MAX = 20.0
ATTEMPTS_MAX = 20


@dataclass
class UpkeepLoad(SideLoad):
    """A topic of which little is kept, and now and then a backup."""

    _is_made: bool = False
    _backups: int = 0

    def jobs(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [self._write, self._back_up]

    async def _write(self) -> None:
        """Retention leaves the newest file of history, and what is in the journal."""
        if not self._is_made:
            with contextlib.suppress(PolybusError):
                body = {"name": EXPIRING, "retention-bytes": 1}
                await self._child.ask("POST", "/v1/topics", body)
            self._is_made = True
        while not self._stopping.is_set():
            values = self._messages.take(EXPIRING, WRITER, self._chance.choice(MESSAGES))
            for value in values:
                path = f"/v1/topics/{EXPIRING}/messages"
                answer = await self._child.ask("POST", path, value.encode())
                self._messages.receipt(EXPIRING, [value], answer["offsets"][-1])
            await asyncio.sleep(self._chance.uniform(0, 0.1))

    async def check(self) -> None:
        """What is left of the topic is its end, without a gap. Raises PolybusError."""
        known = self._messages.receipted[EXPIRING].values()
        last = max((offset for offset in known if offset is not None), default=-1)
        if last < 0:
            return
        for attempt in range(ATTEMPTS_MAX):
            try:
                first = (await self._child.ask("GET", f"/v1/topics/{EXPIRING}"))["start"]
                stored = (await self._child.messages(EXPIRING, first))[1]
            except PolybusError as error:
                # Retention moved the start meanwhile.
                if error.code != "log.offset-unknown" or attempt == ATTEMPTS_MAX - 1:
                    raise
                continue
            if not any(text.startswith("?blob.unknown") for _, text in stored):
                break  # Else the message of a large payload expired meanwhile.
        if not stored:
            self._findings.violated("lost", f"{EXPIRING}: the last message, receipt {last}")
        # Retention may have left a single message, later than any with a receipt.
        start = stored[0][0] if stored else last + 1
        self._messages.check(EXPIRING, stored, self._findings, start=start)

    # Backups.

    async def _back_up(self) -> None:
        """Check that a copy of the running bus is intact and has all receipted messages."""
        if self._chance.random() >= BACKUPS_SHARE:
            return
        await asyncio.sleep(self._chance.uniform(0, 0.3))
        self._backups += 1
        target = self._child.folder / f"backup-{self._backups}"
        promised = {topic: dict(self._messages.receipted[topic]) for topic in TOPICS}
        is_done = await self._done_by_user(
            backup,
            *(self._child.data, target),
            is_over=lambda: self._stopping.is_set() or not self._child.is_alive,
            s_max=BACKUP_S_MAX,
        )
        if is_done:
            await asyncio.to_thread(self._check_copy, target, promised)
        await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)

    def _check_copy(self, copy: Path, promised: dict[str, dict[str, int | None]]) -> None:
        report: VerifyReport = verify(copy)
        if not report.intact:
            self._findings.violated("verify", f"a backup is damaged: {report.damages[0]}")
            return
        reader = open_reader(copy)
        for topic, values in promised.items():
            try:
                bounds = reader.bounds(topic)
                found = {
                    self._messages.resolved(value.decode())
                    for rows in reader.read(topic, 0, bounds.stop, columns=["value"])
                    for value in rows["value"].to_pylist()
                }
            except PolybusError as error:
                found = set()
                if error.code != "topic.unknown":
                    self._findings.violated("lost", f"a backup: {error}")
                    return
            for value in values.keys() - found:
                self._findings.violated("lost", f"a backup lacks {topic}: {value[:30]!r}")
                return
