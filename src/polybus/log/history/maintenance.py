"""Maintenance: a thread in the bus that starts the hand-over process, then applies retention.

Both change manifests, so they run here one after the other. Nothing of this touches the bus's own
thread or the committer, and a hand-over that fails is logged and tried again later: the journal
keeps everything meanwhile.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from polybus.errors import PolybusError

logger = logging.getLogger(__name__)

_LOG_LINES_MAX = 10
_LINE_BYTES_MAX = 64 << 10
_BACK_OFF_S_MAX = 600.0
_STOP_S = 1.0


class MaintainedLog(Protocol):
    """What maintenance needs of a log on disk. Called from the maintenance thread."""

    data: Path

    def sealed_segments(self) -> list[Path]: ...

    def after_handover(self, segments: list[Path]) -> None:
        """These segments are in history: load the manifests, then forget and delete them."""
        ...

    def apply_retention(self, now_us: int) -> None: ...


class Maintenance:
    """Runs hand-over and retention every `interval_s`, and soon after `nudge`.

    `retention_bytes` is the bus's own limit, which the hand-over makes files to fit.
    """

    def __init__(
        self,
        log: MaintainedLog,
        *,
        interval_s: float,
        retention_bytes: int | None = None,
        command: list[str] | None = None,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._log = log
        self._interval_s = interval_s
        self._command = command or [
            *(sys.executable, "-m", "polybus.log.history.handover"),
            *("--data", str(log.data)),
        ]
        if command is None and retention_bytes is not None:
            self._command += ["--retention-bytes", str(retention_bytes)]
        self._clock_us = clock_us
        self._wake = threading.Event()
        self._stopping = False
        self._child: subprocess.Popen[bytes] | None = None
        self._child_lock = threading.Lock()
        self._failures = 0
        self._stuck: list[Path] = []
        self._stuck_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="polybus-maintenance", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def nudge(self) -> None:
        """There is something to hand over; do not wait for the interval. From any thread."""
        self._wake.set()

    def stop(self) -> None:
        """End within about a second; a hand-over at work is killed, which it is made for."""
        with self._child_lock:
            self._stopping = True
            if self._child is not None:
                self._child.kill()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._stopping:
            # After a failure a nudge does not shorten the wait: the disk needs time, not attempts.
            if self._failures:
                delay_s = min(_BACK_OFF_S_MAX, self._interval_s * 2**self._failures)
                self._sleep(delay_s)
            else:
                self._wake.wait(self._interval_s)
            self._wake.clear()
            if not self._stopping:
                self.run_once()

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            self._wake.wait(left)
            self._wake.clear()

    def run_once(self) -> None:
        """One round, in the calling thread. Never raises: what fails is logged and tried again."""
        try:
            self._hand_over()
            if not self._stopping:
                self._log.apply_retention(self._clock_us())
            self._failures = 0
        except (PolybusError, OSError, _HandoverFailed) as error:
            if not self._stopping:
                self._failures = min(self._failures + 1, 16)
                logger.warning("maintenance failed and will be tried again: %s", error)
        except Exception:
            # A bug must not end the thread: nothing would be handed over or removed any more.
            self._failures = min(self._failures + 1, 16)
            logger.exception("maintenance failed and will be tried again")

    def _hand_over(self) -> None:
        sealed = self._log.sealed_segments()
        # Segments that damage keeps from being deleted would start a process every interval.
        stuck = sealed == self._stuck and time.monotonic() < self._stuck_until_s
        if not sealed or stuck:
            return
        self._run_process(set(sealed))
        self._stuck = [segment for segment in self._log.sealed_segments() if segment in sealed]
        self._stuck_until_s = time.monotonic() + _BACK_OFF_S_MAX

    def _run_process(self, sealed: set[Path]) -> None:
        with self._child_lock:
            if self._stopping:
                return
            self._child = child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        try:
            self._listen(child, sealed)
        finally:
            with self._child_lock:
                self._child = None
            child.kill()
            child.wait()
        if child.returncode != 0:
            raise _HandoverFailed(f"the hand-over process ended with {child.returncode}")

    def _listen(self, child: subprocess.Popen[bytes], sealed: set[Path]) -> None:
        """Follow what the process says until it ends, and tell the log which segments are done."""
        assert child.stdout is not None
        done: list[Path] = []
        told_s = time.monotonic()
        lines = _LimitedLog()
        with child.stdout:
            while text := child.stdout.readline(_LINE_BYTES_MAX):
                segment = _segment_in(text, lines)
                if segment in sealed:
                    done.append(segment)
                if done and time.monotonic() - told_s > 1.0 and not self._stopping:
                    self._log.after_handover(done)
                    done, told_s = [], time.monotonic()
        child.wait()
        lines.end()
        if not self._stopping:
            # Also with none done: topics of a segment that is kept may have moved on.
            self._log.after_handover(done)


class _HandoverFailed(Exception):
    """The hand-over process did not end well; its own words are in the log."""


class _Line(msgspec.Struct):
    """A line of the hand-over process."""

    segment: str | None = None
    progress: str | None = None


class _LimitedLog:
    """Logs the first lines and counts the others."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, text: str) -> None:
        self._count += 1
        if self._count <= _LOG_LINES_MAX:
            logger.warning("hand-over: %s", text)

    def end(self) -> None:
        if self._count > _LOG_LINES_MAX:
            logger.warning("hand-over: and %d lines more", self._count - _LOG_LINES_MAX)


def _segment_in(text: bytes, lines: _LimitedLog) -> Path | None:
    """The segment a line says is done. What is no line of ours is an error of the process."""
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.DecodeError:
        lines.add(text.decode(errors="replace").rstrip())
        return None
    if line.progress is not None and line.progress.startswith("damaged"):
        lines.add(line.progress)
    return None if line.segment is None else Path(line.segment)
