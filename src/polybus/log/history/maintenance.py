"""Maintenance: a thread of the bus that runs the hand-over process and then applies retention.

Both change manifests, so they run one after the other. They do not involve the thread of the bus or
the committer. A failed hand-over is logged and retried with back-off; the journal keeps everything
meanwhile.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from polybus.errors import PolybusError
from polybus.structs import decode

logger = logging.getLogger(__name__)

_LOG_LINES_MAX = 10
_LINE_BYTES_MAX = 64 << 10
_BACK_OFF_S_MAX = 600.0
_STOP_S = 1.0


class MaintainedLog(Protocol):
    """The methods of a log that maintenance calls from its thread."""

    data: Path

    def sealed_segments(self) -> list[Path]: ...

    def after_handover(self, segments: list[Path]) -> None:
        """These segments are in history: reload the manifests and delete the segments."""

    def apply_retention(self, now_us: int) -> None:
        """Remove what is beyond the limits, and what the trash has of topics without rows."""


class Maintenance:
    """Runs hand-over and retention every `interval_s`.

    `retention_bytes` is the limit of the bus, which the hand-over sizes files for.
    """

    start_process = subprocess.Popen
    """How a hand-over is started; `polybus torture` forks it (torture/bus/warm.py)."""

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
            *("--data", str(log.data), "--parent", str(os.getpid())),
        ]
        self.retention_bytes = retention_bytes
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

    def stop(self) -> None:
        """Stop within about a second. A running hand-over is killed, which is safe."""
        with self._child_lock:
            self._stopping = True
            if self._child is not None:
                self._child.kill()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._stopping:
            back_off_s = min(_BACK_OFF_S_MAX, self._interval_s * 2**self._failures)
            self._wake.wait(back_off_s if self._failures else self._interval_s)
            if not self._stopping:
                self.run_once()

    def run_once(self) -> None:
        """Run once in the calling thread. Never raises: a failure is logged and retried."""
        # Retention needs no hand-over that succeeds, and may make the room that one lacks.
        done = [self._attempt(work) for work in (self._hand_over, self._retain)]
        self._failures = 0 if all(done) else min(self._failures + 1, 16)

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            if not self._stopping:
                work()
        except (PolybusError, OSError) as error:
            if not self._stopping:
                logger.warning("maintenance failed and will be retried: %s", error)
            return False
        except Exception:
            # A bug must not end the thread, or nothing would be handed over any more.
            logger.exception("maintenance failed and will be retried")
            return False
        return True

    def _retain(self) -> None:
        self._log.apply_retention(self._clock_us())

    def _hand_over(self) -> None:
        sealed = self._log.sealed_segments()
        # Damaged segments are never deleted; do not start a process for them every interval.
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
            limit = self.retention_bytes
            more = [] if limit is None else ["--retention-bytes", str(limit)]
            self._child = child = self.start_process(
                [*self._command, *more],
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
            raise ChildProcessError(f"the hand-over process ended with {child.returncode}")

    def _listen(self, child: subprocess.Popen[bytes], sealed: set[Path]) -> None:
        """Read the output of the process until it ends; tell the log which segments are done."""
        assert child.stdout is not None
        done: list[Path] = []
        told_s = time.monotonic()
        other_lines = 0
        with child.stdout:
            while text := child.stdout.readline(_LINE_BYTES_MAX):
                segment = _segment_in(text)
                if segment in sealed:
                    done.append(segment)
                elif segment is None:
                    other_lines += 1
                    if other_lines <= _LOG_LINES_MAX:
                        logger.warning("hand-over: %s", text.decode(errors="replace").rstrip())
                if done and time.monotonic() - told_s > 1.0 and not self._stopping:
                    self._log.after_handover(done)
                    done, told_s = [], time.monotonic()
        child.wait()
        if other_lines > _LOG_LINES_MAX:
            logger.warning("hand-over: %d further lines", other_lines - _LOG_LINES_MAX)
        if not self._stopping:
            # Also without a segment: topics of a kept segment may have been handed over.
            self._log.after_handover(done)


class _Line(msgspec.Struct):
    """The line that the hand-over process prints for a segment that is done."""

    segment: str


def _segment_in(text: bytes) -> Path | None:
    """The segment that a line reports as done. Any other output reports damage or an error."""
    try:
        return Path(decode(text, _Line).segment)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
