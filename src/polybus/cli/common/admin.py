"""Calls to the bus that runs on a data folder, through its administration socket."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from polybus.client.http.blocking import GONE, request_json
from polybus.errors import PolybusError
from polybus.log.topics import storage_error
from polybus.processes import is_alive
from polybus.structs import decode

ANSWER_TIMEOUT_S = 30.0


class RunningBus(msgspec.Struct):
    """The content of run.json, which a bus writes when it starts."""

    pid: int
    addresses: list[str]
    admin: str


def running(data: Path) -> RunningBus | None:
    """The bus that runs on the folder now; None if there is none, or only its leftover file.

    Raises StorageError if that is unknown: run.json cannot be read.
    """
    path = data / "run.json"
    try:
        run = decode(path.read_bytes(), RunningBus)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise storage_error(error, f"cannot read {path}") from error
    return run if is_alive(run.pid) else None


def ask(
    run: RunningBus,
    method: str,
    path: str,
    body: Any = None,
    *,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> Any:
    """Make one call of the HTTP API and return its answer.

    Raises:
        PolybusError: the refusal of the bus, or `admin.unreachable`.
    """
    url = f"http+unix://{quote(run.admin, safe='')}"
    try:
        return request_json(url, method, path, body, timeout_s=timeout_s)
    except PolybusError as error:
        if error.code not in GONE:
            raise
        text = f"process {run.pid} does not answer at {run.admin}: {error.text}"
        raise PolybusError("admin.unreachable", text) from error
