"""Where the log of a reader, writer or pipeline is, and how to call the bus that owns it.

Source and sink read the log from a data folder if they can, and over HTTP if an URL is given. All
HTTP calls of this package share one policy: while the bus is away they are repeated with back-off,
and what the bus refuses is raised at once.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from polybus.client.http.blocking import ANSWER_TIMEOUT_S, GONE, bus_url, read_token, request
from polybus.client.http.connection import JSON
from polybus.client.retry import Backoff
from polybus.errors import BusyError, PolybusError, UsageError

DATA_VARIABLE = "POLYBUS_DATA"
DEFAULT_FOLDER = "polybus-data"
OCTETS = "application/octet-stream"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BusLocation:
    """A data folder, and the URL of the bus if its log is not in that folder."""

    data: Path = Path(DEFAULT_FOLDER)
    url: str | None = None
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.url or str(self.data)

    def options(self) -> dict[str, str]:
        """The location as options of the source and the sink."""
        if self.url is None:
            return {"data": str(self.data)}
        return {"url": self.url} | ({"token": self.token} if self.token else {})

    def missing_options(self, given: Mapping[str, Any]) -> dict[str, str]:
        """The location as options, unless the given ones already have one."""
        return {} if {name.lower() for name in given} & {"data", "url"} else self.options()

    def address(self) -> tuple[str, str | None]:
        """The URL and the token to use now: a bus that restarts may listen on another port.

        Raises:
            UsageError: `client.unreachable`, no bus runs on the data folder.
        """
        if self.url is not None:
            return self.url, self.token
        return bus_url(self.data), self.token or read_token(self.data)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        patience_s: float = 0.0,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Any:
        """Send a request with bytes or JSON and return the JSON that the bus answers.

        A request may arrive twice: the bus must treat it as idempotent if `patience_s` is not 0.

        Raises:
            UsageError, BusyError, StorageError: the bus refused, with its own code and text.
            PolybusError: the bus is still away after `patience_s`.
        """
        is_bytes = isinstance(body, bytes)
        content = body if is_bytes or body is None else json.dumps(body).encode()

        def send() -> Any:
            url, token = self.address()
            answer = request(
                url,
                method,
                path,
                content,
                token=token,
                content_type=OCTETS if is_bytes else JSON,
                timeout_s=timeout_s,
            )
            return json.loads(answer) if answer else None

        return retried(send, patience_s=patience_s)


class Retry:
    """Waits with back-off between the attempts of one call."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.reset()

    def reset(self) -> None:
        """Start over, because an attempt made progress."""
        self._backoff = Backoff(delay_s_max=1.0)
        self._deadline_s = time.monotonic() + self._patience_s

    def wait(self, error: PolybusError) -> None:
        """Wait before the next attempt; raise the error if another attempt is of no use."""
        pause_s = self._backoff.next_s()
        is_temporary = error.code in GONE or isinstance(error, BusyError)
        if not is_temporary or time.monotonic() + pause_s > self._deadline_s:
            raise error
        time.sleep(pause_s)


def retried(work: Callable[[], T], *, patience_s: float) -> T:
    """Do idempotent work; repeat it for up to `patience_s` while the bus is away or busy."""
    retry = Retry(patience_s)
    while True:
        try:
            return work()
        except PolybusError as error:
            retry.wait(error)


def find_location(given: Mapping[str, str]) -> BusLocation:
    """Option `data`, else `url`, else the variable POLYBUS_DATA, else the folder ./polybus-data.

    Paths become absolute because a task may run in another folder.

    Raises:
        UsageError: `data.not-found`, nothing is given and ./polybus-data does not exist.
    """
    token = given.get("token") or None
    url = given.get("url")
    folder = given.get("data") or os.environ.get(DATA_VARIABLE) or DEFAULT_FOLDER
    data = Path(folder).expanduser().absolute()
    if url and not given.get("data"):
        return BusLocation(data, url.rstrip("/"), token)
    if folder == DEFAULT_FOLDER and not data.is_dir():
        text = f"there is no log: {data} does not exist; set option data (a folder) or url (a bus)"
        raise UsageError("data.not-found", text)
    return BusLocation(data, None, token)
