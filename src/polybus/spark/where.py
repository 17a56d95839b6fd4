"""Where the log is: a data folder that this machine can read, or a bus that answers HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polybus.errors import UsageError

DEFAULT_FOLDER = "polybus-data"
DATA_VARIABLE = "POLYBUS_DATA"


@dataclass(frozen=True, slots=True)
class Where:
    """A folder, or else the address of a bus with what it takes to be let in."""

    data: Path | None = None
    url: str | None = None
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return str(self.data or self.url)


def where(options: Mapping[str, str]) -> Where:
    """Option `data`, else `url`, else the environment's POLYBUS_DATA, else ./polybus-data.

    Paths are made absolute: a task may run in another folder.

    Raises:
        UsageError: `data.not-found`, none of them is there.
    """
    given = {name.lower(): value for name, value in options.items()}
    token = given.get("token") or None
    if given.get("data"):
        return Where(data=Path(given["data"]).expanduser().absolute(), token=token)
    if given.get("url"):
        return Where(url=given["url"].rstrip("/"), token=token)
    if os.environ.get(DATA_VARIABLE):
        return Where(data=Path(os.environ[DATA_VARIABLE]).expanduser().absolute(), token=token)
    local = Path(DEFAULT_FOLDER).absolute()
    if local.is_dir():
        return Where(data=local, token=token)
    text = f"there is no log: {local} is not there; set option data (a folder) or url (of a bus)"
    raise UsageError("data.not-found", text)
