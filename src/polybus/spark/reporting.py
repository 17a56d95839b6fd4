"""Reports of consumers on their way to the bus: never in the way of the query they are about.

A thread of its own sends them. Only the newest of each group waits; while the bus is away they stay
and are sent when it is back, and if there are too many groups the oldest go.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from polybus.client.http.blocking import GONE, bus_url, read_token, request
from polybus.errors import PolybusError
from polybus.spark.where import Where, where

logger = logging.getLogger("polybus.spark.consumers")

WAITING_MAX = 1000
RETRY_S = 1.0
SEND_TIMEOUT_S = 5.0
AWAY = (*GONE, "data.not-found")

Report = dict[str, Any]


class Reporter:
    """Sends reports to the bus of a folder or at an address; to the usual one if none is named."""

    def __init__(
        self, *, data: Path | None = None, url: str | None = None, token: str | None = None
    ) -> None:
        self._data = data
        self._url = url
        self._token = token
        self._waiting: dict[str, Report] = {}
        self._sending = False
        self._changed = threading.Condition()
        self._closed = False
        self._quiet = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="polybus-consumers", daemon=True)
        self._thread.start()

    def put(self, group: str, report: Report) -> None:
        """Send a report soon; what is left out of it stays as the last one said. Never blocks."""
        with self._changed:
            before = self._waiting.pop(group, {})
            self._waiting[group] = before | report
            while len(self._waiting) > WAITING_MAX:
                self._waiting.pop(next(iter(self._waiting)))
                self.dropped += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until everything is sent, or the time is over; say whether it is."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._waiting or self._sending:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(left_s)
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits, if that is quick, and end."""
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                group = next(iter(self._waiting))
                report = self._waiting.pop(group)
                self._sending = True
            again = not self._send(group, report)
            with self._changed:
                self._sending = False
                if again:
                    # What came meanwhile is newer.
                    self._waiting[group] = report | self._waiting.get(group, {})
                    self._changed.wait_for(lambda: self._closed, RETRY_S)
                self._changed.notify_all()

    def _bus(self) -> tuple[str, str | None]:
        """Where the bus is now: after a restart it may listen elsewhere."""
        found = Where(self._data, self._url) if self._data or self._url else where({})
        if found.data is not None:
            return bus_url(found.data), self._token or read_token(found.data)
        assert found.url is not None, "where gives one of them"
        return found.url, self._token

    def _send(self, group: str, report: Report) -> bool:
        """Say whether the report is done with: taken, or refused for good."""
        try:
            url, token = self._bus()
            path = f"/v1/consumers/{quote(group, safe='')}"
            body = json.dumps(report).encode()
            request(url, "PUT", path, body, token=token, timeout_s=SEND_TIMEOUT_S)
        except PolybusError as error:
            if not self._quiet:
                logger.info("positions are not reported now: %s", error.text)
            self._quiet = True
            return error.code not in AWAY
        except Exception:
            logger.exception("a position could not be reported")
            return True
        self._quiet = False
        return True
